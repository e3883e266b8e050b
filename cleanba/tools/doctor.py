"""What this machine has for training, and what it lacks.

Run:  cleanba doctor
"""

import importlib
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

GIB = 2**30
COLORS = {"ok": "green", "lacking": "yellow", "broken": "bold red"}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


class Finding(NamedTuple):
    """A row of the table. What is lacking can be done without; what is broken keeps a run from starting."""

    state: Literal["ok", "lacking", "broken"]
    what: str
    found: str


def find_python() -> Iterator[Finding]:
    """The interpreter is one that Cleanba is tested with."""
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    needed = "" if fits else "; Cleanba needs 3.11, 3.12 or 3.13: make setup PYTHON=python3.12"
    yield Finding("ok" if fits else "broken", "Python", f"{platform.python_version()}, {sys.executable}{needed}")


def find_machine() -> Iterator[Finding]:
    """Cores and memory, as far as this process may use them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("ok", "cores", f"{cores} of {os.cpu_count()}, {platform.machine()}, {platform.system()}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Finding("ok" if memory > GIB else "lacking", "memory", f"{memory / GIB:.1f} GiB")


def find_packages() -> Iterator[Finding]:
    """What pyproject.toml asks for is installed, in a version that fits; an extra may be left out."""
    try:
        lines = requires("cleanba") or []
    except PackageNotFoundError:
        yield Finding("broken", "cleanba", "not installed: make setup, or pip install -e .")
        return
    requirements = [Requirement(line) for line in lines]
    yield Finding("ok", "cleanba", version("cleanba"))
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            fits, installed = _look_up(requirement)
            yield Finding("ok" if fits else "broken", requirement.name, installed)
    for name in dict.fromkeys(re.findall(r'extra == "([^"]+)"', " ".join(str(r.marker) for r in requirements))):
        wanted = _of_extra(requirements, name)
        looked_up = [_look_up(requirement) for requirement in wanted]
        has_all = all(fits for fits, _ in looked_up)
        found = ", ".join(f"{r.name} {text}" for r, (_, text) in zip(wanted, looked_up, strict=True))
        how = "" if has_all else f"; pip install 'cleanba[{name}]'"
        yield Finding("ok" if has_all else "lacking", f"extra {name}", found + how)


def _of_extra(requirements: list[Requirement], extra: str) -> list[Requirement]:
    """What this extra asks for on this machine."""
    own = [r for r in requirements if r.marker is not None and f'extra == "{extra}"' in str(r.marker)]
    return [r for r in own if r.marker is not None and r.marker.evaluate({"extra": extra})]


def _look_up(requirement: Requirement) -> tuple[bool, str]:
    """Whether it is met, and by which version."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return False, "not installed"
    fits = requirement.specifier.contains(installed, prereleases=True)
    missing = [extra for extra in requirement.extras if not _has_extra(requirement.name, extra)]
    wanted = "" if fits else f", but {requirement.specifier} is needed"
    return fits and not missing, installed + wanted + "".join(f", without [{extra}]" for extra in missing)


def _has_extra(package: str, extra: str) -> bool:
    """Whether all that an extra of a package asks for is installed."""
    requirements = [Requirement(line) for line in requires(package) or []]
    return all(_look_up(requirement)[0] for requirement in _of_extra(requirements, extra))


def find_devices() -> Iterator[Finding]:
    """JAX starts, names its devices, and computes on each of them."""
    import jax  # here, because a broken one is to be told in the table

    for device in jax.local_devices():
        with jax.default_device(device):
            right = float(jax.numpy.arange(8.0).sum()) == 28.0
        name = f"{device.id}: {device.platform}, {device.device_kind}"
        yield Finding("ok" if right else "broken", "JAX device", name)
    if shutil.which("nvidia-smi") and jax.default_backend() == "cpu":
        yield Finding("lacking", "GPU", "nvidia-smi is here, but JAX computes on the CPU: pip install 'cleanba[cuda]'")


def find_environments() -> Iterator[Finding]:
    """EnvPool makes environments, resets them and takes a step."""
    import numpy as np

    from cleanba.core import envs
    from cleanba.core.args import CoreArgs
    from cleanba.core.seeding import Role

    for env_id in ("CartPole-v1", "Pong-v5"):
        args = CoreArgs(env_id=env_id, engine="envpool", num_envs=2, num_shards=1)
        engine = envs.make(args, [0], Role.EVALUATE)
        first = engine.reset()
        after = engine.step(np.zeros((1, 2), np.int32)).obs
        engine.close()
        moved = first.shape == after.shape and not np.array_equal(first, after)
        said = f"{env_id}: two environments took a step, observations {first.shape[2:]}"
        yield Finding("ok" if moved else "broken", "EnvPool", said if moved else f"{env_id} does not move")


def find_programs() -> Iterator[Finding]:
    """Programs that some tools call."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    yield Finding("ok" if browser else "lacking", "Chromium", browser or "not found; only for pictures of web pages")
    ffmpeg = shutil.which("ffmpeg")
    if ffmpeg is None and importlib.util.find_spec("imageio_ffmpeg"):
        ffmpeg = importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe()
    how = "not found; only for videos: pip install 'cleanba[video]'"
    yield Finding("ok" if ffmpeg else "lacking", "ffmpeg", ffmpeg or how)


def find_disks(runs: Path) -> Iterator[Finding]:
    """Run directories and the cache of compiled programs can be written, and there is room."""
    from cleanba.core.topology import user_cache

    yield _find_disk("runs", runs, "broken")
    yield _find_disk("cache", user_cache(), "lacking")


def _find_disk(what: str, folder: Path, without: Literal["lacking", "broken"]) -> Finding:
    there = next(path for path in [folder.absolute(), *folder.absolute().parents] if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"written")
    except OSError as error:
        return Finding(without, what, f"{folder} cannot be written: {error.strerror or error}")
    free = shutil.disk_usage(there).free
    return Finding("ok" if free > GIB else "lacking", what, f"{folder} can be written, {free / GIB:.1f} GiB free")


@dataclass(frozen=True)
class Doctor:
    """Say what this machine has for training, and what it lacks; put it into a report of a problem.

    Exit status: 1 if something that every training needs is broken, otherwise 0.
    """

    runs: Path = Path("runs")
    """where run directories go"""

    def main(self) -> int:
        """Look at everything and print a table."""
        checks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
            ("Python", find_python),
            ("machine", find_machine),
            ("packages", find_packages),
            ("JAX", find_devices),
            ("EnvPool", find_environments),
            ("programs", find_programs),
            ("disks", lambda: find_disks(self.runs)),
        ]
        findings = [finding for name, check in checks for finding in examine(name, check)]
        table = Table(box=None, pad_edge=False)
        for column in ("", "what", "found"):
            table.add_column(column, overflow="fold")
        for state, what, found in findings:
            table.add_row(Text(state, COLORS[state]), Text(what), Text(found))
        broken = [what for state, what, _ in findings if state == "broken"]
        console = Console(highlight=False)
        console.print(table)
        console.print(f"broken: {', '.join(broken)}" if broken else "everything that training needs is here")
        return int(bool(broken))


def examine(name: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """The findings of a check, and that it failed, if it did: whatever is broken, the rest is still to be looked at."""
    try:
        yield from check()
    except Exception as error:
        yield Finding("broken", name, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
