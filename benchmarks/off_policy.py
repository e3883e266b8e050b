"""SAC and TD3 against CleanRL's and those in plain PyTorch: same environment, networks, batch and gradient steps.

Run:   python benchmarks/off_policy.py [--rounds 3]
Makes: benchmarks/results/off_policy.md

Each is a process of its own, in turns; steps/s while it learns. One gradient step for each environment step.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from cleanba.tools.bench import spread
from cleanba.tools.peers import cleanrl, install

ROOT = Path(__file__).parent.parent
ENV_ID, STEPS = "HalfCheetah-v4", 3_000
CASES = ("--topology a0-l0", "--topology a0-l0 --cpu-threads 2", "--topology a0-l0,1 --cpu-threads 2")


def ours(name: str, arguments: str) -> float:
    """Of the second half of a short training, by the times of its log."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        script = ROOT / "cleanba" / f"{name}_continuous_action.py"
        sizes = f"--env-id {ENV_ID} --learning-starts 1000 --total-timesteps {STEPS} --run-dir {run_dir} --quiet"
        subprocess.run([sys.executable, script, *sizes.split(), *arguments.split()], check=True)
        rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    first, last = rows[len(rows) // 2], rows[-1]
    return (last["global_step"] - first["global_step"]) / (last["stats/time"] - first["stats/time"])


def plain(python: Path, name: str) -> float:
    """Of plain PyTorch."""
    command = [str(python), str(ROOT / "benchmarks" / "torch_off_policy.py"), name, ENV_ID, str(STEPS // 3)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def published(python: Path, name: str) -> float:
    """Of CleanRL's file, which says its speed every 100 steps."""
    return cleanrl(python, f"{name}_continuous_action.py", 100, ENV_ID, learning_starts=1000).steps_per_second()


def cell(values: list[float], form: str) -> str:
    """Median and extremes."""
    median, low, high = (format(value, form) for value in spread(values))
    return f"{median} ({low} to {high})"


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    python = install()
    lines = [f"Made by `python benchmarks/off_policy.py --rounds {options.rounds}`, {ENV_ID}; medians (least to most)."]
    lines += ["", "| file | arguments | steps/s | times CleanRL | times plain PyTorch |", "| --- " * 5 + "|"]
    for name in ("sac", "td3"):
        file = f"{name}_continuous_action.py"
        yardsticks: dict[str, list[float]] = {"CleanRL": [], "plain PyTorch": []}
        speeds: dict[str, list[float]] = {case: [] for case in CASES}
        for _ in range(options.rounds):
            yardsticks["CleanRL"].append(published(python, name))
            yardsticks["plain PyTorch"].append(plain(python, name))
            for case in CASES:
                speeds[case].append(ours(name, case))
            print(name, {case: round(values[-1]) for case, values in (yardsticks | speeds).items()}, flush=True)
        for case, own in speeds.items():
            ratios = ([a / b for a, b in zip(own, other, strict=True)] for other in yardsticks.values())
            cells = [file, f"`{case}`", cell(own, ".0f"), *(cell(values, ".2f") for values in ratios)]
            lines.append(f"| {' | '.join(cells)} |")
        for other, values in yardsticks.items():
            lines.append(f"| {file} | {other} | {cell(values, '.0f')} | | |")
    (ROOT / "benchmarks" / "results" / "off_policy.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
