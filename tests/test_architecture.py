"""One room per concept: which file may import what, how algorithm files are built, that marked copies are copies."""

import ast
import itertools
import re
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent / "cleanba"
FILES = sorted(ROOT.rglob("*.py"))
CORE = sorted((ROOT / "core").glob("*.py"))
ALGORITHMS = sorted(path for path in ROOT.glob("*.py") if path.name != "__init__.py")
WAITING = {"core/lockstep.py", "core/actors.py", "core/processes.py"}  # where threads wait for each other


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> set[str]:
    """Every module and name that is imported anywhere in the file: `a.b` and `a.b.c` for `from a.b import c`."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)} imports relatively: it could not be run as a script"
            found |= {str(node.module)} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def uses(path: Path) -> set[str]:
    """Every identifier and attribute in the file's code."""
    nodes = list(ast.walk(tree(path)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return names | attributes | {module.split(".")[-1] for module in imports(path)}


def test_the_files_are_found() -> None:
    assert {"ppo.py", "ppo_atari.py", "impala_atari.py"} <= {path.name for path in ALGORITHMS}
    assert {"lockstep.py", "actors.py", "rollout.py", "shards.py"} <= {path.name for path in CORE}


@pytest.mark.parametrize(
    ("module", "rooms"),
    [
        (
            "threading",
            WAITING | {"core/run.py", "core/records.py", "core/checkpoint.py", "core/clock.py", "tools/torture.py"},
        ),
        ("socket", {"core/processes.py"}),
        ("queue", set()),
        ("multiprocessing", set()),
        ("concurrent", {"tools/bench.py"}),
        ("asyncio", set()),
        ("pickle", set()),
        ("envpool", {"core/envs.py", "tools/peers/work.py", "tools/peers/cleanrl.py"}),
        ("gymnasium", {"core/envs.py"}),
        ("ctypes", {"core/envs.py"}),
        ("imageio_ffmpeg", {"core/evaluate.py"}),
        ("huggingface_hub", {"tools/hub.py"}),
        ("orbax", {"core/checkpoint.py"}),
        ("optuna", {"tools/tune.py"}),
        ("wandb", {"core/run.py"}),
        ("tensorboardX", {"core/records.py"}),
        ("matplotlib", {"tools/plot.py"}),
        ("rliable", {"tools/report.py"}),
    ],
)
def test_a_module_is_imported_in_its_room_only(module: str, rooms: set[str]) -> None:
    found = {name(path) for path in FILES if any(i.split(".")[0] == module for i in imports(path))}
    assert found <= rooms


@pytest.mark.parametrize(
    "identifier",
    ["shard_map", "Mesh", "NamedSharding", "PartitionSpec", "device_put", "make_array_from_single_device_arrays"],
)
def test_placement_is_decided_in_topology_and_shards_only(identifier: str) -> None:
    assert {name(path) for path in FILES if identifier in uses(path)} <= {"core/topology.py", "core/shards.py"}


@pytest.mark.parametrize("identifier", ["psum", "pmean", "pmap", "psum_scatter", "device_put_sharded", "sleep"])
def test_nobody_uses(identifier: str) -> None:
    """Sums whose order depends on the number of devices, what JAX is about to drop, and waiting by the clock."""
    by_the_clock = {"tools/torture.py", "core/processes.py"} if identifier == "sleep" else set()
    assert {name(path) for path in FILES if identifier in uses(path)} <= by_the_clock


def test_collectives_are_in_topology_and_shards_only() -> None:
    rooms = {"core/topology.py", "core/shards.py"}
    assert {name(path) for path in FILES if uses(path) & {"all_gather", "axis_index"}} == rooms
    assert not any("multihost_utils" in uses(path) for path in FILES)


def test_lockstep_knows_no_jax() -> None:
    for file in ("lockstep.py", "clock.py"):
        found = imports(ROOT / "core" / file)
        assert not {i.split(".")[0] for i in found} & {"jax", "numpy", "flax"}
        assert {i for i in found if i.startswith("cleanba")} <= {"cleanba.core.clock", "cleanba.core.clock.Clock"}


def test_the_core_imports_no_algorithm() -> None:
    algorithms = {f"cleanba.{path.stem}" for path in ALGORITHMS}
    for path in CORE:
        assert not imports(path) & algorithms, name(path)


@pytest.mark.parametrize("path", CORE, ids=name)
def test_the_core_knows_no_algorithm(path: Path) -> None:
    words = re.findall(r"\bppo|\bgae\b|v-?trace|impala|entropy|dqn|\bc51\b|\bsac\b", path.read_text(), re.IGNORECASE)
    assert words == []
    assert not {n.lower() for n in uses(path)} & {"ppo", "gae", "vtrace", "impala", "entropy", "dqn", "sac"}


def dependencies() -> set[str]:
    """The names that dependencies are imported by."""
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return {re.split(r"[\[<>=!~; ]", line)[0].replace("-", "_").lower() for line in listed} | {"tensorboardx", "mkdocs"}


def test_nothing_in_the_package_is_named_like_a_module_it_would_hide() -> None:
    """`python cleanba/ppo.py` puts cleanba/ first on the path."""
    taken = {module.lower() for module in sys.stdlib_module_names} | dependencies()
    own = {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()} - {"__init__", "__pycache__"}
    assert {"core", "ppo"} <= own
    assert not {stem.lower() for stem in own} & taken


ORDER = ["Args", "Agent", "init", "act", "targets", "loss", "update"]


@pytest.mark.parametrize("path", ALGORITHMS, ids=name)
def test_an_algorithm_file_is_built_like_the_others(path: Path) -> None:
    defined = [n.name for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    agent = ["Agent"] if "Agent" in defined else ["Actor", "Critic"]
    order = [own for n in ORDER for own in (agent if n == "Agent" else [n])]
    assert [n for n in defined if n in order] == order
    assert len(path.read_text().splitlines()) <= 350
    docstring = ast.get_docstring(tree(path)) or ""
    assert f"python cleanba/{path.name}" in docstring
    last = tree(path).body[-1]
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"


@pytest.mark.parametrize("path", ALGORITHMS, ids=name)
def test_an_algorithm_file_has_no_machinery_in_it(path: Path) -> None:
    allowed = {"dataclasses", "functools", "typing", "collections", "math", "flax", "jax", "optax", "numpy", "cleanba"}
    assert {i.split(".")[0] for i in imports(path)} <= allowed
    assert all(i.startswith("cleanba.core") for i in imports(path) if i.startswith("cleanba"))
    forbidden = {
        "devices",
        "local_devices",
        "device_count",
        "local_device_count",
        "device_put",
        "process_index",
        "Device",
    }
    assert not uses(path) & forbidden


def marked() -> list[tuple[Path, str, str]]:
    """(file, name, original file) of every definition under a line `# same as FILE.py`."""
    found = []
    for path in FILES:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines):
            match = re.fullmatch(r"# same as (\S+\.py)\b.*", line)
            if match is None:
                continue
            below = next((text for text in lines[number + 1 :] if not text.startswith("@")), "")
            definition = re.match(r"(?:class|def) (\w+)", below)
            assert definition, f"{name(path)}:{number + 1}: nothing is defined under the mark"
            found.append((path, definition[1], match[1]))
    return found


def definition(path: Path, wanted: str) -> str:
    [node] = [n for n in tree(path).body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == wanted]
    return ast.dump(node)


def test_marked_copies_are_copies() -> None:
    for path, wanted, original in marked():
        assert definition(path, wanted) == definition(ROOT / original, wanted), f"{wanted} of {name(path)} is no copy"


def test_copies_are_marked() -> None:
    """A definition that stands word for word in another algorithm file as well says so in one of the two."""
    known = {(path.name, n) for path, n, _ in marked()}
    places: dict[str, list[tuple[str, str]]] = {}
    for path in ALGORITHMS:
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                places.setdefault(ast.dump(node), []).append((path.name, node.name))
    unmarked = [copies for copies in places.values() if len([c for c in copies if c not in known]) > 1]
    assert unmarked == []


def test_the_main_blocks_are_the_same() -> None:
    blocks = {ast.dump(tree(path).body[-1]) for path in ALGORITHMS}
    assert len(blocks) == 1


def test_pins_name_the_extras_that_packages_ask_for() -> None:
    """Without them pip looks past the pin for the newest release, and refuses it for want of a hash."""
    lines = (ROOT.parent / "requirements.txt").read_text().splitlines()
    pins = [Requirement(line.removesuffix("\\").strip()) for line in lines if re.match(r"\w", line)]
    pinned: dict[str, set[str]] = {canonicalize_name(pin.name): pin.extras for pin in pins}
    asked: dict[str, set[str]] = {}
    for package in pinned:
        try:
            wanted = [Requirement(text) for text in requires(package) or []]
        except PackageNotFoundError:  # of another platform
            continue
        for one in wanted:
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *pinned[package])):
                asked.setdefault(canonicalize_name(one.name), set()).update(one.extras)
    assert [name for name, extras in asked.items() if extras - pinned.get(name, set())] == []
    assert any(asked.values())
