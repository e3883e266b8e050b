"""What checkpoints cost, and how fast environments are replayed.

Run:   python benchmarks/checkpoints.py
Makes: benchmarks/results/checkpoints.md

A run that saves after every update is compared with one that does not save: the difference of their core-seconds (user
and system time of the process and its threads, which another job's load moves less than the clock) over the number of
checkpoints. Replay is timed against the same environments stepped with the same actions alone, in turns.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from cleanba import ppo, ppo_atari
from cleanba.core import envs
from cleanba.core.actors import Collector
from cleanba.core.checkpoint import digest
from cleanba.core.seeding import Role
from cleanba.tools.bench import random_action

ROOT = Path(__file__).parent.parent


def core_seconds(experiment: str, every: str) -> tuple[float, int]:
    """Of one run, and the checkpoints it wrote: not one an update, since the next waits until the last is written."""
    script, arguments = experiment.split(maxsplit=1)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, str(ROOT / "cleanba" / script), *arguments.split(), "--checkpoint-every", every]
        command += ["--keep-checkpoints", "100000"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*command, "--run-dir", str(run_dir)], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        written = len([path for path in (run_dir / "checkpoints").iterdir() if path.name.isdigit()])
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, written


def replay_speed(args: ppo.Args | ppo_atari.Args, rounds: int) -> tuple[list[float], list[float]]:
    """Steps per second of replaying rollouts with their digests, and of stepping the same environments alone."""
    rng = np.random.default_rng(0)
    shape = (args.num_shards, args.num_steps, args.envs_per_shard)
    actions = rng.integers(0, args.env_spec.num_actions, shape).astype(np.uint8)
    shards = range(args.num_shards)
    collector = Collector(random_action, None, args, shards, jax.local_devices()[0], Role.ACT)
    engine = envs.make(args, shards, Role.ACT)
    engine.reset()

    def replay() -> None:
        for end in collector.replay(actions):
            digest(end._replace(carry=()))

    def step() -> None:
        for action in np.moveaxis(actions, 1, 0):
            engine.step(action)

    replay()  # compiles
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for i, function in enumerate((replay, step)):
            began = time.perf_counter()
            function()
            times[i].append(actions.size / (time.perf_counter() - began))
    return times


def spread(values: list[float]) -> str:
    """Median, smallest and largest."""
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--experiments",
        nargs="+",
        default=[
            "ppo.py --env-id CartPole-v1 --total-timesteps 204800",
            "ppo_atari.py --env-id Breakout-v5 --network nature --num-envs 8 --num-steps 8 --update-epochs 1"
            " --num-minibatches 1 --total-timesteps 3200",
        ],
    )
    options = parser.parse_args()
    lines = [f"Made by `python benchmarks/checkpoints.py {' '.join(sys.argv[1:])}`; median (smallest to largest).", ""]
    lines += [
        "| experiment | checkpoints | core-seconds of each | share of one core, one a minute |",
        "| --- " * 4 + "|",
    ]
    for experiment in options.experiments:
        costs = []
        for _ in range(options.rounds):
            without, few = core_seconds(experiment, "0")
            with_them, many = core_seconds(experiment, "1")
            costs.append((with_them - without) / (many - few))
        cost = f"{statistics.median(costs):.3f} ({min(costs):.3f} to {max(costs):.3f})"
        lines.append(f"| `{experiment}` | {many} | {cost} | {statistics.median(costs) / 60:.2%} |")
        print(lines[-1], flush=True)
    lines += ["", "| environments | replayed, steps/s | stepped alone | ratio of the medians |", "| --- " * 4 + "|"]
    cart = ppo.Args(env_id="CartPole-v1", num_envs=64, num_steps=128)
    pixels = ppo_atari.Args(env_id="Breakout-v5", network="nature", num_envs=16, num_steps=64)
    for args in (cart, pixels):
        replayed, alone = replay_speed(args, options.rounds)
        ratio = f"{statistics.median(replayed) / statistics.median(alone):.2f}"
        lines.append(f"| {args.num_envs} {args.env_id} | {spread(replayed)} | {spread(alone)} | {ratio} |")
        print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results" / "checkpoints.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
