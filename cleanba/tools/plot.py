"""Learning curves as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import matplotlib
import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import EngFormatter

from cleanba.core.usage import usage_error
from cleanba.tools.runs import read_config, read_metrics

RETURN = "charts/episodic_return"
OF_EPISODES = "charts/episodic_"  # such metrics are means over the episodes that ended in an update
SMOOTHING = 1 / 60  # standard deviation of the smoothing, as a part of the curve


class Curve(NamedTuple):
    """A metric of one run; the arrays have one value per update at which it was logged."""

    run: Path
    algorithm: str
    env_id: str
    seed: str
    step: np.ndarray
    value: np.ndarray
    smooth: np.ndarray


def smooth(value: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Mean of the neighbours by a Gaussian and by weight; NaN where there is no weight near."""
    deviation = len(value) * SMOOTHING
    reach = min(math.ceil(3 * deviation), (len(value) - 1) // 2)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / deviation) ** 2)
    total = np.convolve(weight, kernel, "same")
    mean = np.convolve(np.where(weight > 0, value, 0) * weight, kernel, "same")
    return np.divide(mean, total, out=np.full(len(value), np.nan), where=total > 0)


def read_curve(run: Path, metric: str = RETURN) -> Curve:
    """The curve of a run; an empty one if no episode has ended yet."""
    config, records = read_config(run), read_metrics(run)
    numbers = [record.get(metric) for record in records]
    of_episodes = metric.startswith(OF_EPISODES)
    none_ended = of_episodes and not any(record.get("charts/episodes", 1) for record in records)
    if not any(isinstance(number, int | float) for number in numbers) and not none_ended:
        known = sorted({key for record in records for key, x in record.items() if isinstance(x, int | float)})
        usage_error(f"{run} has no numbers for --metric {metric}; it has {', '.join(known)}")
    value = np.array([x if isinstance(x, int | float) else np.nan for x in numbers], np.float64)
    episodes = np.array([record.get("charts/episodes", 1) if of_episodes else 1 for record in records], np.float64)
    shown = np.isfinite(value) & (episodes > 0)
    step = np.array([record["global_step"] for record in records])
    smoothed = smooth(value, np.where(shown, episodes, 0))
    experiment = config.get("experiment", {})
    about = (config.get("algorithm", "?"), experiment.get("env_id", "?"), experiment.get("seed", "?"))
    algorithm, env_id, seed = map(str, about)
    return Curve(run, algorithm, env_id, seed, step[shown], value[shown], smoothed[shown])


def labels(curves: Sequence[Curve]) -> list[str]:
    """What sets the runs apart: algorithm, environment and seed if that is enough, or else their directories."""
    varying = [field for field in ("algorithm", "env_id") if len({getattr(c, field) for c in curves}) > 1]
    names = [" · ".join([*(getattr(c, field) for field in varying), f"seed {c.seed}"]) for c in curves]
    for candidates in (names, [c.run.resolve().name for c in curves]):
        if len(set(candidates)) == len(curves):
            return candidates
    return [str(c.run) for c in curves]


def plot(runs: Sequence[Path], out: Path, metric: str = RETURN) -> None:
    """Draw a metric of the runs over environment steps: light as it was logged, strong smoothed."""
    curves = [read_curve(run, metric) for run in dict.fromkeys(runs)]
    figure = Figure(figsize=(8, 4.5), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    axes = figure.add_subplot()
    colors = matplotlib.colormaps["tab10" if len(curves) <= 10 else "turbo"]
    handles = []
    for i, curve in enumerate(curves):
        color = colors(i if len(curves) <= 10 else (i + 0.5) / len(curves))
        dot: dict[str, Any] = dict(marker="o", markersize=4) if len(curve.step) == 1 else {}
        axes.plot(curve.step, curve.value, color=color, alpha=0.25 if len(curves) < 4 else 0.12, linewidth=0.8)
        handles += axes.plot(curve.step, curve.smooth, color=color, linewidth=1.8, **dot)
    _dress(axes, curves, metric)
    if len(curves) > 1:
        names = [_plain(name) for name in labels(curves)]
        figure.legend(handles, names, loc="outside right upper", frameon=False, fontsize="small")
    file_format = out.suffix[1:].lower() or "png"
    known = figure.canvas.get_supported_filetypes()
    if file_format not in known:
        usage_error(f"--out {out}: cannot draw a .{file_format}; use one of {', '.join(sorted(known))}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, format=file_format)
    except OSError as error:
        usage_error(f"--out {out} cannot be written: {error.strerror or error}")


def _dress(axes: Any, curves: Sequence[Curve], metric: str) -> None:
    """Title, axes and grid."""
    env_ids, algorithms = (list(dict.fromkeys(getattr(c, field) for c in curves)) for field in ("env_id", "algorithm"))
    about = ", ".join(algorithms) + (f", seed {curves[0].seed}" if len(curves) == 1 else f", {len(curves)} runs")
    axes.set_title(_plain(", ".join(env_ids)), loc="left", fontweight="bold")
    axes.set_title(_plain(about), loc="right", fontsize="medium", color="0.35")
    axes.set_xlabel("environment steps")
    axes.set_ylabel(_plain(metric.rsplit("/", 1)[-1].replace("_", " ")))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if any(len(curve.step) for curve in curves):
        axes.set_xlim(left=0)
        axes.xaxis.get_major_locator().set_params(integer=True)
    else:
        axes.set(xticks=[], yticks=[])
        why = "no episode has ended" if metric.startswith(OF_EPISODES) else "no finite value"
        axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="0.35")


def _plain(text: str) -> str:
    """Text that Matplotlib does not take for a formula."""
    return text.replace("$", r"\$")


@dataclass(frozen=True)
class Plot:
    """Draw the learning curves of one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """run directories"""
    out: Path = Path("curve.png")
    """the picture; its ending says which format"""
    metric: str = RETURN
    """a metric in metrics.jsonl, drawn over environment steps"""

    def main(self) -> None:
        """Draw and say where."""
        if not self.runs:
            usage_error("plot needs at least one run directory: cleanba plot RUN...")
        plot(self.runs, self.out, self.metric)
        print(f"wrote {self.out}")
