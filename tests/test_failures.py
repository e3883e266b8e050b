"""Nothing fails silently: whatever goes wrong ends the run within seconds, with its cause and the right status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cleanba.core.run import Run, hold
from cleanba.ppo import Args

ROOT = Path(__file__).parent.parent
ENV = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
LONG = "--total-timesteps 100000000"


def start(run_dir: Path, arguments: str, name: str = "ppo") -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "cleanba" / f"{name}.py"), *arguments.split(), "--run-dir", str(run_dir)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_updates(run_dir: Path, process: subprocess.Popen[str], count: int = 2) -> None:
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and len(metrics.read_text().splitlines()) >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"no {count} updates: {process.communicate()}")


@pytest.mark.parametrize("topology", ["a0-l0", "a0,1-l2,3"])
def test_an_environment_that_raises_ends_the_run(topology: str, tmp_path: Path) -> None:
    arguments = f"--env-id oracle_env:Raises-v0 --num-envs 8 --num-steps 64 {LONG} --topology {topology}"
    process = start(tmp_path / "run", arguments)
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "actor failed in shard" in err
    assert "environment" in err
    assert "at its step" in err
    assert "Traceback" in err


def test_ctrl_c_ends_the_run_within_five_seconds(tmp_path: Path) -> None:
    process = start(tmp_path, LONG)
    wait_for_updates(tmp_path, process)
    process.send_signal(signal.SIGINT)
    before = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - before < 5
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


def test_a_diverging_loss_stops_before_its_parameters_are_used(tmp_path: Path) -> None:
    process = start(tmp_path, f"--learning-rate 1e30 --max-grad-norm 1e30 {LONG}")
    _, err = process.communicate(timeout=180)
    assert process.returncode == 1
    assert "FloatingPointError: update 1 diverged" in err
    assert "losses/value_loss" in err
    assert "--learning-rate" in err


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ("--env-id CartPol-v1", "CartPole-v1"),
        ("--num-envs 63", "64"),
        ("--topology a0-l1,2,3,4,5,6,7,8,9", "at most 8"),
        ("--topology a0-l20", "--cpu-threads"),
        ("--seed -1", "--seed"),
        ("--learning-rate abc", "--learning-rate"),
        ("--local-num-envs 60", "--num-envs"),
    ],
)
def test_bad_arguments_leave_one_line_and_nothing_else(arguments: str, hint: str, tmp_path: Path) -> None:
    process = start(tmp_path / "run", arguments)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert len(err.splitlines()) == 1, err
    assert hint in err
    assert out == ""
    assert not (tmp_path / "run").exists()


def test_a_run_directory_belongs_to_one_experiment(tmp_path: Path) -> None:
    first = start(tmp_path, "--total-timesteps 4096")
    first.communicate(timeout=120)
    assert first.returncode == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    other = start(tmp_path, "--total-timesteps 4096 --seed 2 --gamma 0.9")
    _, err = other.communicate(timeout=60)
    assert other.returncode == 2
    assert "gamma 0.99 -> 0.9" in err
    assert "seed 1 -> 2" in err

    same = start(tmp_path, "--total-timesteps 4096 --topology a0-l1,2")
    out, _ = same.communicate(timeout=60)
    assert same.returncode == 0
    assert "finished" in out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_run_directory_is_one_runs_while_it_lasts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = Args(total_timesteps=4096, run_dir=str(tmp_path)).check()
    before = signal.getsignal(signal.SIGTERM)
    with Run(args):
        of_the_run = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit, match="2"):
            Run(args).__enter__()
        assert "is in use by a run that has not ended" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGTERM) is of_the_run is not before
    assert signal.getsignal(signal.SIGTERM) is before
    with hold(tmp_path, "run"):
        pass
