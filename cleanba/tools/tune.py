"""A search for hyper-parameters that do well on several environments at once, with Optuna.

Run:  cleanba tune --script ppo.py --env-ids CartPole-v1 --search learning-rate=log:1e-4:1e-2 num-steps=32,64,128
"""

import importlib.util
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cleanba.core.records import write_json
from cleanba.core.run import hold
from cleanba.core.usage import read, usage_error
from cleanba.tools.fork import flags
from cleanba.tools.grid import Ended, Grid, Job, Workers, markdown, show_failures
from cleanba.tools.runs import read_records

AGGREGATIONS: dict[str, Callable[..., Any]] = {"average": np.mean, "median": np.median, "max": np.max, "min": np.min}
PARTS = 10  # of a run, at whose ends trials are compared
SHOWN = 10  # best trials in the table
STATES = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "unfinished"}


def parse_search(text: str, args: Any) -> tuple[str, Any]:
    """NAME=a,b,c (one of these), NAME=LOW:HIGH or NAME=log:LOW:HIGH (in between): the argument, its distribution."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    option, _, values = text.partition("=")
    name = option.replace("-", "_")
    if name not in args.experiment or name in ("env_id", "seed"):
        usage_error(f"--search {text!r}: {option!r} is not an argument of the script that changes what is learned")
    span = values.removeprefix("log:")
    if ":" not in span:
        return name, CategoricalDistribution([typed(name, word, args) for word in values.split(",")])
    ends = [typed(name, word, args) for word in span.split(":")]
    distribution = {int: IntDistribution, float: FloatDistribution}.get(type(getattr(args, name)))
    if distribution is None or len(ends) != 2:
        usage_error(f"--search {text!r}: use LOW:HIGH or log:LOW:HIGH for a number, a,b,c for anything")
    low, high = ends
    is_log = span != values
    if not (-math.inf < low < high < math.inf) or (is_log and low <= 0):
        usage_error(f"--search {text!r}: LOW must be smaller than HIGH{', and more than 0 for log' * is_log}")
    return name, distribution(low, high, log=is_log)


def typed(name: str, word: str, args: Any) -> Any:
    """The value that the script reads from the word."""
    value: str | bool = word
    if isinstance(getattr(args, name), bool):
        if word not in ("true", "false"):
            usage_error(f"--search {name.replace('_', '-')}: {word!r} is neither true nor false")
        value = word == "true"
    return getattr(read(type(args), flags({name: value})), name)


def parse_target(text: str) -> tuple[str, tuple[float, float]]:
    """ENV=LOW:HIGH: the returns that count as 0 and as 1."""
    env_id, _, span = text.rpartition("=")
    try:
        low, high = map(float, span.split(":"))
    except ValueError:
        low = high = math.nan
    if not (env_id and -math.inf < low < high < math.inf):
        usage_error(f"--target-scores {text!r} is not of the form ENV=LOW:HIGH, such as CartPole-v1=0:500")
    return env_id, (low, high)


def final_return(job: Job) -> float | None:
    """The evaluation if there was one (--save-model), or the mean of the last episodes; None if none has ended."""
    result = job.result or {}
    return result.get("eval_episodic_return", result.get("episodic_return"))


def part_returns(job: Job) -> list[float | None]:
    """The mean return of the episodes that ended in each part of the run that is over."""
    ends = [math.ceil(job.args.num_updates * part / PARTS) for part in range(PARTS + 1)]
    records = read_records(job.run_dir)
    means: list[float | None] = []
    for begin, end in pairwise(ends):
        if len(records) < end:
            break
        own = [record for record in records[begin:end] if record.get("charts/episodes")]
        episodes = [record["charts/episodes"] for record in own]
        returns = [record["charts/episodic_return"] for record in own]
        means.append(float(np.average(returns, weights=episodes)) if own else None)
    return means


@dataclass
class Open:
    """A trial under way."""

    trial: Any  # optuna.Trial
    jobs: list[Job]
    reported: int  # parts that Optuna knows of


@dataclass
class Search:
    """The trials of a study as jobs of a queue."""

    tune: "Tune"
    study: Any  # optuna.Study
    args: Any  # the script's
    folder: Path
    distributions: dict[str, Any]
    workers: Workers
    failures: list[Ended] = field(default_factory=list)
    open: dict[Path, Open] = field(default_factory=dict)  # by the folder of their runs

    def jobs(self) -> Iterator[Job]:
        """The unfinished runs of the trials that were broken off, then those of new ones."""
        import optuna

        for frozen in self.study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            trial = optuna.Trial(self.study, frozen._trial_id)
            yield from self._jobs_of(trial, 1 + max(frozen.intermediate_values, default=-1))
        while len(self.study.trials) < self.tune.num_trials:
            yield from self._jobs_of(self.study.ask(self.distributions), 0)

    def _jobs_of(self, trial: Any, reported: int) -> Iterator[Job]:
        folder = self.folder / f"trial-{trial.number:04d}"
        jobs = self.tune.jobs(folder, replace(self.args, **trial.params), flags(trial.params))
        self.open[folder] = Open(trial, jobs, reported)
        for job in jobs:
            if job.result is None and folder in self.open:
                yield job
        self._finish_if_done(folder)

    def look(self) -> None:
        """End the trials under way that do worse than most did at the same point."""
        for folder, opened in list(self.open.items()):
            self._report_parts(opened)
            if self.tune.prune and opened.trial.should_prune():
                self._close(folder, "pruned", state="PRUNED")

    def _report_parts(self, opened: Open) -> None:
        """Tell Optuna the score of each part that all runs of a round, one seed of all environments, are through."""
        width = len(self.tune.all_env_ids)
        for r, seed in enumerate(self.tune.seeds):
            returns = [part_returns(job) for job in opened.jobs[r * width : (r + 1) * width]]
            for part in range(min(map(len, returns))):
                step, score = r * PARTS + part, self.tune.score({seed: [own[part] for own in returns]})
                if step >= opened.reported and score is not None:
                    opened.trial.report(score, step)
                    opened.reported = step + 1

    def ended(self, ended: Ended) -> None:
        """A run has ended: so has its trial if it was the last one, or if it failed."""
        folder = ended.job.run_dir.parent
        if folder not in self.open or (ended.failed and self.workers.signal):
            return
        if ended.failed:
            self.failures.append(ended)
            self._close(folder, "FAILED", state="FAIL")
        else:
            self._finish_if_done(folder)

    def _finish_if_done(self, folder: Path) -> None:
        opened = self.open.get(folder)
        if opened is None or any(job.result is None for job in opened.jobs):
            return
        self._report_parts(opened)
        seeds = self.tune.seeds
        returns = {seed: [final_return(job) for job in opened.jobs if job.args.seed == seed] for seed in seeds}
        score = self.tune.score(returns)
        if score is None:
            self._close(folder, "FAILED: no episode has ended", state="FAIL")
            return
        means = np.mean(np.array(list(returns.values()), np.float64), axis=0).tolist()
        opened.trial.set_user_attr("returns", dict(zip(self.tune.all_env_ids, means, strict=True)))
        self._close(folder, f"score {score:.4f}", values=score)

    def _close(self, folder: Path, what: str, values: float | None = None, state: str = "COMPLETE") -> None:
        import optuna

        opened = self.open.pop(folder)
        self.study.tell(opened.trial, values, optuna.trial.TrialState[state])
        self.workers.stop([job.run_dir for job in opened.jobs])
        print(f"trial {opened.trial.number}: {what}; {shlex.join(flags(opened.trial.params))}", flush=True)


@dataclass(frozen=True)
class Tune(Grid):
    """Search for hyper-parameters that do well on several environments, with Optuna.

    A trial's score is the mean over its seeds of the aggregated normalized returns of all environments. What was tried
    is in study.db; the same command goes on, and a larger --num-trials adds to it.
    """

    search: tuple[str, ...] = ()
    """what to try: NAME=a,b,c or NAME=LOW:HIGH or NAME=log:LOW:HIGH, such as learning-rate=log:1e-4:1e-2"""
    target_scores: tuple[str, ...] = ()
    """ENV=LOW:HIGH for each environment, the returns that count as 0 and as 1; may be left out for a single one"""
    aggregation: Literal["average", "median", "max", "min"] = "average"
    """how the normalized returns of the environments become one score"""
    num_trials: int = 20
    """trials in all, with those of earlier sessions"""
    num_seeds: int = 1
    """seeds of each environment in each trial"""
    prune: bool = True
    """end a trial that is worse than the median of those before it at the same point of the training"""

    def main(self) -> int:
        """Try, and show what was best."""
        if importlib.util.find_spec("optuna") is None:
            usage_error("tune needs Optuna: pip install 'cleanba[tune]'")
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        first = self.check()
        distributions = self._distributions(first)
        folder = Path(self.run_dir or Path("runs") / "tune" / self.name(first))
        shares = self.shares(first)
        if self.dry_run or not self.workers:
            runs = self.num_seeds * len(self.all_env_ids)
            print(f"{self.num_trials} trials of {runs} runs in {folder}; {self.workers} runs at a time")
            print("\n".join(f"--{name.replace('_', '-')}: {x}" for name, x in distributions.items()))
            print("\n".join(f"worker {i}: {share}" for i, share in enumerate(shares)))
            return 0
        with hold(folder, "grid"):
            study = self._study(folder)
            with Workers(shares) as workers:
                search = Search(self, study, first, folder, distributions, workers)
                for ended in workers.run(search.jobs(), search.look):
                    search.ended(ended)
            return self._report(folder, study, search.failures, workers.signal)

    @property
    def targets(self) -> dict[str, tuple[float, float]]:
        """The returns of each environment that count as 0 and as 1."""
        return dict(map(parse_target, self.target_scores)) or dict.fromkeys(self.all_env_ids, (0.0, 1.0))

    def _distributions(self, first: Any) -> dict[str, Any]:
        if self.num_trials < 1:
            usage_error(f"--num-trials {self.num_trials} must be at least 1")
        if not self.search:
            usage_error("say what to try, such as --search learning-rate=log:1e-4:1e-2 num-steps=32,64,128")
        if (self.target_scores or len(self.all_env_ids) > 1) and set(self.targets) != set(self.all_env_ids):
            usage_error("--target-scores must name each environment once: ENV=LOW:HIGH, such as CartPole-v1=0:500")
        if len(self.all_env_ids) > 1 and not self.target_scores:
            usage_error("several environments need --target-scores, ENV=LOW:HIGH for each, such as CartPole-v1=0:500")
        found = dict(parse_search(text, first) for text in self.search)
        if len(found) < len(self.search):
            usage_error("--search names an argument twice; list all its values in one place")
        return found

    def score(self, returns: Mapping[int, Sequence[float | None]]) -> float | None:
        """Of the returns of all environments by seed; None if one is missing."""
        if any(value is None for own in returns.values() for value in own):
            return None
        low, high = np.array([self.targets[env_id] for env_id in self.all_env_ids]).T
        normalized = (np.array(list(returns.values())) - low) / (high - low)  # [seeds, environments]
        return float(np.mean(AGGREGATIONS[self.aggregation](normalized, axis=1)))

    def _study(self, folder: Path) -> Any:
        """The study in this folder, which must be of this search, or a new one."""
        import optuna

        study = optuna.create_study(
            storage=f"sqlite:///{folder / 'study.db'}",
            study_name="tune",
            direction="maximize",
            load_if_exists=True,
            pruner=optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2),
        )
        # A sampler begins anew in every session; with the same seed it would propose what it has proposed before.
        study.sampler = optuna.samplers.TPESampler(seed=self.start_seed + len(study.trials))
        asked = {
            "script": self.program()[1].name,
            "arguments": list(self.arguments),
            "search": list(self.search),
            "targets": {env_id: list(self.targets[env_id]) for env_id in self.all_env_ids},
            "aggregation": self.aggregation,
            "seeds": list(self.seeds),
        }
        known = study.user_attrs.get("asked", asked)
        if changed := [f"{key} {known[key]} -> {asked[key]}" for key in asked if known[key] != asked[key]]:
            usage_error(f"{folder} holds another search ({'; '.join(changed)}); name another --run-dir")
        study.set_user_attr("asked", asked)
        return study

    def _report(self, folder: Path, study: Any, failures: Sequence[Ended], signum: int) -> int:
        """Table, files and the best command; the exit status."""
        done = sorted((t for t in study.trials if t.state.name == "COMPLETE"), key=lambda t: -t.value)
        names = [text.partition("=")[0] for text in self.search]
        rows = [
            [
                t.number,
                f"{t.value:.4f}",
                *(f"{t.user_attrs['returns'][env_id]:,.2f}" for env_id in self.all_env_ids),
                *(_short(t.params[name.replace("-", "_")]) for name in names),
            ]
            for t in done[:SHOWN]
        ]
        lines = markdown(["trial", "score", *self.all_env_ids, *names], rows)
        trials = [
            {"trial": t.number, "state": STATES[t.state.name], "score": t.value, "params": t.params, **t.user_attrs}
            for t in study.trials
        ]
        best = self._best_command(done[0].params) if done else ""
        write_json(folder / "tune.json", {**study.user_attrs["asked"], "best_command": best, "trials": trials})
        (folder / "tune.md").write_text("\n".join(lines) + "\n")
        states = [STATES[t.state.name] for t in study.trials]
        print("\n" + "\n".join(lines) + "\n")
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        print(f"trials: {counts}; wrote {folder / 'tune.md'} and {folder / 'tune.json'}", flush=True)
        show_failures(failures)
        if best:
            print(f"best: {best}", flush=True)
        if signum:
            print("interrupted; the same command goes on", file=sys.stderr)
            return 128 + signum
        return int(not done)

    def _best_command(self, params: dict[str, Any]) -> str:
        words = ["cleanba", "benchmark", "--script", str(self.program()[1]), "--env-ids", *self.env_ids]
        return shlex.join([*words, "--", *self.arguments, *flags(params)])


def _short(value: Any) -> str:
    """As --search has it, but not all the digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
