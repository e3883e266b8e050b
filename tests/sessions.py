"""Whole runs in processes of their own, as a user starts them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
SMALL = (  # 60 short updates
    "--num-envs 16 --num-shards 4 --num-steps 8 --update-epochs 1 --num-minibatches 2 --total-timesteps 7680"
)
OFTEN = "--checkpoint-every 4 --keep-checkpoints 99"
SOON = 300.0  # seconds in which even a busy machine gets anything done
STARTED: list[subprocess.Popen[str]] = []


def kill_what_is_left() -> None:
    """After a test that failed."""
    while STARTED:
        process = STARTED.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if not process.returncode and process.stdout and not process.stdout.closed:
            process.communicate()


def command(run_dir: Path, arguments: str, name: str = "ppo") -> list[str]:
    return [sys.executable, str(ROOT / "cleanba" / f"{name}.py"), *arguments.split(), "--run-dir", str(run_dir)]


def start(
    run_dir: Path, arguments: str, environment: Mapping[str, str] = ENV, name: str = "ppo"
) -> subprocess.Popen[str]:
    """In a process group of its own."""
    pipes: dict = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    words = command(run_dir, arguments, name)
    STARTED.append(subprocess.Popen(words, env=environment, text=True, start_new_session=True, **pipes))
    return STARTED[-1]


def finish(
    run_dir: Path, arguments: str, status: int = 0, environment: Mapping[str, str] = ENV, name: str = "ppo"
) -> tuple[str, str]:
    """Run to the end, which must have this status; what it said."""
    return end(start(run_dir, arguments, environment, name), status)


def end(process: subprocess.Popen[str], status: int) -> tuple[str, str]:
    """Wait for the end of a run, which must have this status; what it said."""
    out, err = process.communicate(timeout=SOON)
    assert process.returncode == status, f"{process.returncode}\n{out}\n{err}"
    return out, err


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str]) -> None:
    """Until something holds, which must be before the run ends."""
    deadline = time.monotonic() + SOON
    while process.poll() is None and time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.01)
    pytest.fail(f"it did not happen: {process.communicate()}")


def wait_for_updates(run_dir: Path, process: subprocess.Popen[str], more: int = 2) -> None:
    """Until so many more updates are recorded."""
    count = len(lines(run_dir)) + more
    wait_for(lambda: len(lines(run_dir)) >= count, process)


def lines(run_dir: Path) -> list[str]:
    metrics = run_dir / "metrics.jsonl"
    return metrics.read_text().splitlines() if metrics.exists() else []


def numbers(run_dir: Path) -> list[dict]:
    """The metrics without the timings."""
    records = [json.loads(line) for line in lines(run_dir)]
    return [{k: v for k, v in r.items() if k != "charts/SPS" and not k.startswith("stats/")} for r in records]


def result(run_dir: Path) -> dict:
    """The result without the timing."""
    content = json.loads((run_dir / "result.json").read_text())
    return {k: v for k, v in content.items() if k != "sps"}


def assert_same(run_dir: Path, reference: Path) -> None:
    """Line by line, and in the end."""
    assert numbers(run_dir) == numbers(reference)
    assert result(run_dir) == result(reference)


def checkpoints(run_dir: Path) -> list[int]:
    return sorted(int(path.name) for path in run_dir.glob("checkpoints/*") if path.name.isdigit())


def killed_copy(run_dir: Path, copy: Path, saved: int = 1) -> Path:
    """A finished run as it was with so many checkpoints saved, the first 4 updates after the start, and some updates
    more done when it was killed."""
    shutil.copytree(run_dir, copy)
    (copy / "result.json").unlink()
    for update in checkpoints(copy)[saved:]:
        shutil.rmtree(copy / "checkpoints" / f"{update:08d}")
    metrics = "".join(line + "\n" for line in lines(copy)[: checkpoints(copy)[-1] + 2])
    (copy / "metrics.jsonl").write_text(metrics[:-7])  # the last line only half
    return copy
