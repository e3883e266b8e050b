"""At which update two runs part, if they do."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from cleanba.tools.runs import read_config, read_metrics

Pairs = dict[str, tuple[Any, Any]]  # what differs, with both values
ABSENT = "-"


def is_aside(key: str) -> bool:
    """Whether this metric says how fast the run was, or how well it did when somebody looked; not what it learned."""
    return key in ("charts/SPS", "charts/eval_episodic_return") or key.startswith("stats/")


def differing(a: dict[str, Any], b: dict[str, Any]) -> Pairs:
    """The keys whose values differ as written: so that NaN equals NaN, and 0.0 is not -0.0."""
    pairs = {key: (a.get(key, ABSENT), b.get(key, ABSENT)) for key in a | b if not is_aside(key)}
    return {key: (x, y) for key, (x, y) in pairs.items() if json.dumps(x) != json.dumps(y)}


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """All in a config.json that may change a number: the experiment, and the software and hardware under it."""
    return {
        "algorithm": config.get("algorithm"),
        **config.get("experiment", {}),
        **{f"version of {name}": version for name, version in config.get("versions", {}).items()},
        "devices": sorted(set(config.get("devices", []))),
        "git_commit": config.get("git_commit"),
    }


def diff(run_a: Path, run_b: Path) -> int:
    """Print where the runs differ; 0 if every update of both is the same, otherwise 1."""
    configs = differing(settings(read_config(run_a)), settings(read_config(run_b)))
    a, b = read_metrics(run_a), read_metrics(run_b)
    common = min(len(a), len(b))
    parted = next(((i, pairs) for i in range(common) if (pairs := differing(a[i], b[i]))), None)
    last = a[common - 1]
    if parted is not None:
        i, pairs = parted
        update = min(a[i]["update"], b[i]["update"])
        print(f"different from update {update} on, there in {_count(len(pairs), 'metric')}")
        _table("metric", run_a, run_b, pairs)
    elif len(a) != len(b):
        print(f"identical up to update {last['update']}; {run_a if len(a) < len(b) else run_b} stops there")
    else:
        print(f"identical: {_count(len(a), 'update')}, fingerprint {_short(last.get('fingerprint', ABSENT))}")
    if configs:
        print(f"\ndifferent in {_count(len(configs), 'setting')}")
        _table("setting", run_a, run_b, configs)
    return int(parted is not None or len(a) != len(b))


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'s' * (n != 1)}"


def _short(value: Any) -> str:
    """A value in full, since a difference may be in the last digit; but not all of a hash."""
    if isinstance(value, str):
        return value[:16] if len(value) in (40, 64) else value
    return json.dumps(value)


def _table(head: str, run_a: Path, run_b: Path, pairs: Pairs) -> None:
    rows: Iterable[tuple[str, ...]] = [(key, _short(x), _short(y)) for key, (x, y) in sorted(pairs.items())]
    rows = [(head, str(run_a), str(run_b)), *rows]
    width = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for key, x, y in rows:
        print(f"  {key:{width[0]}}  {x:{width[1]}}  {y}")


@dataclass(frozen=True)
class Diff:
    """Name the first update at which two runs differ, or say that they are identical.

    Neither timings nor evaluations are compared, since they do not change what is learned.
    Exit status: 0 if identical, 1 if they differ or one stops earlier, 2 if there is nothing to compare.
    """

    run_a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_A")]
    """a run directory"""
    run_b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_B")]
    """another one"""

    def main(self) -> int:
        """Compare and print."""
        return diff(self.run_a, self.run_b)
