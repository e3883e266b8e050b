"""Whole runs, as a user starts them: same bits on every topology, what they leave behind, and that they learn."""

import ast
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parent.parent
SIZES = {
    "ppo": "--env-id CartPole-v1 --total-timesteps 8192",
    "ppo_atari": "--env-id Pong-v5 --network nature --num-envs 8 --num-steps 4 --total-timesteps 96",
    "impala_atari": "--env-id Pong-v5 --num-envs 16 --num-steps 4 --total-timesteps 192 --num-minibatches 2",
}


def run(name: str, run_dir: Path, arguments: str, prefix: str = "") -> dict:
    command = [*prefix.split(), sys.executable, str(ROOT / "cleanba" / f"{name}.py"), *arguments.split()]
    done = subprocess.run([*command, "--run-dir", str(run_dir)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((run_dir / "result.json").read_text())
    result["stdout"], result["metrics"] = done.stdout, (run_dir / "metrics.jsonl").read_text().splitlines()
    return result


def numbers(result: dict) -> list[dict]:
    """The metrics without the timings."""
    records = [json.loads(line) for line in result["metrics"]]
    return [{k: v for k, v in r.items() if k != "charts/SPS" and not k.startswith("stats/")} for r in records]


@pytest.mark.parametrize(
    ("name", "topologies"),
    [
        ("ppo", ["a0-l1,2,3", "a0,1-l2,3,4,5,6,7,8,9 --num-actor-threads 2", "a0-l0,1 --collect stepwise"]),
        ("ppo_atari", ["a0,1,2-l0,1,2,3,4 --env-threads 2"]),
        ("impala_atari", ["a0-l1,2 --collect stepwise"]),
    ],
)
def test_the_topology_does_not_change_a_number(name: str, topologies: list[str], tmp_path: Path) -> None:
    reference = run(name, tmp_path / "reference", f"{SIZES[name]} --seed 3")
    for i, topology in enumerate(topologies):
        other = run(name, tmp_path / str(i), f"{SIZES[name]} --seed 3 --topology {topology}")
        assert numbers(other) == numbers(reference), topology
        assert other["fingerprint"] == reference["fingerprint"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs taskset")
def test_one_core_gives_the_same_bits(tmp_path: Path) -> None:
    arguments = f"{SIZES['ppo']} --seed 4"
    reference = run("ppo", tmp_path / "all", arguments)
    alone = run("ppo", tmp_path / "one", f"{arguments} --topology a0-l1", prefix="taskset -c 0")
    assert alone["fingerprint"] == reference["fingerprint"]


FIRST_PARAMETERS = """
import jax
from cleanba import impala_atari
from cleanba.core.args import parse
from cleanba.core.run import fingerprint
args = parse(impala_atari.Args, ["--env-id", "Pong-v5"])
print(fingerprint(impala_atari.init(jax.random.key(1), args).params))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs taskset")
def test_one_core_gives_the_same_first_parameters() -> None:
    """LAPACK would share out the factorization of a large matrix among the cores."""
    command = [sys.executable, "-W", "ignore", "-c", FIRST_PARAMETERS]
    every, one = (subprocess.check_output([*prefix.split(), *command]) for prefix in ("", "taskset -c 0"))
    assert every == one


def test_the_lag_is_recorded_and_is_part_of_the_experiment(tmp_path: Path) -> None:
    lagging = run("ppo", tmp_path / "lagging", SIZES["ppo"])
    waiting = run("ppo", tmp_path / "waiting", f"{SIZES['ppo']} --no-concurrency")
    waiting_elsewhere = run("ppo", tmp_path / "elsewhere", f"{SIZES['ppo']} --no-concurrency --topology a0-l1,2")
    assert [record["policy_lag"] for record in numbers(lagging)] == [0, 1, 1, 1]
    assert [record["policy_lag"] for record in numbers(waiting)] == [0, 0, 0, 0]
    assert numbers(lagging)[0] == numbers(waiting)[0]
    assert lagging["fingerprint"] != waiting["fingerprint"] == waiting_elsewhere["fingerprint"]


def test_a_gymnasium_environment_runs_on_every_topology(tmp_path: Path) -> None:
    arguments = "--env-id MountainCar-v0 --engine gymnasium --num-envs 8 --num-steps 16 --total-timesteps 512"
    reference = run("ppo", tmp_path / "a", arguments)
    assert run("ppo", tmp_path / "b", f"{arguments} --topology a0,1-l1,2")["fingerprint"] == reference["fingerprint"]


def test_a_run_learns_and_leaves_everything_behind(tmp_path: Path) -> None:
    """CartPole in a fifth of the default steps; W&B offline beside it."""
    os.environ["WANDB_MODE"] = "offline"
    result = run(
        "ppo", tmp_path, "--total-timesteps 150000 --seed 5 --save-model --eval-episodes 10 --track --capture-video"
    )
    assert result["eval_episodic_return"] >= 400
    assert "evaluation: mean return" in result["stdout"]
    assert f"cleanba eval {tmp_path} --episodes 100" in result["stdout"]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["algorithm"] == "ppo"
    assert config["experiment"]["seed"] == 5
    assert config["machine"]["topology"] == "a0-l0-d1"
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").glob("events*"))
    [tracked] = (tmp_path / "wandb").glob("offline-run*")
    [film] = (tracked / "files" / "media" / "videos" / "videos").glob("evaluation_*.mp4")
    assert film.read_bytes() == (tmp_path / "videos" / f"update-{result['updates']}.mp4").read_bytes()
    assert all(np.isfinite(x).all() for x in load_file(tmp_path / "model" / "params.safetensors").values())

    again = subprocess.run(
        [sys.executable, "-m", "cleanba.core.evaluate", str(tmp_path), "--episodes", "10"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(again.stdout)["mean"] == pytest.approx(result["eval_episodic_return"])


def texts_of_fields(module: str) -> dict[str, str]:
    """The text under each field of the module's dataclasses, from its source."""
    found = {}
    for node in ast.parse((ROOT / "cleanba" / f"{module}.py").read_text()).body:
        body = node.body if isinstance(node, ast.ClassDef) and node.name.endswith("Args") else []
        for field, text in pairwise(body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and "ClassVar" not in ast.unparse(field.annotation)
            ):
                assert isinstance(text, ast.Expr), f"{module}.{field.target.id} has no text"
                found[field.target.id] = ast.literal_eval(text.value)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_help_explains_every_argument(name: str) -> None:
    command = [sys.executable, "-W", "ignore", str(ROOT / "cleanba" / f"{name}.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "400"})
    words = " ".join(shown.stdout.replace("│", " ").split())
    args = importlib.import_module(f"cleanba.{name}").Args
    texts = texts_of_fields("core/args") | texts_of_fields(name)
    for field in dataclasses.fields(args):
        assert f"--{field.name.replace('_', '-')}" in words
        assert " ".join(texts[field.name].split()) in words, field.name
