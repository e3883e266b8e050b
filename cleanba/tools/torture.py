"""A run that is killed again and again, at bad moments and on changing topologies, against one that was left alone.

Run:  cleanba torture cleanba/ppo.py --kills 50 -- --env-id CartPole-v1 --total-timesteps 262144 --checkpoint-every 8
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import tyro

from cleanba.core.usage import usage_error
from cleanba.tools.diff import differing
from cleanba.tools.runs import read_metrics

MOMENTS = ("start-up", "replay", "training", "checkpoint")
SIGNS = {"replay": "replaying environments", "training": "update "}  # lines that tell what a run is doing
SIGNALS = {"SIGKILL of all": signal.SIGKILL, "SIGKILL of one": signal.SIGKILL}
SIGNALS |= {s.name: s for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}


class Kill(NamedTuple):
    """What was done to a session, and how it ended."""

    topology: str
    how: str
    moment: str
    status: int
    seconds: float  # from the kill to the end of the last process


class Session:
    """A run in a process group of its own; its lines are read as they come."""

    def __init__(self, command: list[str], run_dir: Path):
        self._run_dir, self._lines, self._is_over = run_dir, [""], False
        self._left_behind = self._parts()
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(line)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _parts(self) -> set[tuple[str, int]]:
        """Checkpoints that are being written, or that a kill left half-written."""
        with contextlib.suppress(FileNotFoundError):  # renamed just now
            return {(x.name, x.stat().st_ctime_ns) for x in self._run_dir.glob("checkpoints/*.part")}
        return set()

    @property
    def output(self) -> str:
        """Everything said so far."""
        return "".join(self._lines)

    def _has_said(self, sign: str) -> bool:
        return any(line.startswith(sign) for line in self._lines)

    def wait_for(self, moment: str, patience: float) -> str:
        """Wait for a moment of this kind; the moment that it is in the end, or "" if the run is over before."""
        deadline = time.monotonic() + patience
        if sign := SIGNS.get(moment):
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._has_said(sign), timeout=patience)
        while moment == "checkpoint" and time.monotonic() < deadline and self.process.poll() is None:
            if self._parts() - self._left_behind:
                break
            time.sleep(0.001)
        if self._is_over or self.process.poll() is not None:
            return ""
        return moment if time.monotonic() < deadline else "waiting"

    def kill(self, how: str, rng: random.Random) -> tuple[int, float]:
        """Kill it, wait for its end, and make sure that nothing of it is left."""
        began = time.monotonic()
        children = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        if how == "SIGKILL of one" and children:
            os.kill(int(rng.choice(children)), signal.SIGKILL)
        elif how in ("SIGKILL of all", "SIGKILL of one"):
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.send_signal(SIGNALS[how])
        self.process.wait(timeout=300)
        self._reader.join(timeout=60)
        return self.process.returncode, time.monotonic() - began


@dataclass(frozen=True)
class Torture:
    """Kill a run again and again until it ends, and compare it with one that was left alone.

    Exit status: 0 if both are equal in every update, parameter and step, otherwise 1.
    """

    script: Annotated[Path, tyro.conf.Positional]
    """the algorithm's file, such as cleanba/ppo.py"""
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- ARGUMENTS")] = ()
    """what it gets besides --topology and --run-dir"""
    kills: int = 50
    """how often to kill it before it may end"""
    topologies: tuple[str, ...] = ("a0-l0-d1", "a0-l1,2,3-d1", "a0,1-l0,1-d1", "a0-l0-d2", "a0-l1,2-d2", "a0-l0-d4")
    """topologies to change between"""
    patience: float = 60.0
    """seconds to wait for the wanted moment of a kill"""
    seed: int = 1
    """of the choice of moments, signals and topologies"""
    out: Path = Path("runs/torture")
    """where both runs and the table go; must not exist"""

    def main(self) -> int:
        """Torture and compare."""
        if not self.script.is_file():
            usage_error(f"there is no script {self.script}; name an algorithm's file, such as cleanba/ppo.py")
        if self.out.exists():
            usage_error(f"--out {self.out} exists; name a new directory")
        self.out.mkdir(parents=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell had it ignored
        reference, tortured = self.out / "reference", self.out / "tortured"
        self._finish(self.topologies[0], reference)
        rng = random.Random(self.seed)
        done: list[Kill] = []
        while len(done) < self.kills and not (tortured / "result.json").exists():
            if kill := self._kill_once(rng, tortured):
                done.append(kill)
                print(f"{len(done):4d}  {' · '.join(map(str, kill[:4]))} · {kill.seconds:.1f} s", flush=True)
        self._finish(rng.choice(self.topologies), tortured)
        differences = compare(reference, tortured)
        (self.out / "table.md").write_text(table(done, differences))
        print(table(done, differences))
        return int(bool(differences))

    def _command(self, topology: str, run_dir: Path) -> list[str]:
        where = ["--topology", topology, "--run-dir", str(run_dir)]
        return [sys.executable, str(self.script), *self.arguments, *where]

    def _finish(self, topology: str, run_dir: Path) -> None:
        session = subprocess.run(self._command(topology, run_dir), capture_output=True, text=True, check=False)
        if session.returncode:
            raise RuntimeError(f"{run_dir} did not end well on {topology}:\n{session.stdout}{session.stderr}")

    def _kill_once(self, rng: random.Random, run_dir: Path) -> Kill | None:
        topology, how, moment = rng.choice(self.topologies), rng.choice(list(SIGNALS)), rng.choice(MOMENTS)
        if moment == "replay" and not any(path.name.isdigit() for path in run_dir.glob("checkpoints/*")):
            moment = "training"  # nothing to replay yet
        session = Session(self._command(topology, run_dir), run_dir)
        if moment == "start-up":
            time.sleep(rng.uniform(0, 12))
        moment = session.wait_for(moment, self.patience)
        time.sleep(rng.choice([0, rng.uniform(0, 3)]))
        if not moment or session.process.poll() is not None:
            session.process.wait()
            if session.process.returncode:
                raise RuntimeError(f"{run_dir} failed by itself on {topology}:\n{session.output}")
            return None
        return Kill(topology, how, moment, *session.kill(how, rng))


def compare(reference: Path, tortured: Path) -> list[str]:
    """All in which the two runs differ, apart from timings."""
    a, b = (json.loads((run / "result.json").read_text()) for run in (reference, tortured))
    names = ("fingerprint", "global_step", "updates", "episodic_return")
    found = [f"{name}: {a[name]} and {b[name]}" for name in names if a[name] != b[name]]
    records = read_metrics(reference), read_metrics(tortured)
    if len(records[0]) != len(records[1]):
        found.append(f"lines of metrics: {len(records[0])} and {len(records[1])}")
    parted = ((x["update"], differing(x, y)) for x, y in zip(*records, strict=False))
    return found + [f"update {update}: {metrics}" for update, metrics in parted if metrics][:3]


def table(kills: list[Kill], differences: list[str]) -> str:
    """In Markdown: how often which kill met which moment, and what came of it."""
    counts = Counter((kill.how, kill.moment) for kill in kills)
    moments = [*MOMENTS, "waiting"]
    lines = [f"| {' | '.join(['signal', *moments])} |", "| --- " * (len(moments) + 1) + "|"]
    lines += [f"| {how} | {' | '.join(str(counts[how, moment]) for moment in moments)} |" for how in SIGNALS]
    topologies = Counter(kill.topology for kill in kills)
    slowest = max((kill.seconds for kill in kills), default=0.0)
    lines += [
        "",
        f"Kills: {len(kills)}; slowest end after a kill: {slowest:.1f} s; "
        + "sessions killed on "
        + ", ".join(f"{topology} ({count})" for topology, count in sorted(topologies.items())),
        f"Mismatches: {len(differences)}",
        *differences,
    ]
    return "\n".join(lines) + "\n"
