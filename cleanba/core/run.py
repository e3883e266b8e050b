"""A run and what it leaves behind: its directory, metrics, progress and trackers; and how it ends, well or badly."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.numpy import save_file
from tensorboardX import SummaryWriter

from cleanba.core import evaluate
from cleanba.core.actors import Collected
from cleanba.core.args import CoreArgs
from cleanba.core.lockstep import Lockstep
from cleanba.core.usage import usage_error

WINDOW = 100  # episodes that the displayed and final return is the mean of
SECONDS_BETWEEN_LINES = 10.0  # of progress, where there is no terminal for a bar


def flatten(params: Any) -> dict[str, np.ndarray]:
    """Parameters by name, in canonical order."""
    return {name: np.asarray(x) for name, x in sorted(flatten_dict(jax.device_get(params), sep="/").items())}


def fingerprint(params: Any) -> str:
    """SHA-256 over names, types, shapes and bits of the parameters."""
    digest = hashlib.sha256()
    for name, x in flatten(params).items():
        digest.update(f"{name} {x.dtype} {x.shape}\n".encode() + np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


class Run:
    """Context of a run: `updates` counts them, `log` records them, `finish` saves and evaluates the result."""

    def __init__(self, args: CoreArgs):
        self.args = args
        self.algorithm = Path(sys.modules[type(args).__module__].__file__ or "interactive").stem
        self.lockstep = Lockstep(args.num_updates, args.concurrency, len(args.layout.actors) * args.num_actor_threads)
        name = f"{args.env_id}__{args.exp_name or self.algorithm}__{args.seed}__{int(time.time())}"
        self.name = name.replace("/", "-").replace(":", "-")
        self.dir = Path(args.run_dir or Path("runs") / self.name)
        self.global_step = 0
        self._returns: deque[float] = deque(maxlen=WINDOW)
        self._console = Console(stderr=False, soft_wrap=True)
        self._timed_from: tuple[float, int] | None = None
        self._last_line = 0.0
        self._last_fingerprint = ""

    def __enter__(self) -> "Run":
        self._check_dir()
        try:
            self.dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            usage_error(f"--run-dir {self.dir} cannot be made: {error.strerror}")
        shutil.rmtree(self.dir / "tensorboard", ignore_errors=True)  # of a run that did not end: it begins again
        config = {
            "algorithm": self.algorithm,
            "experiment": self.args.experiment,
            "machine": self.args.machine | {"topology": str(self.args.layout)},
            "versions": {name: version(name) for name in ("cleanba", "jax", "jaxlib", "flax", "optax", "envpool")},
            "devices": [f"{device.platform}:{device.device_kind}" for device in jax.local_devices()],
            "git_commit": _git_commit(),
            "command": sys.argv,
        }
        _write_json(self.dir / "config.json", config)
        self._metrics = (self.dir / "metrics.jsonl").open("w", buffering=1)
        self._tensorboard = SummaryWriter(str(self.dir / "tensorboard"))
        self._wandb = _start_wandb(self, config) if self.args.track else None
        columns = TextColumn("update"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[news]}")
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, disable=not self._is_terminal)
        self._progress.start()
        self._bar = self._progress.add_task("", total=self.args.num_updates, news="compiling")
        self._say(f"{self.algorithm} on {self.args.env_id}, topology {self.args.layout}, in {self.dir}")
        return self

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, markup=False)

    @property
    def _is_terminal(self) -> bool:
        return self._console.is_terminal

    def _check_dir(self) -> None:
        """An existing directory must be this experiment's; a finished one is left alone. Nothing is written before."""
        if self.args.track and importlib.util.find_spec("wandb") is None:
            usage_error("--track needs Weights & Biases: pip install 'cleanba[track]'")
        if self.dir.exists() and not self.dir.is_dir():
            usage_error(f"--run-dir {self.dir} is a file; name a directory")
        config = self.dir / "config.json"
        if not config.exists():
            if self.dir.exists() and any(self.dir.iterdir()):
                usage_error(f"--run-dir {self.dir} has files in it but no run; name an empty or a new directory")
            return
        old = json.loads(config.read_text())
        new = json.loads(json.dumps(self.args.experiment | {"algorithm": self.algorithm}))
        was = old["experiment"] | {"algorithm": old["algorithm"]}
        differing = [f"{k} {was.get(k)!r} -> {new.get(k)!r}" for k in sorted(was | new) if was.get(k) != new.get(k)]
        if differing:
            usage_error(f"--run-dir {self.dir} holds another experiment ({'; '.join(differing)}); name another one")
        if (self.dir / "result.json").exists():
            print(f"{self.dir} is finished: nothing to do", flush=True)
            raise SystemExit(0)

    def updates(self) -> Iterator[int]:
        """The numbers of the updates, from 1."""
        yield from range(1, self.args.num_updates + 1)

    def log(self, n: int, metrics: dict[str, float], collected: Collected, params: Any) -> None:
        """Record update n everywhere."""
        now = time.perf_counter()
        self.global_step += collected.steps
        if self._timed_from is None:
            self._timed_from = (now, self.global_step)
        self._last_fingerprint = fingerprint(params)
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
        self._metrics.write(json.dumps(record) + "\n")
        scalars = {k: v for k, v in record.items() if "/" in k} | {"charts/policy_lag": record["policy_lag"]}
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, self.global_step)
        if self._wandb is not None:
            self._wandb.log(scalars | {"global_step": self.global_step}, step=self.global_step)
        self._show(n, now)

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

    def _show(self, n: int, now: float) -> None:
        score = "-" if self.episodic_return is None else f"{self.episodic_return:.1f}"
        news = f"{self.sps:,.0f} steps/s · return {score}"
        self._progress.update(self._bar, completed=n, news=news)
        if not self._is_terminal and (now - self._last_line > SECONDS_BETWEEN_LINES or n == self.args.num_updates):
            self._last_line = now
            print(f"update {n}/{self.args.num_updates} · step {self.global_step:,} · {news}", flush=True)

    def finish(self, act: Any, params: Any) -> None:
        """Write the result; with --save-model also the model, its evaluation and the learning curve."""
        self._progress.stop()
        result: dict[str, Any] = {
            "fingerprint": self._last_fingerprint,
            "global_step": self.global_step,
            "updates": self.args.num_updates,
            "sps": round(self.sps, 1),
            "episodic_return": self.episodic_return,
        }
        if self.args.save_model:
            result |= self._save_model(act, params)
        _write_json(self.dir / "result.json", result)
        self._say(f"fingerprint {self._last_fingerprint[:16]} after {self.global_step:,} steps; files in {self.dir}")
        if self.args.save_model:
            command = "cleanba" if shutil.which("cleanba") else os.path.relpath(Path(sys.executable).parent / "cleanba")
            self._say(f"next: {command} eval {self.dir} --episodes 100")

    def _save_model(self, act: Any, params: Any) -> dict[str, Any]:
        """Arrays and JSON, nothing that can execute; returns what the evaluation adds to the result."""
        model, curve = self.dir / "model", self.dir / "learning_curve.png"
        model.mkdir(exist_ok=True)
        save_file(flatten(params), model / "params.safetensors")
        _write_json(model / "config.json", {"algorithm": self.algorithm, "experiment": self.args.experiment})
        from cleanba.tools.plot import plot  # here, because drawing takes a second to import

        plot([self.dir], curve)
        self._say(f"model in {model}, learning curve in {curve}; evaluating")
        returns = self.lockstep.call(lambda: evaluate.play(act, params, self.args, self.args.eval_episodes))
        mean, deviation = float(np.mean(returns)), float(np.std(returns))
        self._say(f"evaluation: mean return {mean:.1f} (std {deviation:.1f}) of {len(returns)} episodes")
        return {"eval_episodic_return": mean, "eval_episodes": len(returns)}

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()
        self._metrics.close()
        self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=0 if kind is None else 1)
        if error is None:
            return
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        if status == 130:
            print(f"interrupted after step {self.global_step:,}; files in {self.dir}", file=sys.stderr)
        busy = [thread for thread in threading.enumerate() if thread.name.startswith("cleanba-")]
        if busy and not sys.flags.interactive:  # inside a compiled call, which cannot be broken off
            if status == 1:
                traceback.print_exception(error)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        if status == 130:
            raise SystemExit(130) from error


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _start_wandb(run: Run, config: dict) -> Any:
    """Weights & Biases, as CleanRL sets it up."""
    import wandb  # here, because it is an extra

    args = run.args
    return wandb.init(
        project=args.wandb_project_name,
        entity=args.wandb_entity,
        name=run.name,
        config=config,
        dir=run.dir,
        save_code=True,
    )


def _git_commit() -> str | None:
    here = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", here, "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None
