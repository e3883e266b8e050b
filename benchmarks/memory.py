"""Peak memory of a training for each environment and step of a rollout: two sizes of the same work, and their slope.

Run:   python benchmarks/memory.py
Makes: benchmarks/results/memory.md
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
UPDATES = 3
# Script and arguments, environments of the smaller and the larger run, steps, bytes of one observation.
WORK = [
    ("ppo.py --env-id CartPole-v1", 64, 1024, 128, 16),
    ("ppo_atari.py --env-id Breakout-v5 --network nature --num-minibatches 4 --update-epochs 1", 8, 40, 32, 28_224),
    ("impala_atari.py --env-id Breakout-v5 --network nature", 32, 96, 20, 28_224),
]


def peak(command: str, num_envs: int, num_steps: int) -> int:
    """Bytes that a run of some updates held at most."""
    script, *arguments = command.split()
    sizes = f"--num-envs {num_envs} --num-steps {num_steps} --total-timesteps {UPDATES * num_envs * num_steps}"
    with tempfile.TemporaryDirectory() as folder:
        options = [*arguments, *sizes.split(), "--checkpoint-every", "0", "--run-dir", f"{folder}/run", "--quiet"]
        run = subprocess.Popen([sys.executable, str(ROOT / "cleanba" / script), *options])
        _, status, usage = os.wait4(run.pid, 0)
    if status:
        raise SystemExit(f"{command} failed")
    return usage.ru_maxrss * 1024


def main() -> None:
    """Measure and write the table."""
    lines = [f"Made by `python benchmarks/memory.py`: the most that runs of {UPDATES} updates held, on one CPU device."]
    lines += ["", "| run | environments x steps | MiB | bytes for each further step | observations of a step, bytes |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for command, small, large, steps, obs in WORK:
        low, high = (peak(command, num_envs, steps) for num_envs in (small, large))
        slope = (high - low) / ((large - small) * steps)
        sizes = f"{small} x {steps}, {large} x {steps}"
        mebibytes = f"{low / 2**20:,.0f}, {high / 2**20:,.0f}"
        lines.append(f"| `{command}` | {sizes} | {mebibytes} | {slope:,.0f} ({slope / obs:.1f} times) | {obs:,} |")
        print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results" / "memory.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
