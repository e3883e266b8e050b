"""Runs as curves: over steps or training time, thinned out, smoothed, and grouped with the mean and its confidence."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from cleanba.tools.runs import read_config, read_metrics

RETURN = "charts/episodic_return"
OF_EPISODES = "charts/episodic_"  # such metrics are means over the episodes that ended in an update
SMOOTHING = 1 / 60  # standard deviation of the smoothing, as a part of the curve
WINDOW = 100  # episodes that a run's score is the mean of, as in result.json
CONFIDENCE, RESAMPLES = 0.95, 1000
NUMBERS = (int, float)  # of JSON; true and false are none

Axis = Literal["step", "time"]
By = Literal["algorithm", "seed", "env"]
AXES: tuple[Axis, ...] = ("step", "time")


class Run(NamedTuple):
    """What a run has logged; N updates, or fewer points after `thin`."""

    path: Path
    algorithm: str
    env_id: str
    seed: str
    settings: dict[str, Any]  # its other experiment arguments
    num_updates: int  # of the whole run, by its last record
    step: np.ndarray  # [N] environment steps
    time: np.ndarray  # [N] seconds of training, NaN if they were not logged
    episodes: np.ndarray  # [N] that ended
    values: dict[str, np.ndarray]  # [N] by metric; NaN where there is no finite value
    result: dict[str, Any]  # of the finished run

    def weight(self, metric: str) -> np.ndarray:
        """How much each value counts in a mean."""
        value = self.values[metric]
        return np.where(np.isfinite(value), self.episodes if metric.startswith(OF_EPISODES) else 1.0, 0.0)


def read_run(path: Path, read: Callable[[Path], list[dict[str, Any]]] = read_metrics) -> Run:
    """Everything of a run that can be drawn; with `read_records` also of one that has not finished an update."""
    config, records = read_config(path), read(path)
    experiment = dict(config.get("experiment", {}))
    about = (config.get("algorithm", "?"), experiment.pop("env_id", "?"), experiment.pop("seed", "?"))
    algorithm, env_id, seed = map(str, about)
    metrics = sorted({key for record in records for key, x in record.items() if type(x) in NUMBERS})
    try:
        result = json.loads((path / "result.json").read_text())
    except (OSError, ValueError):
        result = {}
    return Run(
        path,
        algorithm,
        env_id,
        seed,
        experiment,
        records[-1]["update"] if records else 0,
        np.array([record["global_step"] for record in records], np.float64),
        training_time(records, config.get("sessions", [])),
        np.array([record.get("charts/episodes", 1) for record in records], np.float64),
        {metric: _finite([record.get(metric) for record in records]) for metric in metrics},
        result,
    )


def _finite(numbers: Sequence[Any]) -> np.ndarray:
    values = np.array([x if type(x) in NUMBERS else np.nan for x in numbers], np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def training_time(records: Sequence[dict[str, Any]], sessions: Sequence[dict[str, Any]]) -> np.ndarray:
    """Seconds of training up to the end of each update, without the pauses between sessions.

    The first update of a session counts as long as the run's median update: what passed before it ended is a pause, a
    start and a compilation of unknown length.
    """
    starts: list[int] = []  # the updates that sessions began after; a later one has cut what followed its own
    for after in [0, *(session["after_update"] for session in sessions)]:
        starts = [*(start for start in starts if start < after), after]
    clock = _finite([record.get("stats/time") for record in records])
    spent = np.maximum(np.diff(clock, prepend=np.nan), 0)  # a clock may be set back
    begins = np.isin([record["update"] - 1 for record in records], starts)
    begins[:1] = True
    usual = spent[~begins]
    spent[begins] = np.median(usual) if len(usual) else 0
    return np.cumsum(spent) if np.isfinite(clock).all() else np.full(len(records), np.nan)


def smooth(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Mean of the neighbours by a Gaussian and by weight; NaN where there is no weight near."""
    deviation = len(value) * SMOOTHING
    reach = min(math.ceil(3 * deviation), (len(value) - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    total = np.convolve(weight, kernel, "same")
    mean = np.convolve(np.where(weight > 0, value, 0) * weight, kernel, "same")
    return np.divide(mean, total, out=np.full(len(value), np.nan), where=total > 0)


def smoothed(run: Run, metric: str) -> np.ndarray:
    """A metric's smooth curve, NaN where the run has no value."""
    if metric not in run.values:
        return np.full(len(run.step), np.nan)
    weight = run.weight(metric)
    return np.where(weight > 0, smooth(run.values[metric], weight), np.nan)


def thin(run: Run, most: int) -> Run:
    """The run with at most so many points: neighbouring updates become their mean, so that no peak is invented."""
    n = len(run.step)
    if n <= most:
        return run
    begin = np.linspace(0, n, most, endpoint=False).astype(int)
    size = np.diff(begin, append=n)

    def mean(metric: str) -> np.ndarray:
        weight = run.weight(metric)
        total = np.add.reduceat(weight, begin)
        of_values = np.add.reduceat(np.where(weight > 0, run.values[metric], 0) * weight, begin)
        return np.divide(of_values, total, out=np.full(most, np.nan), where=total > 0)

    return run._replace(
        step=np.add.reduceat(run.step, begin) / size,
        time=np.add.reduceat(run.time, begin) / size,
        episodes=np.add.reduceat(run.episodes, begin),
        values={metric: mean(metric) for metric in run.values},
    )


def final_score(run: Run) -> float:
    """The mean return of the last 100 episodes, counted in whole updates; NaN if none has ended."""
    if RETURN not in run.values:
        return math.nan
    weight, value = run.weight(RETURN)[::-1], run.values[RETURN][::-1]
    last = int(np.searchsorted(np.cumsum(weight), WINDOW)) + 1
    weight, value = weight[:last], value[:last]
    return float(np.average(value[weight > 0], weights=weight[weight > 0])) if weight.any() else math.nan


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted, numbers by their size."""
    return sorted(names, key=lambda name: [int(x) if x.isdecimal() else x for x in re.split(r"([0-9]+)", name)])


def variants(runs: Sequence[Run]) -> list[str]:
    """The algorithm of each run, with the arguments that tell runs of one algorithm and environment apart."""
    differing: dict[str, dict[str, None]] = {}
    first: dict[tuple[str, str], Run] = {}
    for run in runs:
        other = first.setdefault((run.algorithm, run.env_id), run).settings
        keys = [k for k in sorted(run.settings | other) if run.settings.get(k) != other.get(k)]
        differing.setdefault(run.algorithm, {}).update(dict.fromkeys(keys))
    return [
        " · ".join([run.algorithm, *(f"{k.replace('_', '-')} {run.settings.get(k)}" for k in differing[run.algorithm])])
        for run in runs
    ]


class Panel(NamedTuple):
    """A chart: the runs of each of its curves."""

    title: str
    groups: dict[str, list[Run]]


def panels(runs: Sequence[Run], by: By) -> list[Panel]:
    """Charts whose curves are told apart by algorithm, seed or environment. A curve is of runs that differ in what was
    not asked for only if that is the seed: nothing unlike is averaged."""
    names = variants(runs)
    several = len(set(names)) > 1
    charts: dict[str, dict[str, list[Run]]] = {}
    for run, variant in zip(runs, names, strict=True):
        seed = f"{variant} · seed {run.seed}" if several else f"seed {run.seed}"
        titles = {"algorithm": (run.env_id, variant), "seed": (run.env_id, seed), "env": (variant, run.env_id)}
        title, curve = titles[by]
        charts.setdefault(title, {}).setdefault(curve, []).append(run)
    return [Panel(title, {c: charts[title][c] for c in in_order(charts[title])}) for title in in_order(charts)]


class Band(NamedTuple):
    """The mean of several runs, its confidence interval (NaN for a single run), and of how many runs it is."""

    x: np.ndarray  # evenly spaced
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    runs: np.ndarray


def band(runs: Sequence[Run], metric: str, axis: Axis, points: int) -> Band:
    """The mean over runs of a metric's smooth curve, as far as more than half of them have come.

    The interval is the bootstrap's over runs (percentiles, 1,000 resamples with a fixed seed).
    """
    curves = [(getattr(run, axis), smoothed(run, metric)) for run in runs]
    curves = [(x[known], y[known]) for x, y in curves if (known := np.isfinite(x) & np.isfinite(y)).any()]
    if not curves:
        return Band(*(np.empty(0) for _ in Band._fields))
    grid = np.unique(np.linspace(min(x[0] for x, _ in curves), max(x[-1] for x, _ in curves), points))
    reach = (grid[-1] - grid[0]) / points  # of the ends: runs of one length rarely end at the same step
    inside = [(grid >= x[0] - reach) & (grid <= x[-1] + reach) for x, _ in curves]
    at = np.array([np.where(i, np.interp(grid, x, y), np.nan) for i, (x, y) in zip(inside, curves, strict=True)])
    there = np.isfinite(at)  # [runs, points]
    enough = np.flatnonzero(2 * there.sum(0) > len(curves))
    if not len(enough):  # two runs that share no stretch
        return Band(*(np.empty(0) for _ in Band._fields))
    kept = slice(enough[0], enough[-1] + 1)
    grid, at, there = grid[kept], at[:, kept], there[:, kept]
    low, high = np.full((2, len(grid)), np.nan)
    for pattern in np.unique(there, axis=1).T:
        same = (there == pattern[:, None]).all(0)
        if pattern.sum() > 1:
            low[same], high[same] = _interval(at[pattern][:, same])
    return Band(grid, np.nanmean(at, axis=0), low, high, there.sum(0))


def _interval(values: np.ndarray) -> np.ndarray:
    """The lower and the upper end of the interval of the mean over runs; values [runs, points]."""
    n = len(values)
    drawn = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)  # how often a resample has each run
    return np.quantile(drawn / n @ values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
