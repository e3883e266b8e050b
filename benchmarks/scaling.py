"""What cores, learners and shards do to the speed of a training: the same work in turns, as ratios to the first row.

Run:   python benchmarks/scaling.py [--rounds 3] [--work TEXT ...]    (works that contain a text)
Makes: benchmarks/results/scaling.md, where tables of other works stay

Cores by `taskset`; learners are virtual devices on these cores, processes send over loopback. With 8 shards every
gradient is the sum, along a tree, of 8 gradients of an eighth of the rows, each compiled by itself; with one shard it
is one gradient over all rows, as it would be without the promise of equal bits. XLA's pool has 8 threads throughout.
"""

import argparse
import json
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK = {
    "CartPole, PPO, 64 x 128": "ppo.py --env-id CartPole-v1 --num-envs 64 --num-steps 128 --total-timesteps 655360",
    "Breakout, PPO, NatureCNN, 32 x 32": "ppo_atari.py --env-id Breakout-v5 --network nature --num-envs 32"
    " --num-steps 32 --total-timesteps 4096",
}
CASES = {
    "a0-l0, two cores": "",
    "a0-l0, one core": "--one-core",
    "a0-l0,1": "--topology a0-l0,1",
    "a0-l0,1,2,3": "--topology a0-l0,1,2,3",
    "a0-l0,...,7": "--topology a0-l0,1,2,3,4,5,6,7",
    "a0-l0-d2": "--topology a0-l0-d2",
    "a0-l0, one shard instead of 8": "--num-shards 1",
}


def steps_per_second(work: str, case: str) -> float:
    """Of one run, from the end of its first update on."""
    script, *arguments = f"{work} {case} --cpu-threads 8 --checkpoint-every 0".split()
    command = [sys.executable, str(ROOT / "cleanba" / script), *(word for word in arguments if word != "--one-core")]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        prefix = [shutil.which("taskset") or "taskset", "-c", "0"] if "--one-core" in arguments else []
        subprocess.run([*prefix, *command, "--run-dir", str(run_dir)], check=True, stdout=subprocess.DEVNULL)
        return json.loads((run_dir / "result.json").read_text())["sps"]


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", nargs="+", default=[""])
    options = parser.parse_args()
    target = ROOT / "benchmarks" / "results" / "scaling.md"
    call = shlex.join(["python", "benchmarks/scaling.py", *sys.argv[1:]])
    tables = {text.split(" | ")[0]: text for text in target.read_text().split("\n\n| ")[1:]} if target.exists() else {}
    for name in (name for name in WORK if any(text in name for text in options.work)):
        speeds: dict[str, list[float]] = {case: [] for case in CASES}
        for _ in range(options.rounds):
            for case, arguments in CASES.items():
                speeds[case].append(steps_per_second(WORK[name], arguments))
                print(f"{name}, {case}: {speeds[case][-1]:,.0f}", flush=True)
        first = next(iter(speeds.values()))
        lines = [f"{name} | steps/s | times the first row, by `{call}` |", "| --- | --- | --- |"]
        for case, own in speeds.items():
            ratios = [a / b for a, b in zip(own, first, strict=True)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"| {case} | {statistics.median(own):,.0f} | {spread} |")
        tables[name] = "\n".join(lines)
        ordered = [tables[known].strip() for known in WORK if known in tables]
        target.write_text("\n\n| ".join(["Medians (smallest to largest) of runs in turns.", *ordered]) + "\n")


if __name__ == "__main__":
    main()
