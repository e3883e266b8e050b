"""Reading what a run has left behind, and saying in one line where there is nothing to read."""

import json
from pathlib import Path
from typing import Any

from cleanba.core.usage import usage_error


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
    """The records of the run's metrics.jsonl, at least one. A last line that is not whole yet is left out."""
    path = run / "metrics.jsonl"
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        usage_error(f"{run} has no metrics.jsonl; is it a run directory?")
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
    if not records:
        usage_error(f"{run} has no metrics: no update has been finished")
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
