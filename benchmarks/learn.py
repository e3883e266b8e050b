"""Train an algorithm on several environments with several seeds, one after another, and table the evaluations.

Run:   python benchmarks/learn.py --script ppo --env-ids CartPole-v1 Acrobot-v1 Catch-v0 --seeds 1 2 3 4 5
Makes: benchmarks/results/NAME.json (every run's result and command) and the table in NAME.md beside it
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Learn:
    """Train, evaluate and table."""

    script: str = "ppo"
    """algorithm file in cleanba/, without .py"""
    env_ids: tuple[str, ...] = ("CartPole-v1", "Acrobot-v1", "Catch-v0")
    """environments"""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """seeds of each"""
    arguments: str = ""
    """further arguments of every run, as one string"""
    runs: Path = ROOT / "runs" / "benchmark"
    """where the run directories go; finished runs are not repeated"""
    name: str = ""
    """name of the result files (default: the script's)"""

    def main(self) -> None:
        """Run everything that is not there yet, then write the files."""
        results = [self.run(env_id, seed) for env_id in self.env_ids for seed in self.seeds]
        target = ROOT / "benchmarks" / "results" / (self.name or self.script)
        target.parent.mkdir(exist_ok=True)
        target.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        target.with_suffix(".md").write_text(self.table(results))
        print(self.table(results))

    def run(self, env_id: str, seed: int) -> dict:
        """One run's result, with the command that makes it again."""
        arguments = f"--env-id {env_id} --seed {seed} --save-model {self.arguments}".split()
        run_dir = self.runs / f"{env_id}__{self.name or self.script}__{seed}"
        script = ROOT / "cleanba" / f"{self.script}.py"
        subprocess.run([sys.executable, script, *arguments, "--run-dir", run_dir], check=True)
        result = json.loads((run_dir / "result.json").read_text())
        command = " ".join(["python", f"cleanba/{self.script}.py", *arguments])
        return {"env_id": env_id, "seed": seed, "command": command, **result}

    def table(self, results: list[dict]) -> str:
        """Markdown, a row an environment."""
        lines = [
            "| environment | evaluation return of each seed | mean | std | steps |",
            "| --- | --- | --- | --- | --- |",
        ]
        for env_id in self.env_ids:
            own = [result for result in results if result["env_id"] == env_id]
            returns = [result["eval_episodic_return"] for result in own]
            each, steps = ", ".join(f"{x:.1f}" for x in returns), max(result["global_step"] for result in own)
            lines.append(f"| {env_id} | {each} | {np.mean(returns):.1f} | {np.std(returns):.1f} | {steps:,} |")
        return "\n".join(lines) + "\n"


if __name__ == "__main__":
    tyro.cli(Learn).main()
