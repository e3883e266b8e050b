"""A queue of runs over workers, which share out this machine's cores and GPUs; `benchmark` and `tune` are made of it.

A run is a process with a directory of its own. One that is finished is not repeated, and one that was broken off goes
on: the same command with the same run directory does either.
"""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple

import tyro

import cleanba
from cleanba.core.processes import SUPERVISED
from cleanba.core.run import differences
from cleanba.core.usage import usage_error
from cleanba.tools.launch import read_script
from cleanba.tools.runs import read_config, read_records

# The 57 games of Wang et al. 2016 (arXiv:1511.06581), as EnvPool names them.
ATARI57 = """
    Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing Breakout
    Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk Enduro FishingDerby Freeway Frostbite Gopher
    Gravitar Hero IceHockey Jamesbond Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix
    Pitfall Pong PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner
    Surround Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon
"""
ENV_SETS = {"atari57": tuple(f"{game}-v5" for game in ATARI57.split())}
OWN = {"--env-id": "--env-ids", "--seed": "--num-seeds and --start-seed", "--run-dir": "--run-dir before the --"}
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LAST_LINES = 12  # of a failed run's output that are shown
LOOK_EVERY = 5.0  # seconds between looks at the runs under way


class Job(NamedTuple):
    """A run to be done."""

    args: Any  # the script's
    run_dir: Path
    command: list[str]

    @property
    def log(self) -> Path:
        """What the run prints; beside its directory, which must be empty or a run's."""
        return self.run_dir.with_name(f"{self.run_dir.name}.log")

    @property
    def result(self) -> dict[str, Any] | None:
        """The run's result.json, once it is finished."""
        try:
            return json.loads((self.run_dir / "result.json").read_text())
        except FileNotFoundError:
            return None

    @property
    def state(self) -> str:
        """New, how far it is, or finished."""
        if self.result is not None:
            return "finished"
        updates = [record["update"] for record in read_records(self.run_dir)]
        return f"{updates[-1] / self.args.num_updates:.0%}" if updates else "new"


class Ended(NamedTuple):
    """How a run's process ended; the exit status is negative if a signal ended it."""

    job: Job
    status: int
    seconds: float
    said: list[str]  # its last lines

    @property
    def failed(self) -> bool:
        """It has no result, however it ended."""
        return self.status != 0 or self.job.result is None


class Share(NamedTuple):
    """A worker's part of the machine: cores, none if all share all of them; GPUs, none if it computes on the CPU."""

    cores: tuple[int, ...]
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        cores = f"cores {ranges(self.cores)}" if len(self.cores) > 1 else f"core {self.cores[0]}" if self.cores else ""
        gpus = f"GPU{'s' * (len(self.gpus) > 1)} {','.join(self.gpus)}" if self.gpus else ""
        return ", ".join(filter(None, [cores or "all cores", gpus]))


def ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> 0-2,5"""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def gpus_here() -> list[str]:
    """The GPUs that JAX may use: those of CUDA_VISIBLE_DEVICES, or all that nvidia-smi lists."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False).stdout
    return [str(i) for i, _ in enumerate(line for line in listed.splitlines() if line.startswith("GPU "))]


def share_out(workers: int, gpus_each: int) -> list[Share]:
    """Neighbouring cores for each worker, and as many GPUs as a run's topology names."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    gpus = gpus_here()
    if gpus and len(gpus) < workers * gpus_each:
        fitting = f"--workers {len(gpus) // gpus_each}, or " if len(gpus) >= gpus_each else ""
        usage_error(
            f"--workers {workers} with {gpus_each} GPUs each: there are {len(gpus)} GPUs; use {fitting}"
            "JAX_PLATFORMS=cpu to compute on the CPU"
        )
    bounds = [i * len(cores) // workers for i in range(workers + 1)] if len(cores) >= workers else [0] * (workers + 1)
    return [
        Share(
            tuple(cores[bounds[i] : bounds[i + 1]]),
            tuple(gpus[i * gpus_each : (i + 1) * gpus_each]),
        )
        for i in range(workers)
    ]


class Signals:
    """Signals to this process as a stream that can be waited for; meanwhile none of them interrupts anything."""

    def __enter__(self) -> "Signals":
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._pipe[1])
        self._handlers = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGCHLD, *STOP)}
        return self

    def wait(self, seconds: float) -> bytes:
        """The numbers of the signals that have come; none after so many seconds without one."""
        return os.read(self._pipe[0], 4096) if select.select([self._pipe[0]], [], [], seconds)[0] else b""

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._before)
        for end in self._pipe:
            os.close(end)


@dataclass
class Running:
    """A run's process, in a session of its own, so that Ctrl-C at the terminal does not reach it twice."""

    job: Job
    share: Share
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    log_start: int  # what earlier sessions wrote
    began: float

    def send(self, signum: int) -> None:
        """To the whole session: the command may be a wrapper around the script."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def close(self) -> Ended:
        """Once the process has ended."""
        status = self.process.wait()
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.log.close()
        with self.job.log.open("rb") as log:
            log.seek(self.log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return Ended(self.job, status, time.monotonic() - self.began, lines[-LAST_LINES:])


class Workers:
    """Runs jobs, one for each share of the machine at a time.

    A signal to this process (`signal`, 0 if there was none) ends all runs, which save a checkpoint, and begins no
    other; a second Ctrl-C does not wait for them. Should this process vanish, the runs notice and leave.
    """

    def __init__(self, shares: Sequence[Share]):
        self.signal = 0
        self._signal_time = 0.0
        self._idle, self._running = list(shares), list[Running]()
        self._signals = Signals()

    def __enter__(self) -> "Workers":
        self._signals.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        for running in self._running:  # only after an exception
            running.send(signal.SIGTERM)
        for running in self._running:
            running.close()
        self._signals.__exit__(*error)

    def run(self, jobs: Iterable[Job], look: Callable[[], None] = lambda: None) -> Iterator[Ended]:
        """The jobs as they end. The next is asked for when a worker is free; `look` is called every few seconds."""
        queue = iter(jobs)
        while True:
            while self._idle and not self.signal and (job := next(queue, None)) is not None:
                self._start(job)
            if not self._running:
                return
            for signum in self._signals.wait(LOOK_EVERY):
                if signum in STOP:
                    self._stop_all(signum)
            for running in [r for r in self._running if r.process.poll() is not None]:
                self._running.remove(running)
                self._idle.append(running.share)
                yield running.close()
            look()

    def stop(self, run_dirs: Iterable[Path]) -> None:
        """End these runs, if they are under way."""
        for running in self._running:
            if running.job.run_dir in run_dirs:
                running.send(signal.SIGTERM)

    def _start(self, job: Job) -> None:
        share = self._idle.pop(0)
        job.run_dir.parent.mkdir(parents=True, exist_ok=True)
        log = job.log.open("ab")
        environment = os.environ | {SUPERVISED: "1"}  # with standard input: the run leaves when this process is gone
        if share.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(share.gpus)
        with on_cores(share.cores):
            process = subprocess.Popen(
                job.command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append(Running(job, share, process, log, log.tell(), time.monotonic()))
        print(f"started   {job.run_dir} on {share}", flush=True)

    def _stop_all(self, signum: int) -> None:
        again = bool(self.signal)
        if again and not (signum == signal.SIGINT and time.monotonic() - self._signal_time > 1):
            return  # the same Ctrl-C, handed on, or a scheduler that repeats itself
        if not again:
            self.signal, self._signal_time = signum, time.monotonic()
            print(f"{signal.Signals(signum).name}: the runs under way save a checkpoint and end", flush=True)
        for running in self._running:
            running.send(signal.SIGKILL if again else signal.SIGTERM)


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """What is started here has these cores, or those of this process if there are none."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def show_failures(failures: Sequence[Ended]) -> None:
    """Each with its last lines."""
    for ended in failures:
        how = f"status {ended.status}" if ended.status >= 0 else signal.Signals(-ended.status).name
        print(f"\nFAILED {ended.job.run_dir} ({how}); the end of {ended.job.log}:", file=sys.stderr)
        print("\n".join(f"    {line}" for line in ended.said), file=sys.stderr, flush=True)


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A table whose columns line up as plain text too: the first to the left, the others to the right."""
    cells = [list(map(str, row)) for row in rows]
    widths = [max(3, *(len(row[i]) for row in [list(header), *cells])) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        padded = [f"{text:{'>' if i else '<'}{widths[i]}}" for i, text in enumerate(row)]
        return f"| {' | '.join(padded)} |"

    rule = [f"{'-' * (width - 1)}:" if i else "-" * width for i, width in enumerate(widths)]
    return [line(header), line(rule), *map(line, cells)]


def find_script(name: str) -> Path:
    """A path, or the name of one of Cleanba's own files."""
    own = Path(cleanba.__file__).parent / Path(name).name
    path = own if str(Path(name).parent) == "." and own.is_file() and not Path(name).exists() else Path(name)
    if not (path.is_file() and path.suffix == ".py"):
        usage_error(f"{name} is not a Python file; name an algorithm's, such as ppo.py or the path of your own")
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@dataclass(frozen=True)
class Grid:
    """An algorithm on each of some environments, with each of some seeds."""

    script: str = ""
    """the algorithm's file: a path, or the name of one of Cleanba's, such as ppo.py"""
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- ARGUMENTS")] = ()
    """what every run gets besides --env-id, --seed and --run-dir"""
    env_ids: tuple[str, ...] = ()
    """environments; atari57 stands for the 57 games of the Atari benchmark"""
    num_seeds: int = 3
    """seeds of each environment"""
    start_seed: int = 1
    """the first of them"""
    workers: int = 1
    """runs at a time; they share out the cores, and the GPUs if there are any; 0: only show the plan"""
    run_dir: str = ""
    """where everything goes; the same command with the same folder goes on"""
    dry_run: bool = False
    """show the plan and start nothing"""

    def program(self) -> tuple[list[str], Path, list[str]]:
        """What starts the script, the script, and what every run gets."""
        if not self.script:
            usage_error("name an algorithm's file, such as --script ppo.py")
        return [sys.executable], find_script(self.script), list(self.arguments)

    @property
    def all_env_ids(self) -> list[str]:
        """With the sets' members in place of their names."""
        return [env_id for name in self.env_ids for env_id in ENV_SETS.get(name, (name,))]

    @property
    def seeds(self) -> range:
        """Of each environment."""
        return range(self.start_seed, self.start_seed + self.num_seeds)

    def check(self) -> Any:
        """Exit with one line if no such grid can be run; otherwise the arguments of its first run."""
        starter, script, arguments = self.program()
        for option, value, least in (("num-seeds", self.num_seeds, 1), ("workers", self.workers, 0)):
            if value < least:
                usage_error(f"--{option} {value} must be at least {least}")
        if not self.env_ids:
            usage_error("name environments, such as --env-ids CartPole-v1 Acrobot-v1, or --env-ids atari57")
        if twice := sorted({x for x in self.all_env_ids if self.all_env_ids.count(x) > 1}):
            usage_error(f"--env-ids names {', '.join(twice)} twice")
        for name in (word.split("=")[0].replace("_", "-") for word in arguments):
            if name in OWN:
                usage_error(f"{name} is not for every run; use {OWN[name]}")
        if shutil.which(starter[0]) is None:
            usage_error(f"there is no program {starter[0]!r} to start {script} with")
        first = read_script(script, ["--env-id", self.all_env_ids[0], "--seed", str(self.start_seed), *arguments])
        for seed in (self.start_seed, self.seeds[-1]):
            replace(first, seed=seed).check()
        # Of a set's members one stands for all: looking at an Atari game takes half a second.
        set_of = {env_id: name for name, members in ENV_SETS.items() for env_id in members}
        for env_id in {set_of.get(env_id, env_id): env_id for env_id in self.all_env_ids}.values():
            replace(first, env_id=env_id).check()
        return first

    def name(self, first: Any) -> str:
        """What the runs are called after: --exp-name, or the script."""
        return self._name_of(replace(first, env_id="", seed=0)).removeprefix("__").removesuffix("__0")

    def _name_of(self, args: Any) -> str:
        return args.run_name(self.program()[1].stem, 0).rsplit("__", 1)[0]

    def jobs(self, folder: Path, args: Any, words: Sequence[str] = ()) -> list[Job]:
        """The runs, the first seed of all environments before the second; `words` are more arguments of each.

        Exits with one line if a run's directory is another experiment's.
        """
        starter, script, arguments = self.program()
        found = []
        for seed in self.seeds:
            for env_id in self.all_env_ids:
                own = replace(args, env_id=env_id, seed=seed)
                run_dir = folder / self._name_of(own)
                where = ["--env-id", env_id, "--seed", str(seed), "--run-dir", str(run_dir)]
                found.append(Job(own, run_dir, [*starter, str(script), *arguments, *words, *where]))
                if (run_dir / "config.json").exists() and (
                    differing := differences(read_config(run_dir), own, script.stem)
                ):
                    usage_error(f"{run_dir} holds another experiment ({'; '.join(differing)}); name another --run-dir")
        return found

    def shares(self, args: Any) -> list[Share]:
        """What each worker gets."""
        return share_out(self.workers or 1, args.layout.devices_needed * args.layout.processes)
