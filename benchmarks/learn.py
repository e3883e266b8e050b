"""Train an algorithm on several environments with several seeds, table the evaluations and draw the curves.

Run:   python benchmarks/learn.py --script ppo
       python benchmarks/learn.py --script dqn --env-ids CartPole-v1 --num-seeds 3 --workers 2
Makes: benchmarks/results/NAME.json (every run's result, command and curve), the table in docs/algorithms/NAME.md,
       docs/drawings/learn-NAME.png, and from the files of all algorithms the table in docs/benchmarks.md

The runs are those of `cleanba benchmark`: finished ones are not repeated, broken ones go on. Results of environments
and seeds that are not asked for stay.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from cleanba.tools.benchmark import Benchmark
from cleanba.tools.curves import RETURN, Run, panels, read_run, thin
from cleanba.tools.grid import Job
from cleanba.tools.plot import draw_panels, new_figure, save

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end of results -->"
POINTS = 100  # of a curve
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
    num_seeds: int = 3
    """seeds of each"""
    start_seed: int = 1
    """the first of them"""
    arguments: str = ""
    """further arguments of every run, as one string"""
    workers: int = 1
    """runs at a time; they share out the cores"""
    runs: Path | None = None
    """where the run directories go (default: runs/benchmark/ and the script)"""

    def main(self) -> None:
        """Run everything that is not there yet, then write the files."""
        env_ids = self.env_ids or ENV_IDS.get(self.script, ())
        if not env_ids:
            raise SystemExit(f"--env-ids: {self.script} has none by default; name some")
        folder = self.runs or ROOT / "runs" / "benchmark" / self.script
        grid = Benchmark(
            script=str(ROOT / "cleanba" / f"{self.script}.py"),
            arguments=("--save-model", *self.arguments.split()),
            env_ids=env_ids,
            num_seeds=self.num_seeds,
            start_seed=self.start_seed,
            workers=self.workers,
            run_dir=str(folder),
        )
        if status := grid.main():
            raise SystemExit(status)
        target = RESULTS / f"{self.script}.json"
        known = json.loads(target.read_text()) if target.exists() else []
        results = {(result["env_id"], result["seed"]): result for result in known}
        for job in grid.jobs(folder, grid.check()):
            if (result := job.result) is not None:  # --workers 0 only shows the plan
                results[job.args.env_id, job.args.seed] = self.described(job, result)
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps([results[job] for job in sorted(results)], indent=2) + "\n")
        self.write_page(list(results.values()))
        draw(self.script, list(results.values()))
        write_summary()

    def described(self, job: Job, result: dict) -> dict:
        """A finished run's result, with its curve and the command that makes it again."""
        arguments = f"--env-id {job.args.env_id} --seed {job.args.seed} --save-model {self.arguments}"
        logged = thin(read_run(job.run_dir), POINTS)
        curve = {
            "global_step": logged.step.round().tolist(),
            "episodes": logged.episodes.tolist(),
            "episodic_return": [None if np.isnan(x) else round(x, 3) for x in logged.values[RETURN]],
        }
        which = {"env_id": job.args.env_id, "seed": job.args.seed}
        command = f"python cleanba/{self.script}.py {arguments}".strip()
        return {**which, "command": command, **result, "curve": curve}

    def write_page(self, results: list[dict]) -> None:
        """Put the table between the marks of the algorithm's page."""
        page = ROOT / "docs" / "algorithms" / f"{self.script}.md"
        lines = [*self.table(results), "", f"![Learning curves](../drawings/learn-{self.script}.png)"]
        write_between(page, f"<!-- results: python benchmarks/learn.py --script {self.script} -->", lines)

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
                mean_and_deviation(returns),
                f"{np.mean(training):,.1f}" if training else "-",
                published,
                f"{max(result['global_step'] for result in own):,}",
            )
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        return lines


def mean_and_deviation(returns: list[float]) -> str:
    """Two cells of a table; one seed has no deviation."""
    return f"{np.mean(returns):,.1f} | {f'{np.std(returns):,.1f}' if len(returns) > 1 else '-'}"


def write_between(page: Path, mark: str, lines: list[str]) -> None:
    """Put lines between a mark and the end of results."""
    before, found, rest = page.read_text().partition(mark)
    if not found:
        raise SystemExit(f"{page} has no line {mark}")
    page.write_text("\n".join([before + mark, *lines, END]) + rest.partition(END)[2])


def draw(script: str, results: list[dict]) -> None:
    """The curves of all runs that have one: an environment a chart, with the mean and its 95 % interval."""
    runs = []
    for result in (result for result in results if "curve" in result):
        step, episodes, returns = (np.array(x, np.float64) for x in result["curve"].values())
        logged = (step, np.full(len(step), np.nan), episodes, {RETURN: returns}, result)
        runs.append(Run(Path(), script, result["env_id"], str(result["seed"]), {}, result["updates"], *logged))
    charts = panels(runs, "algorithm")
    figure = new_figure(4.2 * len(charts), 3.2)
    draw_panels([figure.add_subplot(1, len(charts), i + 1) for i in range(len(charts))], charts, RETURN, "step")
    save(figure, ROOT / "docs" / "drawings" / f"learn-{script}.png")


def write_summary() -> None:
    """All algorithms' means, from their files."""
    lines = ["| algorithm | environment | seeds | steps | evaluation, mean | std | CleanRL |", "| --- " * 7 + "|"]
    for script in sorted(path.stem for path in (ROOT / "docs" / "algorithms").glob("*.md")):
        path = RESULTS / f"{script}.json"
        results = json.loads(path.read_text()) if path.exists() else []
        for env_id in sorted({result["env_id"] for result in results}):
            own = [result for result in results if result["env_id"] == env_id]
            returns = [result["eval_episodic_return"] for result in own]
            steps = f"{max(result['global_step'] for result in own):,}"
            published = PUBLISHED.get(script, {}).get(env_id, "-")
            cells = (f"[{script}](algorithms/{script}.md#benchmark)", env_id, len(own), steps)
            lines.append("| " + " | ".join(map(str, (*cells, mean_and_deviation(returns), published))) + " |")
    write_between(ROOT / "docs" / "benchmarks.md", "<!-- results: python benchmarks/learn.py -->", lines)


if __name__ == "__main__":
    tyro.cli(Learn).main()
