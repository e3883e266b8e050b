"""Train an algorithm on several environments with several seeds, and table the evaluations.

Run:   python benchmarks/learn.py --script ppo
       python benchmarks/learn.py --script dqn --env-ids CartPole-v1 --seeds 1 2 3 --workers 2
Makes: benchmarks/results/NAME.json (every run's result and command) and the table in docs/algorithms/NAME.md

Runs that are finished are not repeated, broken ones go on. Results of environments that are not asked for stay.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of results -->"
CLASSIC, MUJOCO = ("CartPole-v1", "Acrobot-v1", "MountainCar-v0"), ("HalfCheetah-v4", "Walker2d-v4", "Hopper-v4")
ENV_IDS = {
    "ppo": (*CLASSIC, "Catch-v0"),
    "dqn": CLASSIC,
    "c51": CLASSIC,
    "ppo_continuous_action": MUJOCO,
    "ddpg_continuous_action": MUJOCO,
    "td3_continuous_action": MUJOCO,
    "sac_continuous_action": MUJOCO,
}
# CleanRL's, from its documentation (docs.cleanrl.dev), of the same number of steps; MuJoCo there is version 2.
PUBLISHED = {
    "ppo": dict(zip(CLASSIC, (492, -90, -200), strict=True)),
    "dqn": dict(zip(CLASSIC, (489, -92, -195), strict=True)),
    "c51": dict(zip(CLASSIC, (481, -88, -166), strict=True)),
    "ppo_continuous_action": dict(zip(MUJOCO, (1823, 3050, 2231), strict=True)),
    "ddpg_continuous_action": dict(zip(MUJOCO, (9382, 1598, 1313), strict=True)),
    "td3_continuous_action": dict(zip(MUJOCO, (9018, 4246, 3392), strict=True)),
    "sac_continuous_action": dict(zip(MUJOCO, (10310, 4418, 2686), strict=True)),
}


@dataclass(frozen=True)
class Learn:
    """Train, evaluate and table."""

    script: str = "ppo"
    """algorithm file in cleanba/, without .py"""
    env_ids: tuple[str, ...] = ()
    """environments (default: those of the algorithm's page)"""
    seeds: tuple[int, ...] = (1, 2, 3)
    """seeds of each"""
    arguments: str = ""
    """further arguments of every run, as one string"""
    workers: int = 1
    """runs at a time"""
    runs: Path = ROOT / "runs" / "benchmark"
    """where the run directories go"""

    def main(self) -> None:
        """Run everything that is not there yet, then write the files."""
        env_ids = self.env_ids or ENV_IDS.get(self.script, ())
        if not env_ids:
            raise SystemExit(f"--env-ids: {self.script} has none by default; name some")
        target = RESULTS / f"{self.script}.json"
        known = json.loads(target.read_text()) if target.exists() else []
        results = {(result["env_id"], result["seed"]): result for result in known}
        with ThreadPoolExecutor(self.workers) as pool:
            for result in pool.map(lambda job: self.run(*job), product(env_ids, self.seeds)):
                results[result["env_id"], result["seed"]] = result
                target.parent.mkdir(exist_ok=True)
                target.write_text(json.dumps([results[job] for job in sorted(results)], indent=2) + "\n")
                self.write_page(list(results.values()))

    def run(self, env_id: str, seed: int) -> dict:
        """One run's result, with the command that makes it again."""
        arguments = f"--env-id {env_id} --seed {seed} --save-model {self.arguments}".split()
        run_dir = self.runs / f"{env_id}__{self.script}__{seed}"
        script = ROOT / "cleanba" / f"{self.script}.py"
        subprocess.run([sys.executable, script, *arguments, "--run-dir", run_dir], check=True)
        result = json.loads((run_dir / "result.json").read_text())
        command = " ".join(["python", f"cleanba/{self.script}.py", *arguments])
        return {"env_id": env_id, "seed": seed, "command": command, **result}

    def write_page(self, results: list[dict]) -> None:
        """Put the table between the marks of the algorithm's page."""
        page = ROOT / "docs" / "algorithms" / f"{self.script}.md"
        mark = f"<!-- results: python benchmarks/learn.py --script {self.script} -->"
        before, found, rest = page.read_text().partition(mark)
        if not found:
            raise SystemExit(f"{page} has no line {mark}")
        page.write_text("\n".join([before + mark, *self.table(results), END]) + rest.partition(END)[2])

    def table(self, results: list[dict]) -> list[str]:
        """Markdown, a row an environment: the evaluation after training, and the last 100 episodes of the training."""
        columns = "environment | seeds | evaluation of each seed | mean | std | last episodes | CleanRL | steps"
        lines = [f"| {columns} |", "| --- " * 8 + "|"]
        for env_id in sorted({result["env_id"] for result in results}):
            own = sorted((r for r in results if r["env_id"] == env_id), key=lambda r: r["seed"])
            returns = [result["eval_episodic_return"] for result in own]
            training = [result["episodic_return"] for result in own if result["episodic_return"] is not None]
            published = PUBLISHED.get(self.script, {}).get(env_id, "-")
            cells = (
                env_id,
                len(own),
                ", ".join(f"{x:,.1f}" for x in returns),
                f"{np.mean(returns):,.1f}",
                f"{np.std(returns):,.1f}",
                f"{np.mean(training):,.1f}" if training else "-",
                published,
                f"{max(result['global_step'] for result in own):,}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return lines


if __name__ == "__main__":
    tyro.cli(Learn).main()
