"""Learning curves as a picture."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter

from cleanba.core.usage import usage_error
from cleanba.tools.curves import (
    OF_EPISODES,
    RETURN,
    Axis,
    By,
    Panel,
    Run,
    band,
    in_order,
    panels,
    read_run,
    smoothed,
    thin,
)
from cleanba.tools.runs import find_runs

POINTS = 1000  # of a curve at most; the picture has no more pixels
UNITS = [(7200, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds")]  # from so many seconds on


class Scale(NamedTuple):
    """What a picture's horizontal axis shows: a field of `Run`, divided by the size of its unit."""

    axis: Axis
    size: float
    label: str

    def __call__(self, curve: Any) -> np.ndarray:
        """Where a curve's or a run's points are."""
        return getattr(curve, self.axis) / self.size


def scale(axis: Axis, curves: Iterable[Any]) -> Scale:
    """Steps, or the unit that suits the longest time."""
    if axis == "step":
        return Scale(axis, 1, "environment steps")
    longest = max((curve.time[-1] for curve in curves if np.isfinite(curve.time).any()), default=0)
    size, unit = next((size, unit) for least, size, unit in UNITS if longest >= least)
    return Scale(axis, size, f"{unit} of training")


class Curve(NamedTuple):
    """A metric of one run; the arrays have one value per update at which it was logged."""

    run: Path
    algorithm: str
    env_id: str
    seed: str
    step: np.ndarray
    time: np.ndarray
    value: np.ndarray
    smooth: np.ndarray


def read_curve(path: Path, metric: str = RETURN) -> Curve:
    """The curve of a run; an empty one if no episode has ended yet."""
    run = thin(_with_numbers([read_run(path)], metric)[0], POINTS)
    shown = run.weight(metric) > 0 if metric in run.values else np.zeros(len(run.step), bool)
    value = run.values.get(metric, run.step)[shown]
    points = run.step[shown], run.time[shown], value, smoothed(run, metric)[shown]
    return Curve(path, run.algorithm, run.env_id, run.seed, *points)


def _with_numbers(runs: Sequence[Run], metric: str) -> list[Run]:
    """The runs that have the metric, or would if an episode had ended; at least one."""
    of_episodes = metric.startswith(OF_EPISODES)
    having = [run for run in runs if metric in run.values or (of_episodes and not run.episodes.any())]
    if not having:
        known = in_order({metric for run in runs for metric in run.values})
        usage_error(f"{_these(runs)} no numbers for --metric {metric}; there are {', '.join(known)}")
    return having


def _these(runs: Sequence[Run]) -> str:
    return f"{runs[0].path} has" if len(runs) == 1 else f"these {len(runs)} runs have"


def labels(curves: Sequence[Curve]) -> list[str]:
    """What sets the runs apart: algorithm, environment and seed if that is enough, or else their directories."""
    varying = [field for field in ("algorithm", "env_id") if len({getattr(c, field) for c in curves}) > 1]
    names = [" · ".join([*(getattr(c, field) for field in varying), f"seed {c.seed}"]) for c in curves]
    for candidates in (names, [c.run.resolve().name for c in curves]):
        if len(set(candidates)) == len(curves):
            return candidates
    return [str(c.run) for c in curves]


def plot(runs: Sequence[Path], out: Path, metric: str = RETURN, axis: Axis = "step") -> None:
    """Draw a metric of the runs: light as it was logged, strong smoothed."""
    curves = [read_curve(run, metric) for run in dict.fromkeys(runs)]
    _check_time(axis, curves)
    x = scale(axis, curves)
    figure = new_figure(8, 4.5)
    axes = figure.add_subplot()
    handles = []
    for color, curve in zip(_colors(len(curves)), curves, strict=True):
        dot: dict[str, Any] = dict(marker="o", markersize=4) if len(curve.step) == 1 else {}
        axes.plot(x(curve), curve.value, color=color, alpha=0.25 if len(curves) < 4 else 0.12, linewidth=0.8)
        handles += axes.plot(x(curve), curve.smooth, color=color, linewidth=1.8, **dot)
    env_ids, algorithms = (list(dict.fromkeys(getattr(c, field) for c in curves)) for field in ("env_id", "algorithm"))
    about = ", ".join(algorithms) + (f", seed {curves[0].seed}" if len(curves) == 1 else f", {len(curves)} runs")
    _dress(axes, ", ".join(env_ids), metric, x.label, any(len(curve.step) for curve in curves))
    axes.set_title(plain(about), loc="right", fontsize="medium", color="0.35")
    if len(curves) > 1:
        legend(figure, handles, labels(curves))
    save(figure, out)


def plot_groups(runs: Sequence[Path], out: Path, by: By, metric: str = RETURN, axis: Axis = "step") -> None:
    """Draw the mean of each group of runs with its confidence band, and the runs themselves light."""
    read = [thin(run, POINTS) for run in _with_numbers([read_run(path) for path in runs], metric)]
    _check_time(axis, read)
    charts = panels(read, by)
    columns = min(math.ceil(math.sqrt(len(charts))), 4)
    rows = math.ceil(len(charts) / columns)
    figure = new_figure(8, 4.5) if len(charts) == 1 else new_figure(2.5 + 4.2 * columns, 3.2 * rows)
    handles = draw_panels([figure.add_subplot(rows, columns, i + 1) for i in range(len(charts))], charts, metric, axis)
    legend(figure, handles.values(), handles)
    save(figure, out)


def draw_panels(places: Iterable[Any], charts: Sequence[Panel], metric: str, axis: Axis) -> dict[str, Any]:
    """Draw each chart in its place. The lines to be explained, by group; a group has one colour everywhere."""
    names = in_order({name for chart in charts for name in chart.groups})
    colors = dict(zip(names, _colors(len(names)), strict=True))
    handles = {}
    for axes, chart in zip(places, charts, strict=True):
        x = scale(axis, chain(*chart.groups.values()))
        for name, runs in chart.groups.items():
            mean = band(runs, metric, axis, points=200)
            for run in runs if len(runs) > 1 else []:
                axes.plot(x(run), smoothed(run, metric), color=colors[name], alpha=0.3, linewidth=0.7)
            axes.fill_between(mean.x / x.size, mean.low, mean.high, color=colors[name], alpha=0.18, linewidth=0)
            dot: dict[str, Any] = dict(marker="o", markersize=4) if len(mean.x) == 1 else {}
            [handles[name]] = axes.plot(mean.x / x.size, mean.mean, color=colors[name], linewidth=1.8, **dot)
        _dress(axes, chart.title, metric, x.label, any(len(line.get_xdata()) for line in axes.lines))
    return {name: handles[name] for name in names}


def new_figure(width: float, height: float) -> Figure:
    """Inches."""
    return Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def legend(figure: Figure, handles: Iterable[Any], names: Iterable[str]) -> None:
    """Beside the charts, which become as high as it is."""
    shown = [plain(name) for name in names]
    figure.set_figheight(max(figure.get_figheight(), 0.4 + 0.19 * len(shown)))
    figure.legend(list(handles), shown, loc="outside right upper", frameon=False, fontsize="small")


def save(figure: Figure, out: Path) -> None:
    """Write the picture; its ending says how."""
    file_format = out.suffix[1:].lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if file_format not in known:
        usage_error(f"--out {out}: cannot draw a .{file_format}; use one of {', '.join(sorted(known))}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format=file_format)
    except OSError as error:
        usage_error(f"--out {out} cannot be written: {error.strerror or error}")


def _colors(n: int) -> list[Any]:
    colors = matplotlib.colormaps["tab10" if n <= 10 else "turbo"]
    return [colors(i if n <= 10 else (i + 0.5) / n) for i in range(n)]


def _check_time(axis: Axis, curves: Iterable[Any]) -> None:
    if axis == "time" and not any(np.isfinite(curve.time).any() for curve in curves):
        usage_error("--x time: these runs have not logged stats/time with every update; use --x step")


def _dress(axes: Any, title: str, metric: str, x_label: str, is_filled: bool) -> None:
    """Title, axes and grid."""
    axes.set_title(plain(title), loc="left", fontweight="bold")
    axes.set_ylabel(plain(metric.rsplit("/", 1)[-1].replace("_", " ")))
    axes.set_xlabel(x_label)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if is_filled:
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        axes.set(xticks=[], yticks=[])
        why = "no episode has ended" if metric.startswith(OF_EPISODES) else "no finite value"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="0.35")


def plain(text: str, most: int = 44) -> str:
    """Text that Matplotlib does not take for a formula, and that leaves room for the curves: its beginning and end."""
    half = most // 2
    return (text if len(text) <= most else f"{text[:half]}…{text[-half:]}").replace("$", r"\$")


@dataclass(frozen=True)
class Plot:
    """Draw the learning curves of one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """run directories, or folders with run directories in them"""
    out: Path = Path("curve.png")
    """the picture; its ending says which format"""
    metric: str = RETURN
    """a metric in metrics.jsonl"""
    x: Axis = "step"
    """over environment steps, or over the time of training, without the pauses between sessions"""
    by: By | Literal["run"] = "run"
    """what a curve is: a run, or the mean of all runs of an algorithm, a seed or an environment, with its confidence"""

    def main(self) -> None:
        """Draw and say where."""
        if not self.runs:
            usage_error("plot needs at least one run directory: cleanba plot RUN...")
        found = find_runs(self.runs)
        runs = [run for run in found if run in self.runs or (run / "metrics.jsonl").stat().st_size]
        if not runs:
            usage_error(f"none of the {len(found)} runs has metrics: no update has been finished")
        if self.by == "run":
            plot(runs, self.out, self.metric, self.x)
        else:
            plot_groups(runs, self.out, self.by, self.metric, self.x)
        left_out = len(found) - len(runs)
        print(f"wrote {self.out}" + (f"; {left_out} without an update left out" if left_out else ""))
