"""`cleanba torture`: a few kills at chosen bad moments here, many at random ones where it is run by hand."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from sessions import ROOT, SMALL, numbers

from cleanba.tools import torture

KILLS = [
    ("a0-l0-d1", "SIGKILL of all", "checkpoint"),
    ("a0-l1,2-d1", "SIGTERM", "training"),
    ("a0-l1,2-d1", "SIGKILL of all", "replay"),
    ("a0-l0-d2", "SIGKILL of one", "training"),
]


class Plan(random.Random):
    """Chooses what stands in the plan, and otherwise the last of the choices, which is not to wait."""

    def __init__(self, seed: int):
        self.words = [word for kill in KILLS for word in kill]

    def choice(self, options: Any) -> Any:
        return self.words.pop(0) if self.words and self.words[0] in options else options[-1]

    def uniform(self, a: float, b: float) -> float:
        return 0.0


def test_a_tortured_run_equals_one_that_was_left_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torture.random, "Random", Plan)
    arguments = (*SMALL.split(), "--checkpoint-every", "3")
    topologies = ("a0-l0-d1", "a0-l0-d2", "a0-l1,2-d1")
    script, out = ROOT / "cleanba" / "ppo.py", tmp_path / "out"
    tool = torture.Torture(script, arguments, len(KILLS), topologies, patience=300, out=out)
    assert tool.main() == 0
    table = (out / "table.md").read_text()
    assert "Kills: 4;" in table
    assert "Mismatches: 0" in table
    assert "a0-l0-d1 (1), a0-l0-d2 (1), a0-l1,2-d1 (2)" in table
    assert table in capsys.readouterr().out
    assert numbers(out / "tortured") == numbers(out / "reference")


@pytest.mark.parametrize("change", ["fingerprint", "metrics", "a line more", "nothing"])
def test_torture_finds_a_difference(change: str, reference: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(reference, copy)
    file = copy / ("result.json" if change == "fingerprint" else "metrics.jsonl")
    text = file.read_text()
    if change == "fingerprint":
        file.write_text(text.replace('"global_step": ', '"global_step": 1'))
    elif change == "metrics":
        file.write_text(text.replace('"losses/entropy": 0.', '"losses/entropy": 0.0', 1))
    elif change == "a line more":
        file.write_text(text + text.splitlines()[-1] + "\n")
    assert bool(torture.compare(reference, copy)) == (change != "nothing")
