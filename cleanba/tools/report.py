"""Runs compared on one page: curves, final scores with intervals, human-normalized scores, performance profiles.

The statistics are those of Agarwal et al. 2021, arXiv:2108.13264, by their library rliable.
"""

import importlib.util
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro

from cleanba.core.usage import usage_error
from cleanba.tools.curves import (
    AXES,
    RESAMPLES,
    RETURN,
    WINDOW,
    Panel,
    Run,
    band,
    final_score,
    in_order,
    panels,
    read_run,
    smoothed,
    thin,
    variants,
)
from cleanba.tools.runs import find_runs, read_records
from cleanba.tools.scores import human_normalized, is_atari

POINTS = 300  # of a curve at most, and at least 50: fewer, the more curves there are
NUMBERS = 500_000  # of all curves together, about
TEMPLATE = Path(__file__).with_name("report.html")
NOTHING = "–"  # noqa: RUF001


class Estimate(NamedTuple):
    """A statistic of scores and its 95 % interval; the arrays have as many values as the statistic."""

    point: np.ndarray
    low: np.ndarray
    high: np.ndarray


def estimate(tasks: Sequence[np.ndarray], statistic: Callable[[np.ndarray], Any]) -> Estimate:
    """A statistic over the scores of all tasks, with the stratified bootstrap: each task's runs are drawn anew."""
    from rliable import library  # here, because it is an extra

    def of_all(*tasks: np.ndarray) -> np.ndarray:
        return np.atleast_1d(statistic(np.concatenate(tasks)))

    np.random.seed(0)  # rliable draws from NumPy's global numbers
    points, intervals = library.get_interval_estimates({"": [s[:, None] for s in tasks]}, of_all, reps=RESAMPLES)
    return Estimate(points[""], *intervals[""])


def iqm(scores: np.ndarray) -> float:
    """The interquartile mean. As rliable's, whose call of SciPy takes far longer, for each of a thousand resamples."""
    ordered, cut = np.sort(scores, axis=None), scores.size // 4
    return float(ordered[cut : scores.size - cut].mean())


def profile(scores: dict[str, list[np.ndarray]], taus: np.ndarray) -> dict[str, Estimate]:
    """Of each group the share of runs whose score is above tau, for all tau."""
    return {name: estimate(tasks, lambda s: (s.reshape(-1, 1) > taus).mean(0)) for name, tasks in scores.items()}


class Suite(NamedTuple):
    """Scores that may be averaged: of one environment, or human-normalized of the games that all groups played."""

    title: str
    label: str
    scores: dict[str, list[np.ndarray]]  # by group, an array for each task

    def taus(self) -> np.ndarray:
        """Thresholds over the whole range of scores; one if they are all the same."""
        every = np.concatenate([task for tasks in self.scores.values() for task in tasks])
        return np.unique(np.linspace(every.min(), every.max(), 201))


class Comparison:
    """Everything that a report says, from the runs' files."""

    def __init__(self, paths: Sequence[Path]):
        self.runs = [read_run(path, read_records) for path in find_runs(paths)]
        if not any(len(run.step) for run in self.runs):
            what = f"{self.runs[0].path} has no" if len(self.runs) == 1 else f"none of the {len(self.runs)} runs has"
            usage_error(f"{what} metrics yet: no update has been finished")
        self.variants = variants(self.runs)
        self.groups = in_order(set(self.variants))
        self.env_ids = in_order({run.env_id for run in self.runs})
        self.final = [final_score(run) for run in self.runs]
        logged = in_order({metric for run in self.runs for metric in run.values if "/" in metric})
        self.metrics = [RETURN, *(m for m in logged if m != RETURN and not m.startswith("stats/"))]
        self.points = min(POINTS, max(50, NUMBERS // (len(self.runs) * len(self.metrics))))
        self.thinned = [thin(run, self.points) for run in self.runs]
        self.panels = panels(self.thinned, "algorithm")

    @property
    def names(self) -> list[str]:
        """The runs' directories; in full only where their names are not enough."""
        names = [run.path.resolve().name for run in self.runs]
        return [name if names.count(name) == 1 else str(run.path) for name, run in zip(names, self.runs, strict=True)]

    def scores(self, env_id: str, group: str) -> np.ndarray:
        """The final scores of a group's runs in an environment, as far as they have one."""
        rows = zip(self.runs, self.variants, self.final, strict=True)
        own = [score for run, variant, score in rows if (run.env_id, variant) == (env_id, group)]
        return np.array([score for score in own if math.isfinite(score)])

    def by_group(self, env_id: str) -> dict[str, np.ndarray]:
        """The scores in an environment of each group that has some."""
        return {group: scores for group in self.groups if len(scores := self.scores(env_id, group))}

    def atari(self) -> tuple[list[str], dict[str, list[np.ndarray]]]:
        """The games that every group which played any has played, and the groups' human-normalized scores in them."""
        played = {env_id: self.by_group(env_id) for env_id in self.env_ids if is_atari(env_id)}
        groups = [group for group in self.groups if any(group in scores for scores in played.values())]
        games = [env_id for env_id, scores in played.items() if set(scores) == set(groups)]
        of_game = {game: {g: human_normalized(game, scores) for g, scores in played[game].items()} for game in games}
        return games, {group: [of_game[game][group] for game in games] for group in groups if games}

    def suites(self) -> list[Suite]:
        """What performance profiles are drawn of: Atari as a whole, any other environment alone; if scores differ."""
        games, scores = self.atari()
        found = [Suite(f"Atari, {_count(len(games), 'game')}", "human-normalized score", scores)] if games else []
        for env_id in self.env_ids:
            if not is_atari(env_id) and (by_group := self.by_group(env_id)):
                found.append(Suite(env_id, "final score", {group: [s] for group, s in by_group.items()}))
        return [suite for suite in found if len(suite.taus()) > 1]


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _number(x: float) -> str:
    """A score, with fewer decimals if it is large."""
    if not math.isfinite(x):
        return NOTHING
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.1f}" if abs(x) >= 100 else f"{x:.2f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def _json(content: Any) -> str:
    """JSON that may stand inside a script element, whatever text is in it."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _list(values: np.ndarray) -> list[float | None]:
    """Numbers for the page, NaN as null."""
    return [float(f"{x:.5g}") if math.isfinite(x) else None for x in values]


def content(comparison: Comparison) -> dict[str, Any]:
    """What the page's script draws from."""
    index = {group: i for i, group in enumerate(comparison.groups)}
    titles = [panel.title for panel in comparison.panels]
    runs = [
        {
            "name": name,
            "group": index[variant],
            "panel": titles.index(run.env_id),
            "step": _list(run.step),
            "time": _list(run.time) if len(run.time) and np.isfinite(run.time).all() else None,
            "values": {m: _list(smoothed(run, m)) for m in comparison.metrics if m in run.values},
        }
        for run, name, variant in zip(comparison.thinned, comparison.names, comparison.variants, strict=True)
    ]
    profiles = []
    for suite in comparison.suites():
        taus = suite.taus()
        lines = {
            index[group]: {"y": _list(shares.point), "low": _list(shares.low), "high": _list(shares.high)}
            for group, shares in profile(suite.scores, taus).items()
        }
        profiles.append({"title": suite.title, "label": suite.label, "x": _list(taus), "lines": lines})
    return {
        "metrics": comparison.metrics,
        "groups": comparison.groups,
        "runs": runs,
        "panels": [{"title": p.title, "bands": _bands(p, comparison, index)} for p in comparison.panels],
        "profiles": profiles,
    }


def _bands(panel: Panel, comparison: Comparison, index: dict[str, int]) -> dict[str, Any]:
    """The groups' means by metric, axis and group."""
    found: dict[str, Any] = {}
    for metric in comparison.metrics:
        for axis in AXES:
            for group, runs in panel.groups.items():
                mean = band(runs, metric, axis, comparison.points)
                if len(mean.x):
                    line = {"from": _list(mean.x[:1])[0], "to": _list(mean.x[-1:])[0], "y": _list(mean.mean)}
                    if len(runs) > 1:
                        line |= {"low": _list(mean.low), "high": _list(mean.high), "count": mean.runs.tolist()}
                    found.setdefault(metric, {}).setdefault(axis, {})[index[group]] = line
    return found


def page(comparison: Comparison) -> str:
    """The report as one HTML page that needs nothing else."""
    title = f"Comparison of {_count(len(comparison.runs), 'run')}"
    parts = {
        "title": title,
        "facts": _facts(comparison),
        "tables": "\n".join(
            [*_final_tables(comparison), *_atari_table(comparison), *_profiles(comparison), _runs(comparison)]
        ),
        "notes": "\n".join(f"<li>{note}</li>" for note in _notes(comparison)),
        "data": _json(content(comparison)),
    }
    text = TEMPLATE.read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def _facts(comparison: Comparison) -> str:
    algorithms = {run.algorithm for run in comparison.runs}
    ends = [run for run in comparison.runs if len(run.step)]
    times = [run.time[-1] for run in ends if math.isfinite(run.time[-1])]
    facts = {
        "runs" if len(comparison.runs) > 1 else "run": f"{len(comparison.runs):,}",
        "algorithms" if len(algorithms) > 1 else "algorithm": f"{len(algorithms)}",
        "environments" if len(comparison.env_ids) > 1 else "environment": f"{len(comparison.env_ids)}",
        "environment steps": f"{sum(run.step[-1] for run in ends):,.0f}",
        "of training": _duration(sum(times) if times else math.nan),
    }
    return "".join(f"<div><dt>{name}</dt><dd>{fact}</dd></div>" for name, fact in facts.items())


def _swatch(group: int) -> str:
    """As the page's script makes it."""
    return f'<i class="swatch dash{group // 8 % 3}" style="--c:var(--c{group % 8})"></i>'


def _between(group: int, estimated: Estimate, low: float, high: float) -> str:
    """A statistic and its interval, drawn on a scale from low to high."""
    at, start, end = (f"{4 + 92 * (float(x[0]) - low) / (high - low) if high > low else 50:.1f}%" for x in estimated)
    style = f"--c:var(--c{group % 8});--at:{at};--low:{start};--high:{end}"
    return f'<td class="between"><span style="{style}"></span></td>'


def _table(head: Sequence[str], rows: Iterable[str], names: int = 1) -> str:
    """The first columns hold names, the others numbers."""
    cells = "".join(f"<th{' class=name' if i < names else ''}>{name}</th>" for i, name in enumerate(head))
    return f'<div class="card scroll"><table><thead><tr>{cells}</tr></thead>{"".join(rows)}</table></div>'


def _final_tables(comparison: Comparison) -> list[str]:
    """Mean, standard deviation and interquartile mean of each group in each environment."""
    with_human = any(map(is_atari, comparison.env_ids))
    rows = []
    for env_id in comparison.env_ids:
        by_group = comparison.by_group(env_id)
        estimated = {group: estimate([scores], iqm) for group, scores in by_group.items()}
        low = min((float(e.low[0]) for e in estimated.values()), default=0)
        high = max((float(e.high[0]) for e in estimated.values()), default=0)
        best = max((e.point[0] for e in estimated.values()), default=math.nan)
        rows.append(f'<tbody><tr><th colspan="{6 + with_human}">{escape(env_id)}</th></tr>')
        rows += [_final_row(comparison, env_id, group, e, low, high, best) for group, e in estimated.items()]
        if not estimated:
            rows.append(f'<tr><td class="name soft" colspan="{6 + with_human}">no episode has ended yet</td></tr>')
        rows.append("</tbody>")
    head = ["algorithm", "runs", "mean ± std", "IQM", "95 % interval", ""] + ["human-normalized"] * with_human
    return [
        "<h2>Final scores</h2>",
        f"<p>A run's score is the mean return of its last {WINDOW} episodes. IQM is the mean of the middle half of a "
        "group's runs, with the interval of the stratified bootstrap.</p>",
        _table(head, rows),
    ]


def _final_row(
    comparison: Comparison, env_id: str, group: str, estimated: Estimate, low: float, high: float, best: float
) -> str:
    scores, i = comparison.scores(env_id, group), comparison.groups.index(group)
    deviation = f" ± {_number(float(scores.std(ddof=1)))}" if len(scores) > 1 else ""
    interval = f"{_number(estimated.low[0])} to {_number(estimated.high[0])}" if len(scores) > 1 else NOTHING
    cells = [
        f'<td class="name">{_swatch(i)}{escape(group)}</td>',
        f"<td>{len(scores)}</td>",
        f"<td>{_number(float(scores.mean()))}<small>{deviation}</small></td>",
        f'<td class="iqm">{_number(estimated.point[0])}</td>',
        f"<td>{interval}</td>",
        _between(i, estimated, low, high),
    ]
    if any(map(is_atari, comparison.env_ids)):
        human = _number(human_normalized(env_id, float(scores.mean()))) if is_atari(env_id) else NOTHING
        cells.append(f"<td>{human}</td>")
    kind = ' class="best"' if estimated.point[0] == best and low < high else ""
    return f'<tr data-group="{i}"{kind}>{"".join(cells)}</tr>'


def _atari_table(comparison: Comparison) -> list[str]:
    """The aggregates that Agarwal et al. propose, over the games that all groups have played."""
    if not any(map(is_atari, comparison.env_ids)):
        return []
    games, scores = comparison.atari()
    title = "<h2>Atari, human-normalized</h2>"
    if not games:
        return [title, "<p>There is no game that all groups have scores in, and so nothing to compare over games.</p>"]
    estimated = {group: [estimate(tasks, s) for s in _aggregates(tasks)] for group, tasks in scores.items()}
    low = min(float(e[0].low[0]) for e in estimated.values())
    high = max(float(e[0].high[0]) for e in estimated.values())
    rows = []
    for group, values in estimated.items():
        i = comparison.groups.index(group)
        texts = [f"{_number(e.point[0])}<small> {_number(e.low[0])} to {_number(e.high[0])}</small>" for e in values]
        cells = [f'<td class="name">{_swatch(i)}{escape(group)}</td>', f"<td>{sum(map(len, scores[group]))}</td>"]
        cells += [f'<td class="iqm">{texts[0]}</td>', _between(i, values[0], low, high)]
        rows.append(f'<tr data-group="{i}">{"".join(cells + [f"<td>{text}</td>" for text in texts[1:]])}</tr>')
    head = ["algorithm", "runs", "IQM", "", "median", "mean", "optimality gap"]
    return [
        title,
        f"<p>Over {_count(len(games), 'game')} that every group has played: 0 is a random player, 1 a person. The "
        "median is that of the games' means; the optimality gap is what is missing to 1, less is better.</p>",
        _table(head, ["<tbody>", *rows, "</tbody>"]),
    ]


def _aggregates(tasks: Sequence[np.ndarray]) -> list[Callable[[np.ndarray], Any]]:
    """Interquartile mean, median, mean and optimality gap of scores that stand task after task."""
    from rliable import metrics

    ends = np.cumsum([len(task) for task in tasks])[:-1]

    def of_tasks(statistic: Callable[[np.ndarray], Any]) -> Callable[[np.ndarray], Any]:
        return lambda scores: statistic(np.array([[task.mean() for task in np.split(scores, ends)]]))

    means = of_tasks(metrics.aggregate_median), of_tasks(metrics.aggregate_mean)
    return [iqm, *means, metrics.aggregate_optimality_gap]


def _profiles(comparison: Comparison) -> list[str]:
    text = "The share of a group's runs whose final score is above a threshold: the higher curve is the better one."
    section = f'<h2>Performance profiles</h2><p>{text}</p><div class="charts" id="profiles"></div>'
    return [section] if comparison.suites() else []


def _runs(comparison: Comparison) -> str:
    """Every run, with a box that hides it."""
    head = ["run", "algorithm", "environment", "seed", "steps", "training", "score", "evaluation", "state"]
    rows = []
    columns = comparison.runs, comparison.names, comparison.variants, comparison.final
    for i, (run, name, variant, score) in enumerate(zip(*columns, strict=True)):
        group = comparison.groups.index(variant)
        box = f'<input type="checkbox" checked autocomplete="off" data-run="{i}" aria-label="show {escape(name)}">'
        cells = [
            f'<td class="name" title="{escape(str(run.path))}"><label>{box} {escape(name)}</label></td>',
            f'<td class="name">{_swatch(group)}{escape(variant)}</td>',
            f'<td class="name">{escape(run.env_id)}</td>',
            f"<td>{escape(run.seed)}</td>",
            f"<td>{run.step[-1]:,.0f}</td>" if len(run.step) else "<td>0</td>",
            f"<td>{_duration(run.time[-1] if len(run.time) else math.nan)}</td>",
            f"<td>{_number(score)}</td>",
            f"<td>{_number(float(run.result.get('eval_episodic_return', math.nan)))}</td>",
            f"<td>{_state(run)}</td>",
        ]
        rows.append(f'<tr data-group="{group}" data-run="{i}">{"".join(cells)}</tr>')
    text = "The box hides a run's own curve. Means, bands and tables stay those of all runs."
    return f"<h2>Runs</h2><p>{text}</p>" + _table(head, ["<tbody>", *rows, "</tbody>"], names=3)


def _state(run: Run) -> str:
    if run.result:
        return "finished"
    if not len(run.step):
        return "no update yet"
    total = run.settings.get("total_timesteps")
    return f"{run.step[-1] / total:.0%} done" if total else "not finished"


def _notes(comparison: Comparison) -> list[str]:
    notes = [
        "A group is an algorithm; runs in one environment whose arguments differ in more than the seed are groups of "
        "their own, named by what differs.",
        "The band is the 95 % bootstrap interval of the mean over runs. The mean is drawn as far as more than half "
        "of the runs have come. With fewer than five runs any such interval is too narrow.",
        "A curve is smoothed by a Gaussian whose deviation is 1/60 of it, after neighbouring updates of long runs were "
        f"averaged to {comparison.points} points. Hover it, touch it, or move over it with the arrow keys.",
        "Time is that of training: pauses between the sessions of a run do not count, and a session's first update "
        "(with its start and compilation) counts as long as the run's median update.",
        f"Intervals of scores and performance profiles: stratified bootstrap, percentiles of {RESAMPLES:,} resamples, "
        "by rliable (Agarwal et al. 2021, arXiv:2108.13264). Std is that of the sample.",
    ]
    if any(map(is_atari, comparison.env_ids)):
        notes.append(
            "Human-normalized: (score - random) / (human - random), with the scores in Badia et al. 2020 "
            "(arXiv:2003.13350), as DQN Zoo lists them."
        )
    return notes


def picture(comparison: Comparison, out: Path) -> None:
    """The report's charts without the tables: curves over steps and over time, and performance profiles."""
    from cleanba.tools.plot import draw_panels, legend, new_figure, plain, save  # here: it takes a second

    suites, charts = comparison.suites(), comparison.panels
    axes_shown = AXES if any(np.isfinite(run.time).any() for run in comparison.runs) else AXES[:1]
    rows = len(charts) + math.ceil(len(suites) / 2)
    figure = new_figure(11, 3 * rows)
    handles: dict[str, Any] = {}
    for column, axis in enumerate(axes_shown):
        places = [figure.add_subplot(rows, 2, 2 * row + column + 1) for row in range(len(charts))]
        handles |= draw_panels(places, charts, RETURN, axis)
    for i, suite in enumerate(suites):
        axes, taus = figure.add_subplot(rows, 2, 2 * len(charts) + i + 1), suite.taus()
        for group, shares in profile(suite.scores, taus).items():
            color = handles[group].get_color()
            axes.step(taus, shares.point, where="post", color=color, linewidth=1.8)
            axes.fill_between(taus, shares.low, shares.high, step="post", color=color, alpha=0.18, linewidth=0)
        axes.set_title(plain(suite.title), loc="left", fontweight="bold")
        axes.set(xlabel=suite.label, ylabel="share of runs above", ylim=(0, 1.02))
        axes.grid(color="0.92", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    legend(figure, handles.values(), handles)
    save(figure, out)


@dataclass(frozen=True)
class Report:
    """Compare runs on one page, which needs no network: curves, final scores with intervals, profiles.

    With another ending than .html the charts are drawn as a picture, without the tables.
    """

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUNS ...")]
    """run directories, or folders with run directories in them"""
    out: Path = Path("report.html")
    """the page; or a picture, if it ends in .png, .svg or .pdf"""

    def main(self) -> None:
        """Compare and say where."""
        if not self.runs:
            usage_error("report needs at least one run directory, or a folder of them: cleanba report RUNS")
        if importlib.util.find_spec("rliable") is None:
            usage_error("report needs rliable: pip install 'cleanba[report]'")
        ending = self.out.suffix.lower()
        if ending not in (".html", ".png", ".svg", ".pdf"):
            usage_error(f"--out {self.out}: use .html for the page, or .png, .svg or .pdf for its charts as a picture")
        comparison = Comparison(self.runs)
        if ending == ".html":
            text = page(comparison)
            try:
                self.out.parent.mkdir(parents=True, exist_ok=True)
                self.out.write_text(text, encoding="utf-8")
            except OSError as error:
                usage_error(f"--out {self.out} cannot be written: {error.strerror or error}")
        else:
            picture(comparison, self.out)
        unfinished = sum(not run.result for run in comparison.runs)
        about = f"{_count(len(comparison.runs), 'run')} in {_count(len(comparison.groups), 'group')}"
        print(f"wrote {self.out}: {about}" + (f", {unfinished} not finished" if unfinished else ""))
