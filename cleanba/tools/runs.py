"""Reading what a run has left behind, and saying in one line where there is nothing to read."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cleanba.core.usage import usage_error


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories among the paths and, where a path is no run, those in the folders below it; each once."""
    runs: dict[Path, Path] = {}  # by where they really are
    for path in paths:
        found = [path] if (path / "config.json").exists() or not path.is_dir() else _below(path)
        if not found:
            usage_error(f"{path} is not a run directory: it has no config.json, nor is there a run below it")
        runs |= {run.resolve(): run for run in found if run.resolve() not in runs}
    return list(runs.values())


def _below(folder: Path) -> list[Path]:
    runs = []
    for path, subfolders, _ in os.walk(folder):
        here = [Path(path, name) for name in sorted(subfolders)]
        own = [p for p in here if (p / "config.json").exists() and (p / "metrics.jsonl").exists()]
        runs += own
        subfolders[:] = [p.name for p in here if p not in own]  # a run may hold a model, which has a config.json too
    return runs


def read_config(run: Path) -> dict[str, Any]:
    """The run's config.json."""
    if not run.is_dir():
        usage_error(f"{run} is not a directory; name a run directory, such as one in runs/")
    try:
        config = json.loads((run / "config.json").read_text())
    except FileNotFoundError:
        usage_error(f"{run} is not a run directory: it has no config.json")
    except (OSError, ValueError) as error:
        usage_error(f"cannot read {run / 'config.json'}: {error}")
    if not isinstance(config, dict):
        usage_error(f"cannot read {run / 'config.json'}: it is not a JSON object")
    return config


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of the run's metrics.jsonl, at least one."""
    records = read_records(run)
    if not records:
        usage_error(f"{run} has no metrics: no update has been finished")
    return records


def read_records(run: Path) -> list[dict[str, Any]]:
    """The records of the run's metrics.jsonl, if there are any yet. A last line that is not whole is left out."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        usage_error(f"cannot read {path}: {error}")
    if lines and not lines[-1].endswith(b"\n"):  # the run was killed, or writes it just now
        lines.pop()
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not {"update", "global_step"} <= record.keys():
            usage_error(f"{path} is damaged: line {number} is not the record of an update")
        records.append(record)
    return records


def flags(arguments: dict[str, Any]) -> list[str]:
    """Arguments as one types them."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None and value not in ((), []):
            words += [f"--{option}", *map(str, value if isinstance(value, list | tuple) else [value])]
    return words
