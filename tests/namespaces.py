"""Machines for the processes of a run, made of network namespaces on one switch, and ways to lose one of them.

Needs root and `ip`. As a program it breaks a run in every way and prints a row of a table for each:

    python tests/namespaces.py --peer-timeout 10 link-1 stop-0
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
SIZES = "--env-id CartPole-v1 --num-envs 16 --num-shards 4 --num-steps 32"
FAULTS = ("link", "lost", "stop", "kill")


class Ended(NamedTuple):
    seconds: float  # after the fault
    status: int
    output: str


class Machines:
    """So many machines, 10.77.0.1 and on, each with an interface eth0 on a switch of their own."""

    def __init__(self, count: int):
        self.count = count
        self._switch = f"cleanba-{os.getpid()}-switch"

    def name(self, machine: int) -> str:
        return f"cleanba-{os.getpid()}-{machine}"

    def __enter__(self) -> "Machines":
        try:
            _ip(f"netns add {self._switch}")
            _ip(f"-n {self._switch} link add switch up type bridge")
            for i in range(self.count):
                _ip(f"netns add {self.name(i)}")
                _ip(f"-n {self.name(i)} link add eth0 type veth peer name port{i} netns {self._switch}")
                _ip(f"-n {self._switch} link set port{i} up master switch")
                _ip(f"-n {self.name(i)} address add 10.77.0.{i + 1}/24 dev eth0")
                _ip(f"-n {self.name(i)} link set eth0 up")
                _ip(f"-n {self.name(i)} link set lo up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [self._switch, *map(self.name, range(self.count))]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns delete {name}")

    def unplug(self, machine: int) -> None:
        """The machine sees its link go down."""
        _ip(f"-n {self.name(machine)} link set eth0 down")

    def lose_packets(self, machine: int) -> None:
        """All packets from and to the machine vanish, and nobody sees a reason."""
        _ip(f"-n {self._switch} link set port{machine} nomaster")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    try:
        with Machines(1):
            return ""
    except FileNotFoundError:
        return "there is no `ip` command"
    except subprocess.CalledProcessError as error:
        return f"no network namespaces: {error.stderr.decode().strip()}"


class Spread:
    """A run with one process on each machine."""

    def __init__(self, machines: Machines, run_dir: Path, arguments: str):
        self.machines, self.run_dir = machines, run_dir
        script = f"{ROOT}/cleanba/ppo.py --topology a0-l0-d{machines.count} --run-dir {run_dir} {arguments}"
        place = {"JAX_COORDINATOR_ADDRESS": "10.77.0.1:7777", "JAX_NUM_PROCESSES": str(machines.count)}
        self._outputs = [run_dir.with_name(f"{run_dir.name}-process-{i}.txt") for i in range(machines.count)]
        self.processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", machines.name(i), sys.executable, *script.split()],
                env=os.environ | place | {"JAX_PROCESS_ID": str(i)},
                stdin=subprocess.DEVNULL,
                stdout=output.open("w"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for i, output in enumerate(self._outputs)
        ]

    def __enter__(self) -> "Spread":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def output(self, process: int) -> str:
        return self._outputs[process].read_text()

    def wait_for_checkpoint(self, seconds: float = 180) -> None:
        deadline = time.monotonic() + seconds
        while not checkpoints(self.run_dir):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                raise TimeoutError("no checkpoint:\n" + "\n".join(map(self.output, range(self.machines.count))))
            time.sleep(0.05)

    def break_by(self, fault: str, victim: int) -> None:
        """`link` down, packets `lost`, process `stop`ped or `kill`ed."""
        if fault == "link":
            self.machines.unplug(victim)
        elif fault == "lost":
            self.machines.lose_packets(victim)
        else:
            self.processes[victim].send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

    def ends(self, since: float, seconds: float, without: int | None = None) -> dict[int, Ended]:
        """Each process's end, except one that cannot; those that have not come to it in time are left out."""
        ended: dict[int, Ended] = {}
        waiting = set(range(self.machines.count)) - {without}
        while waiting and time.monotonic() < since + seconds:
            for i in [i for i in waiting if self.processes[i].poll() is not None]:
                waiting.remove(i)
                ended[i] = Ended(time.monotonic() - since, self.processes[i].returncode, self.output(i))
            time.sleep(0.02)
        return ended


def checkpoints(run_dir: Path) -> list[int]:
    """The updates that there are complete checkpoints of."""
    return sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit())


def finish(run_dir: Path, arguments: str) -> str:
    """Begin the run or go on with it, in one process on this machine; the fingerprint at its end."""
    script = f"{ROOT}/cleanba/ppo.py --topology a0-l0-d1 --run-dir {run_dir} {arguments}"
    subprocess.run([sys.executable, *script.split()], check=True, capture_output=True, timeout=500)
    return json.loads((run_dir / "result.json").read_text())["fingerprint"]


@contextlib.contextmanager
def broken_run(run_dir: Path, arguments: str, fault: str, victim: int, count: int = 2) -> Iterator[tuple[Spread, float]]:
    """A run that has made a checkpoint and then suffered this, and when."""
    with Machines(count) as machines, Spread(machines, run_dir, arguments) as run:
        run.wait_for_checkpoint()
        now = time.monotonic()
        run.break_by(fault, victim)
        yield run, now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("faults", nargs="*", help=f"{', '.join(FAULTS)}, and the process: stop-0 (default: all, of 0 and 1)")
    parser.add_argument("--peer-timeout", type=float, default=10.0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--updates", type=int, default=512)
    parser.add_argument("--keep", default="")
    args = parser.parse_args()
    folder = Path(args.keep or tempfile.mkdtemp(prefix="cleanba-network-"))
    folder.mkdir(exist_ok=True)
    arguments = f"{SIZES} --total-timesteps {args.updates * 512} --checkpoint-every 4 --peer-timeout {args.peer_timeout}"
    reference = folder / "reference"
    expected = finish(reference, arguments) if not (reference / "result.json").exists() else json.loads((reference / "result.json").read_text())["fingerprint"]
    for name in args.faults or [f"{fault}-{victim}" for fault in FAULTS for victim in (0, 1)]:
        fault, victim = name.split("-")[0], int(name.split("-")[1])
        run_dir = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=folder)) / "run"
        with broken_run(run_dir, arguments, fault, victim, args.processes) as (run, since):
            ends = run.ends(since, 2 * args.peer_timeout + 200, without=victim if fault == "stop" else None)
            last = checkpoints(run_dir)[-1]
            if fault == "stop":
                run.processes[victim].send_signal(signal.SIGCONT)
                again = time.monotonic()
                ends |= {i: e for i, e in run.ends(again, 240).items() if i not in ends}
            for i in range(args.processes):
                if i in ends:
                    print(f"| {name} | {i} | {ends[i].seconds:.1f} s | {ends[i].status} | ", flush=True)
                    print("     " + "\n     ".join(ends[i].output.splitlines()[-12:]), flush=True)
                else:
                    print(f"| {name} | {i} | HANGS", flush=True)
        before = time.monotonic()
        equal = finish(run_dir, arguments) == expected
        print(f"| {name} | resumed after update {last}: {'equal' if equal else 'DIFFERENT'} ({time.monotonic()-before:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
