"""A run and what it leaves behind: its directory, metrics, progress and trackers; and how it ends, well or badly."""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from cleanba.core import evaluate
from cleanba.core.actors import Collected
from cleanba.core.args import CoreArgs
from cleanba.core.checkpoint import Checkpoints, Snapshot, like
from cleanba.core.display import Display
from cleanba.core.envs import EnvError
from cleanba.core.lockstep import Lockstep
from cleanba.core.processes import PeerLost, Peers
from cleanba.core.records import Records, warn, write_json
from cleanba.core.shards import State
from cleanba.core.usage import usage_error
from cleanba.tools import hub

WINDOW = 100  # episodes that the displayed and final return is the mean of
WRITTEN, FAILED = 1, 2  # how a process's part of a checkpoint went


def flatten(params: Any) -> dict[str, np.ndarray]:
    """Parameters by name, in canonical order."""
    return {name: np.asarray(x) for name, x in sorted(flatten_dict(jax.device_get(params), sep="/").items())}


def fingerprint(params: Any) -> str:
    """SHA-256 over names, types, shapes and bits of the parameters."""
    digest = hashlib.sha256()
    for name, x in flatten(params).items():
        digest.update(f"{name} {x.dtype} {x.shape}\n".encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to end; it can be gone on with."""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.status = 128 + signum


class Run:
    """Context of a run: `updates` counts them, `log` records them, `finish` saves and evaluates the result.

    Entering an unfinished run's directory goes on after its last checkpoint. Process 0 writes what belongs to all.
    """

    def __init__(self, args: CoreArgs):
        self.args, self.place = args, args.place
        self.peers = Peers(self.place, args.peer_timeout, args.layout.gather)
        self.algorithm = Path(sys.modules[type(args).__module__].__file__ or "interactive").stem
        self.lockstep = Lockstep(args.num_updates, args.concurrency, len(args.layout.actors) * args.num_actor_threads)
        self.global_step = 0
        self.done = 0  # updates of earlier sessions
        self.act: Any = None  # the policy, once there are actors
        self.acting: Any = None  # the parameters that the rollout under way uses, where they are not the newest
        self.carries: dict[int, Any] = {}  # to resume a recurrent policy with
        self._restored: Snapshot | None = None
        self._fresh_since = 1  # the first rollout that no longer needs the actions before it
        self._latest: Snapshot | None = None
        # The updates of the last complete checkpoint, of the one being written, and of the last that was tried.
        self._saved = self._pending = self._tried = 0
        self._held = contextlib.ExitStack()  # the signals and the directory, while the run lasts
        self._last_checkpoint = time.monotonic()
        self._signal, self._signal_time, self._is_breakable = 0, 0.0, True
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._display = Display(args.num_updates, visible=self._is_main and not args.quiet)
        self._timed_from: tuple[float, int] | None = None
        self._last_fingerprint = ""
        self._player: evaluate.Player | None = None
        self._film: evaluate.Film | None = None

    @property
    def _is_main(self) -> bool:
        return self.place.process == 0

    def __enter__(self) -> "Run":
        try:
            self.peers.connect()
            self._listen_to_signals()
            self._begin()
        except BaseException as error:
            self._end_early(self.peers.cause(error))
            self._held.close()
            raise
        if self._is_main:  # the others have nothing to close
            self.peers.lost = self.lockstep.fail
        return self

    def _end_early(self, error: BaseException) -> None:
        """The run could not begin. One process lets the error through; several tell each other, and do not wait."""
        if isinstance(error, SystemExit):
            status, reason = int(error.code or 0), "did not begin the run" if error.code else "found the run finished"
        else:
            status, reason = getattr(error, "status", 1), f"failed: {type(error).__name__}: {error}"
        if self.place.processes > 1 or isinstance(error, Interrupted):
            if status == 1:
                traceback.print_exception(error)
            self.peers.end(status, reason)
            _leave(status)

    def _begin(self) -> None:
        """Look at the directory, find the last checkpoint, and open what will be written."""
        now = int(self.args.layout.gather(np.int32(time.time()))[0])
        self.name = self.args.run_name(self.algorithm, now)
        self.dir = Path(self.args.run_dir or Path("runs") / self.name)
        config = self._check_dir() if self._is_main else {}
        self.checkpoints = Checkpoints(self.dir, self.args, self.place.process)
        if self._is_main:
            self._held.enter_context(hold(self.dir, "run"))
        self.done = int(self.args.layout.gather(np.int32(self.checkpoints.newest() if self._is_main else 0))[0])
        if self.done:
            self._restore()
        self.lockstep.done = self.done
        if self._is_main:
            self._open_files(config)
        self._display.start(self.done)
        self._display.say(f"{self.algorithm} on {self.args.env_id}, topology {self.args.layout}, in {self.dir}")
        if self.args.remark:
            self._display.say(self.args.remark)
        if self.done:
            self._display.say(f"going on after update {self.done}, step {self.global_step:,}")

    def _listen_to_signals(self) -> None:
        """Signals that a scheduler or a user ends a run with. Alone, it breaks off and saves what it has; several
        processes agree first, at the end of the update under way. A second Ctrl-C does not wait."""

        def handle(signum: int, _: Any) -> None:
            # Within a second it is the same Ctrl-C, handed on; a scheduler repeats itself, and kills if it must.
            if self._signal and signum == signal.SIGINT and time.monotonic() - self._signal_time > 1:
                os._exit(128 + signum)
            if not self._signal:
                self._signal, self._signal_time = signum, time.monotonic()
                if self.place.processes == 1 and self._is_breakable:
                    raise Interrupted(signum)

        if threading.current_thread() is threading.main_thread():
            for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                self._held.callback(signal.signal, s, signal.signal(s, handle))

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """What a signal must not break off in the middle; it takes effect at the end."""
        self._is_breakable = False
        yield
        self._is_breakable = True
        if self._signal and self.place.processes == 1:
            raise Interrupted(self._signal)

    def hold_signals(self) -> None:
        """From now on until the update is logged, a signal waits."""
        self._is_breakable = False

    def _restore(self) -> None:
        shards = self.args.layout.shards_of(self.place.process, self.args.num_shards)
        snapshot = self._restored = self.checkpoints.load(self.done, shards)
        self.carries = {shard: own["carry"] for shard, own in snapshot.shards.items()}
        self._saved = self._tried = self.done
        self.global_step = snapshot.progress["global_step"]
        self._last_fingerprint = snapshot.progress["fingerprint"]
        self._returns.extend(snapshot.progress["returns"])
        self._fresh_since = self.done + 1 if self.args.resume_envs == "fresh" else snapshot.progress["fresh_since"]

    def _open_files(self, old: dict[str, Any]) -> None:
        """Only process 0. Nothing is written before this."""
        session = {"after_update": self.done, "topology": str(self.args.layout), "command": sys.argv}
        session["envs"] = self.args.resume_envs if self.done else "new"
        versions = {name: version(name) for name in ("cleanba", "jax", "jaxlib", "flax", "optax", "envpool")}
        config = old or {
            "algorithm": self.algorithm,
            "name": self.name,
            "experiment": self.args.experiment,
            "machine": self.args.machine | {"topology": str(self.args.layout)},
            "versions": versions,
            "devices": [f"{device.platform}:{device.device_kind}" for device in jax.local_devices()],
            "git_commit": _git_commit(),
            "command": sys.argv,
        }
        self.name = config.get("name", self.name)
        if config["versions"] != versions:
            changed = [f"{k} {config['versions'].get(k)} -> {versions[k]}" for k in versions]
            warn(f"other versions than the run began with may give other bits: {', '.join(changed)}")
        try:
            write_json(self.dir / "config.json", config | {"sessions": [*config.get("sessions", []), session]})
            tracker = _start_wandb(self, config) if self.args.track else None
            self._records = Records(self.dir, self.done, tracker)
        except OSError as error:
            usage_error(f"--run-dir {self.dir} cannot be written: {error.strerror}")
        except ValueError as error:
            usage_error(str(error))

    def _check_dir(self) -> dict[str, Any]:
        """An existing directory must be this experiment's; a finished one is left alone. Its configuration, if any."""
        if self.args.track and importlib.util.find_spec("wandb") is None:
            usage_error("--track needs Weights & Biases: pip install 'cleanba[track]'")
        if self.args.upload_model:
            try:
                hub.check_token()
            except hub.HubError as error:
                usage_error(f"--upload-model: {error}")
        if self.args.capture_video:
            try:
                evaluate.check_film(self.args)
            except EnvError as error:
                usage_error(f"--capture-video: {error}")
        if self.dir.exists() and not self.dir.is_dir():
            usage_error(f"--run-dir {self.dir} is a file; name a directory")
        config = self.dir / "config.json"
        if not config.exists():
            if self.dir.exists() and any(path.name not in (".lock", "config.json.tmp") for path in self.dir.iterdir()):
                usage_error(f"--run-dir {self.dir} has files in it but no run; name an empty or a new directory")
            return {}
        try:
            old = json.loads(config.read_text())
            differing = differences(old, self.args, self.algorithm)
        except (OSError, ValueError, KeyError, TypeError) as error:
            usage_error(f"--run-dir {self.dir}: config.json cannot be read ({error!r}); name another directory")
        if differing:
            usage_error(f"--run-dir {self.dir} holds another experiment ({'; '.join(differing)}); name another one")
        if (self.dir / "result.json").exists():
            self._display.say(f"{self.dir} is finished: nothing to do")
            raise SystemExit(0)
        return old

    def restored(self, first: State) -> tuple[State, dict[int, Any]]:
        """The state of the last checkpoint and the memories of this process's shards, or the first ones."""
        if self._restored is None:
            return first, {}
        if self._restored.acting:
            self.acting = like(first.params, self._restored.acting)
        shards = self._restored.shards.items()
        memories = {shard: like(first.memory, own["memory"]) for shard, own in shards}
        return like(first._replace(memory=()), self._restored.state), memories

    def envs_since(self, n: int) -> int:
        """The rollout that the environments of rollout n were made for."""
        every = self.args.renew_envs_every
        return max(self._fresh_since, 1 + (n - 1) // every * every if every else 1)

    def replayed(self, n: int) -> None:
        """Show how far the environments of a resumed run are."""
        self._display.replaying(n, self.done)

    def updates(self) -> Iterator[int]:
        """The numbers of the updates that are left, from 1."""
        yield from range(self.done + 1, self.args.num_updates + 1)

    def vote(self) -> np.ndarray:
        """What this process tells all others with every rollout: its signal, whether it is time for a checkpoint, and
        how the writing of its part of the last one went."""
        seconds = self.args.checkpoint_interval[1]
        is_time = self._is_main and 0 < seconds <= time.monotonic() - self._last_checkpoint
        is_written = self._pending and not self.checkpoints.is_writing
        written = (WRITTEN if self.checkpoints.outcome() else FAILED) if is_written else 0
        return np.array([self._signal, is_time, written], np.int32)

    def log(self, n: int, metrics: dict[str, float], collected: Collected, state: State) -> None:
        """Record update n everywhere, evaluate and save it when it is time to."""
        if self._is_main and self.args.eval_every and n % self.args.eval_every == 0:
            with self.lockstep.clock("eval"):
                returns = self._play(self.act, state.params, n)
                metrics = metrics | {"charts/eval_episodic_return": float(np.mean(returns))}
        with self.lockstep.clock("log"):
            self._log(n, metrics, collected, state, self.lockstep.clock.lap())

    def _log(self, n: int, metrics: dict[str, float], collected: Collected, state: State, spent: dict) -> None:
        now = time.perf_counter()
        self.global_step += collected.steps
        if self._timed_from is None:
            self._timed_from = (now, self.global_step)
        self._last_fingerprint = fingerprint(state.params)
        self._returns.extend(collected.returns)
        record: dict[str, Any] = {
            "update": n,
            "global_step": self.global_step,
            "policy_lag": n - collected.version,
            "fingerprint": self._last_fingerprint,
            "charts/episodes": len(collected.returns),
        }
        if collected.returns:
            record["charts/episodic_return"] = float(np.mean(collected.returns))
            record["charts/episodic_length"] = float(np.mean(collected.lengths))
        record |= metrics
        record |= {"charts/SPS": round(self.sps), "stats/time": time.time()}
        record |= {f"stats/{name}_time": round(seconds, 6) for name, seconds in spent.items()}
        with self._unbroken():
            if self._is_main:
                self._records.add(record)
            self._remember(n, collected, state)
            self._save_if_due(n, collected.votes)
            self._display.show(record, self.episodic_return, self.sps)
        if signum := int(collected.votes[:, 0].max()):
            raise Interrupted(signum)

    def _remember(self, n: int, collected: Collected, state: State) -> None:
        """Keep what a checkpoint of update n needs."""
        progress = {
            "global_step": self.global_step,
            "fingerprint": self._last_fingerprint,
            "returns": list(self._returns),
            "fresh_since": self._fresh_since,
        }
        since = self.envs_since(n)
        self.checkpoints.actions.add(n, since, collected.marks)
        own = {shard: {"carry": mark.carry, "memory": ()} for shard, mark in collected.marks.items()}
        self._latest = Snapshot(n, since, state, self.acting, own, progress)

    def _save_if_due(self, n: int, votes: np.ndarray) -> None:
        """Begin a checkpoint, or complete the one under way. All processes see the same votes and decide the same."""
        _, is_time, written = votes.T
        if self._pending and written.all():
            self._complete(all_written=bool((written == WRITTEN).all()))
        updates = self.args.checkpoint_interval[0]
        is_due = is_time.any() or (updates > 0 and n // updates > self._tried // updates)
        if is_due and not self._pending:
            self._begin_checkpoint()

    def _begin_checkpoint(self) -> None:
        assert self._latest is not None
        self._last_checkpoint = time.monotonic()
        self._pending = self._tried = self._latest.update
        state: State = self._latest.state
        memories = self.args.layout.unstack(state.memory, self.args.num_shards)
        own = {shard: own | {"memory": memories.get(shard, ())} for shard, own in self._latest.shards.items()}
        self.checkpoints.begin(self._latest._replace(state=state._replace(memory=()), shards=own))

    def _complete(self, all_written: bool) -> None:
        if self._is_main:
            (self.checkpoints.commit if all_written else self.checkpoints.discard)(self._pending)
        self._saved, self._pending = self._pending if all_written else self._saved, 0

    def _all_written(self) -> bool:
        return bool(self.args.layout.gather(np.int32(self.checkpoints.outcome())).all())

    def _save_now(self) -> None:
        """Save the last update and wait for it. In several processes: all must call this after the same update."""
        if self._pending:
            self._complete(self._all_written())
        if self._latest is not None and self._latest.update > self._saved and self._is_whole(self._latest.state):
            self._begin_checkpoint()
            self._complete(self._all_written())

    def _is_whole(self, state: State) -> bool:
        """A memory is changed where it is: if the update that does so fails, there is none of the update before."""
        if any(x.is_deleted() for x in jax.tree.leaves(state.memory)):
            last = f"the one of update {self._saved} stays" if self._saved else "nothing was saved yet"
            warn(f"update {self._latest.update + 1 if self._latest else 1} failed in the middle; {last}")
            return False
        return True

    @property
    def sps(self) -> float:
        """Environment steps per second from the end of the first update on."""
        if self._timed_from is None or self.global_step == self._timed_from[1]:
            return 0.0
        start, steps = self._timed_from
        return (self.global_step - steps) / (time.perf_counter() - start)

    @property
    def episodic_return(self) -> float | None:
        """The mean of the last episodes that ended; None before the first."""
        return float(np.mean(self._returns)) if self._returns else None

    def _play(self, act: Any, params: Any, n: int) -> list[float]:
        """The returns of the evaluation after update n, each time in the same environments: a resumed run gets the
        same ones, too."""
        if self.args.capture_video:
            self._film = evaluate.Film(self.dir / "videos" / f"update-{n}.mp4")
        if self._player is None:
            args = replace(self.args, collect="stepwise")  # what is compiled serves all evaluations
            show = self._show if self.args.capture_video else None
            self._player = evaluate.Player(act, args, min(args.eval_episodes, evaluate.NUM_ENVS), show)
        player = self._player
        returns = self.lockstep.call(lambda: player.play(params, self.args.eval_episodes))
        if self._film is not None:
            self._film.close()
            if self.args.track:
                _show_on_wandb(self._film.path, self.global_step)
        return returns

    def _show(self, frame: np.ndarray) -> None:
        """A frame of the evaluation under way."""
        assert self._film is not None
        self._film.show(frame)

    def finish(self, act: Any, params: Any) -> None:
        """Save the last checkpoint and the result; with --save-model also the model, its evaluation and the curve."""
        self._display.stop()
        with self._unbroken():
            self._save_now()
        if self.place.processes > 1:
            jax.distributed.shutdown()  # the others are done; JAX would abort them if process 0 left first
        if not self._is_main:
            return
        result: dict[str, Any] = {
            "fingerprint": self._last_fingerprint,
            "global_step": self.global_step,
            "updates": self.args.num_updates,
            "sps": round(self.sps, 1),
            "episodic_return": self.episodic_return,
        }
        if self.args.keeps_model:
            result |= self._save_model(act, params)
        write_json(self.dir / "result.json", result)
        begins = self._last_fingerprint[:16]
        self._display.say(f"fingerprint {begins} after {self.global_step:,} steps; files in {self.dir}")
        if self.args.keeps_model:
            command = "cleanba" if shutil.which("cleanba") else os.path.relpath(Path(sys.executable).parent / "cleanba")
            self._display.say(f"next: {command} eval {self.dir} --episodes 100")
        if self.args.upload_model:
            self._upload()

    def _upload(self) -> None:
        """Put the model on the Hub. All files are written by now, so it can be done again."""
        source = Path(sys.modules[type(self.args).__module__].__file__ or "")
        try:
            self._display.say(f"uploaded to {hub.push(self.dir, self.args.hf_entity, source)}")
        except hub.HubError as error:
            warn(f"not uploaded: {error}; to try again: cleanba push {self.dir} --hf-entity {self.args.hf_entity}")
            raise SystemExit(1) from error

    def _save_model(self, act: Any, params: Any) -> dict[str, Any]:
        """Arrays and JSON, nothing that can execute; returns what the evaluation adds to the result."""
        model, curve = self.dir / "model", self.dir / "learning_curve.png"
        model.mkdir(exist_ok=True)
        save_file(flatten(params), model / "params.safetensors")
        write_json(model / "config.json", {"algorithm": self.algorithm, "experiment": self.args.experiment})
        from cleanba.tools.plot import plot  # here, because drawing takes a second to import

        plot([self.dir], curve)
        self._display.say(f"model in {model}, learning curve in {curve}; evaluating")
        returns = self._play(act, params, self.args.num_updates)
        mean, deviation = float(np.mean(returns)), float(np.std(returns))
        self._display.say(f"evaluation: mean return {mean:.1f} (std {deviation:.1f}) of {len(returns)} episodes")
        return {
            "eval_episodic_return": mean,
            "eval_episodic_return_std": deviation,
            "eval_episodes": len(returns),
        }

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._is_breakable = False
        self._display.stop()
        error = self.peers.cause(error) if error is not None else None
        agreed = self.place.processes == 1 or isinstance(error, Interrupted | FloatingPointError)
        if error is not None and agreed:
            self._save_now()
        if self._is_main:
            self._records.close(failed=error is not None)
        status = getattr(error, "status", 130 if isinstance(error, KeyboardInterrupt) else 1) if error else 0
        if isinstance(error, KeyboardInterrupt) and self._is_main:
            command = "the same command" + ("" if self.args.run_dir else f" with --run-dir {self.dir}")
            rest = f"{command} goes on after update {self._saved}" if self._saved else "nothing was saved yet"
            name = "interrupted" if status == 130 else f"ended by {error}"
            print(f"{name} after step {self.global_step:,}; files in {self.dir}; {rest}", file=sys.stderr)
        busy = any(thread.name.startswith("cleanba-") for thread in threading.enumerate())
        if error is not None and (busy or self._signal or self.place.processes > 1) and not sys.flags.interactive:
            if not isinstance(error, KeyboardInterrupt | PeerLost | SystemExit):
                traceback.print_exception(error)
            why = f"ended because {error}" if isinstance(error, PeerLost) else f"ended: {type(error).__name__}: {error}"
            self.peers.end(status, why)
            _leave(status)  # at once: a compiled call cannot be broken off, and JAX would wait for lost processes
        self.peers.end(0)
        self._held.close()
        if isinstance(error, KeyboardInterrupt):
            raise SystemExit(status) from error


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def hold(folder: Path, by: str) -> Iterator[None]:
    """Make the folder, and keep a second `by` out of it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        usage_error(f"--run-dir {folder} cannot be written: {error.strerror}")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            usage_error(f"--run-dir {folder} is in use by a {by} that has not ended; wait for it, or name another one")
        except OSError as error:
            usage_error(f"--run-dir {folder} cannot be locked: {error.strerror}")
        yield


def differences(config: dict[str, Any], args: CoreArgs, algorithm: str) -> list[str]:
    """In what an experiment is another one than a run's config.json records."""
    was = config["experiment"] | {"algorithm": config["algorithm"]}
    new = json.loads(json.dumps(args.experiment | {"algorithm": algorithm}))
    return [f"{k} {was.get(k)!r} -> {new.get(k)!r}" for k in sorted(was | new) if was.get(k) != new.get(k)]


def _start_wandb(run: Run, config: dict) -> Any:
    """Weights & Biases, as CleanRL sets it up."""
    import wandb  # here, because it is an extra

    args = run.args
    return wandb.init(
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        name=run.name,
        id=run.name,
        resume="allow",
        config=config,
        dir=run.dir,
        save_code=True,
    )


def _show_on_wandb(film: Path, step: int) -> None:
    import wandb  # here, because it is an extra

    wandb.log({"videos/evaluation": wandb.Video(str(film), format="mp4")}, step=step)


def _git_commit() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", here, "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
