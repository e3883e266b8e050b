"""An algorithm on several environments with several seeds, here or as an array of Slurm jobs, and a table of it.

Run:  cleanba benchmark --script ppo.py --env-ids CartPole-v1 Acrobot-v1 --num-seeds 3 --workers 2
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from cleanba.core.records import write_json
from cleanba.core.run import hold
from cleanba.core.usage import usage_error
from cleanba.tools.grid import Ended, Grid, Job, Workers, find_script, markdown, ranges, show_failures
from cleanba.tools.launch import SBATCH, check_plain, directives

# What a template of CleanRL's `cleanrl_utils.benchmark` says, with what `cleanba launch` adds for preempted jobs.
CHOOSE = """\
env_ids={{env_ids}}
seeds={{seeds}}
env_id=${env_ids[$SLURM_ARRAY_TASK_ID / {{len_seeds}}]}
seed=${seeds[$SLURM_ARRAY_TASK_ID % {{len_seeds}}]}
"""
TEMPLATE = SBATCH.format(
    directives="{{directives}}",
    directory="{{directory}}",
    cpus="{{cpus_per_task}}",
    before=CHOOSE,
    command='{{command}} --env-id "$env_id" --seed "$seed"',
)
FIGURES = ("episodic_return", "eval_episodic_return", "global_step", "sps")  # of a result.json


def summarize(jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """For each environment the mean, standard deviation and values over its finished seeds."""
    found = []
    for env_id in dict.fromkeys(job.args.env_id for job in jobs):
        own = [(job, job.result) for job in jobs if job.args.env_id == env_id]
        results = [(job.args.seed, result) for job, result in own if result is not None]
        summary: dict[str, Any] = {"env_id": env_id, "planned": len(own), "seeds": [seed for seed, _ in results]}
        for figure in FIGURES:
            values = [result[figure] for _, result in results if result.get(figure) is not None]
            mean_and_std = (float(np.mean(values)), float(np.std(values))) if values else (None, None)
            summary[figure] = dict(zip(("mean", "std"), mean_and_std, strict=True)) | {"values": values}
        found.append(summary)
    return found


def table(summaries: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown, a row for each environment; the evaluation only if there was one."""
    returns = {"episodic_return": "return", "eval_episodic_return": "evaluation"}
    columns = {key: name for key, name in returns.items() if any(summary[key]["values"] for summary in summaries)}

    def cell(summary: dict[str, Any], figure: str, part: str, form: str) -> str:
        return format(summary[figure][part], form) if summary[figure]["values"] else "-"

    header = ["environment", "seeds", *(part for name in columns.values() for part in (name, "std"))]
    rows = [
        [
            summary["env_id"],
            f"{len(summary['seeds'])} of {summary['planned']}",
            *(cell(summary, key, part, ",.2f") for key in columns for part in ("mean", "std")),
            cell(summary, "global_step", "mean", ",.0f"),
            cell(summary, "sps", "mean", ",.0f"),
        ]
        for summary in summaries
    ]
    return markdown([*header, "steps", "steps/s"], rows)


@dataclass(frozen=True)
class Benchmark(Grid):
    """Train an algorithm on several environments with several seeds, and table the results.

    Runs that are finished are not repeated, broken ones go on. Exit status: 1 if a run failed. With --slurm the
    unfinished runs are submitted as an array of jobs; once they have ended, the same command makes the table.
    """

    command: str = ""
    """instead of --script and -- ARGUMENTS: all in one string, such as "python cleanba/ppo.py --track" """
    auto_tag: bool = True
    """tag runs that --track logs to Weights & Biases with `git describe`"""
    slurm: bool = False
    """submit the runs to Slurm, --workers of them at a time"""
    slurm_template_path: Path | None = None
    """Slurm: a job script of your own, with marks such as {{array}} and {{command}}; docs/grids.md has them all"""
    slurm_gpus_per_task: int | None = None
    """Slurm: GPUs of each process, 0 to compute on the CPU (default: as many as the topology names)"""
    slurm_ntasks: int | None = None
    """Slurm: processes of each run (default: as many as the topology names)"""
    slurm_total_cpus: int | None = None
    """Slurm: cores of each run, over all its processes (default: 4 for each)"""
    slurm_nodes: int | None = None
    """Slurm: nodes of each run (default: Slurm's choice)"""
    slurm_time: str = ""
    """Slurm: time limit of each run, such as 1-00:00:00; the run then goes on in the queue again"""
    slurm_partition: str = ""
    """Slurm: partition"""
    slurm_account: str = ""
    """Slurm: account"""

    def main(self) -> int:
        """Run or submit what is unfinished, and table what is finished."""
        self._check_slurm()
        first = self.check()
        folder = Path(self.run_dir or Path("runs") / "benchmark" / self.name(first))
        jobs = self.jobs(folder, first)
        unfinished = [job for job in jobs if job.result is None]
        job_script = self._job_script(Path(os.path.abspath(folder)), first, jobs) if self.is_slurm else ""
        if self.dry_run or not self.workers:
            self._show(folder, jobs, job_script, [] if self.is_slurm else self.shares(first))
            return 0
        self._tag()
        if not unfinished:
            self._report(folder, jobs)
            return 0
        if self.is_slurm:
            return self._submit(folder, job_script)
        return self._run(folder, jobs, self.shares(first))

    @property
    def is_slurm(self) -> bool:
        """As CleanRL has it, a template says so too."""
        return self.slurm or self.slurm_template_path is not None

    def program(self) -> tuple[list[str], Path, list[str]]:
        """From --command too; there, `python` is the one that runs this."""
        if not self.command:
            return super().program()
        if self.script or self.arguments:
            usage_error("give --command, or --script with arguments after --, not both")
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            usage_error(f"--command {self.command!r} cannot be read: {error}")
        place = next((i for i, word in enumerate(words) if word.endswith(".py")), 0)
        if not place:
            usage_error(f"--command {self.command!r} does not run a script; try 'python cleanba/ppo.py'")
        starter = words[:place]
        if starter[0] in ("python", "python3"):
            starter[0] = sys.executable
        return starter, find_script(words[place]), words[place + 1 :]

    def _check_slurm(self) -> None:
        for field in fields(self):
            option, value = f"--{field.name.replace('_', '-')}", getattr(self, field.name)
            if not field.name.startswith("slurm_") or value == field.default:
                continue
            if not self.is_slurm:
                usage_error(f"{option} says nothing without --slurm")
            least = 0 if field.name == "slurm_gpus_per_task" else 1
            if isinstance(value, int) and value < least:
                usage_error(f"{option} {value} must be at least {least}")
            if isinstance(value, str):
                check_plain(option, value)
        if self.is_slurm and not self.dry_run and self.workers and shutil.which("sbatch") is None:
            usage_error("sbatch is not on this machine; --dry-run shows the job script, to be submitted elsewhere")

    def _tag(self) -> None:
        """As CleanRL does, but without asking GitHub for the number of a pull request."""
        if self.auto_tag and "--track" in self.program()[2]:
            command = ["git", "describe", "--tags", "--always"]
            tag = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
            os.environ["WANDB_TAGS"] = ",".join(filter(None, [os.environ.get("WANDB_TAGS"), tag]))

    def _show(self, folder: Path, jobs: Sequence[Job], job_script: str, shares: Sequence[object]) -> None:
        """The plan: every command, or the job script; how far each run is; who runs them."""
        unfinished = [job for job in jobs if job.result is None]
        print(job_script or "".join(f"{shlex.join(job.command)}\n" for job in unfinished))
        rows = [
            [env_id, *(job.state for job in jobs if job.args.env_id == env_id)]
            for env_id in dict.fromkeys(job.args.env_id for job in jobs)
        ]
        print("\n".join(markdown(["environment", *(f"seed {seed}" for seed in self.seeds)], rows)), end="\n\n")
        steps = sum(job.args.num_updates * job.args.steps_per_update for job in unfinished)
        print(f"{len(jobs)} runs in {folder}: {len(jobs) - len(unfinished)} finished, {len(unfinished)} to do")
        print(f"{steps:,} steps, {self.workers} runs at a time{' by Slurm' * self.is_slurm}")
        print("\n".join(f"worker {i}: {share}" for i, share in enumerate(shares)), end="\n" if shares else "")

    def _run(self, folder: Path, jobs: Sequence[Job], shares: Sequence[Any]) -> int:
        failures: list[Ended] = []
        with hold(folder, "grid"), Workers(shares) as workers:
            for ended in workers.run([job for job in jobs if job.result is None]):
                self._write(folder, jobs)
                how = "finished" if not ended.failed else "stopped" if workers.signal else "FAILED"
                failures += [ended] * (how == "FAILED")
                done = f"{sum(job.result is not None for job in jobs)} of {len(jobs)}"
                print(f"{how:9} {ended.job.run_dir} after {ended.seconds:,.0f} s ({done})", flush=True)
        self._report(folder, jobs)
        show_failures(failures)
        if workers.signal:
            print("interrupted; the same command goes on", file=sys.stderr)
            return 128 + workers.signal
        if failures:
            print(f"\n{len(failures)} of {len(jobs)} runs failed; the same command tries them again", file=sys.stderr)
        return int(bool(failures))

    def _write(self, folder: Path, jobs: Sequence[Job]) -> list[str]:
        """benchmark.json and benchmark.md; the lines of the latter."""
        summaries = summarize(jobs)
        runs = [
            {"env_id": job.args.env_id, "seed": job.args.seed, "command": shlex.join(job.command), "result": job.result}
            for job in jobs
        ]
        write_json(folder / "benchmark.json", {"environments": summaries, "runs": runs})
        lines = table(summaries)
        (folder / "benchmark.md").write_text("\n".join(lines) + "\n")
        return lines

    def _report(self, folder: Path, jobs: Sequence[Job]) -> None:
        print("\n" + "\n".join(self._write(folder, jobs)))
        print(f"\nwrote {folder / 'benchmark.md'} and {folder / 'benchmark.json'}", flush=True)

    def _job_script(self, folder: Path, first: Any, jobs: Sequence[Job]) -> str:
        """For Slurm: an array over the unfinished runs, numbered as CleanRL's templates do."""
        layout, needed = first.layout, first.layout.devices_needed
        tasks = layout.processes if self.slurm_ntasks is None else self.slurm_ntasks
        gpus = needed if self.slurm_gpus_per_task is None else self.slurm_gpus_per_task
        cpus = self.slurm_total_cpus or 4 * tasks
        if tasks != layout.processes:
            usage_error(
                f"--slurm-ntasks {tasks}: topology {layout} names {layout.processes}; give as many, or leave it out"
            )
        if 0 < gpus < needed:
            usage_error(
                f"--slurm-gpus-per-task {gpus}: topology {layout} needs {needed}; give as many, or 0 for the CPU"
            )
        check_plain("--run-dir", str(folder))
        numbers = {(job.args.env_id, job.args.seed): i for i, job in enumerate(jobs)}
        order = [jobs[numbers[env_id, seed]] for env_id in self.all_env_ids for seed in self.seeds]
        starter, script, arguments = self.program()
        run_dir = f'{folder}/"${{env_id//[^a-zA-Z0-9_.-]/-}}__{self.name(first)}__$seed"'
        options = {
            "job-name": self.name(first),
            "array": f"{ranges([i for i, job in enumerate(order) if job.result is None])}%{self.workers or 1}",
            "output": folder / "slurm-%A_%a.out",
            "partition": self.slurm_partition,
            "account": self.slurm_account,
            "time": self.slurm_time,
            "nodes": self.slurm_nodes,
            "ntasks": tasks,
            "cpus-per-task": -(-cpus // tasks),
            "gpus-per-task": gpus,
        }
        marks = {
            "directives": directives(options),
            "directory": shlex.quote(os.getcwd()),
            "array": options["array"],
            "env_ids": f"({shlex.join(self.all_env_ids)})",
            "seeds": f"({' '.join(map(str, self.seeds))})",
            "len_seeds": self.num_seeds,
            "command": f"{shlex.join([*starter, str(script), *arguments])} --run-dir {run_dir}",
            "gpus_per_task": gpus,
            "cpus_per_task": options["cpus-per-task"],
            "cpus_per_gpu": -(-cpus // (gpus * tasks)) if gpus else "",
            "ntasks": tasks,
            "nodes": directives({"nodes": self.slurm_nodes}),
        }
        return re.sub(r"\{\{(\w*)\}\}", lambda mark: str(marks[mark[1]]), self._template(marks))

    def _template(self, marks: dict[str, Any]) -> str:
        if self.slurm_template_path is None:
            return TEMPLATE
        try:
            text = self.slurm_template_path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            usage_error(f"--slurm-template-path {self.slurm_template_path} cannot be read: {error}")
        for mark in re.findall(r"\{\{(\w*)\}\}", text):
            if marks.get(mark, "") == "" and mark != "nodes":
                why = "there are no GPUs" if mark in marks else f"the marks are {', '.join(marks)}"
                usage_error(f"--slurm-template-path {self.slurm_template_path} has {{{{{mark}}}}}, but {why}")
        return text

    def _submit(self, folder: Path, job_script: str) -> int:
        path = folder / "array.sbatch"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.fsencode(job_script))
        except OSError as error:
            usage_error(f"{path} cannot be written: {error.strerror}")
        status = subprocess.run(["sbatch", str(path)], check=False).returncode
        if status == 0:
            print(f"submitted {path}; the same command makes the table once the jobs have ended")
        return status
