"""What a user sees of a run while it goes on: a calm display in a terminal, plain lines elsewhere, or nothing."""

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

SECONDS_BETWEEN_LINES = 10.0  # of progress, where there is no terminal


class Display:
    """Progress of `total` updates, `done` of them in earlier sessions; silent unless `visible`."""

    def __init__(self, total: int, visible: bool):
        self._console = Console(soft_wrap=True, quiet=not visible)
        self._visible, self._is_live = visible, visible and self._console.is_terminal
        self._total, self._first, self._last_line = total, 1, 0.0
        columns = TextColumn("update"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[news]}")
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
        self._details = Text(style="dim")
        # Redrawn at most four times a second, whatever the number of updates.
        self._live = Live(Group(self._progress, self._details), console=self._console, refresh_per_second=4)

    def start(self, done: int) -> None:
        """Begin after `done` updates."""
        self._first = done + 1
        self._bar = self._progress.add_task("", total=self._total, completed=done, news="compiling")
        if self._is_live:
            self._live.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, highlight=False, markup=False)

    def replaying(self, n: int, last: int) -> None:
        """How far the environments of a resumed run are."""
        news = f"replaying environments: rollout {n} of {last}"
        self._progress.update(self._bar, news=news)
        self._line(news)

    def show(self, record: dict[str, Any], score: float | None, sps: float) -> None:
        """An update: speed and score beside the bar, the rest of what it logged below."""
        n = record["update"]
        news = f"{sps:,.0f} steps/s · return {'-' if score is None else f'{score:.1f}'}"
        self._progress.update(self._bar, completed=n, news=news)
        place = f"step {record['global_step']:,}"
        self._line(f"update {n}/{self._total} · {place} · {news}", always=n in (self._first, self._total))
        if self._is_live:
            losses = [f"{name[7:]} {value:.3g}" for name, value in record.items() if name.startswith("losses/")]
            version = f"lag {record['policy_lag']} · fingerprint {record['fingerprint'][:8]}"
            self._details.plain = f"{place} · {version}\n{' · '.join(losses)}"

    def _line(self, line: str, always: bool = False) -> None:
        """For a log file: not more often than somebody would read it."""
        now = time.perf_counter()
        if self._visible and not self._is_live and (always or now - self._last_line > SECONDS_BETWEEN_LINES):
            self._last_line = now
            print(line, flush=True)

    def stop(self) -> None:
        """Leave the display as it is."""
        if self._is_live:
            self._live.stop()
