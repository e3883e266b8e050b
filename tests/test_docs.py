"""Documents say what is so: links, commands, defaults, metrics and diffs; the site, the examples, the templates."""

import importlib
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from sessions import ROOT
from synthetic import params_of

import cleanba
from cleanba import ppo
from cleanba.core.actors import Collector
from cleanba.core.args import INSTEAD
from cleanba.core.evaluate import algorithm, experiment_args
from cleanba.core.lockstep import Lockstep
from cleanba.core.processes import Place
from cleanba.core.rollout import EnvStep, Rollout
from cleanba.core.run import flatten
from cleanba.core.seeding import Role
from cleanba.core.shards import Learner
from cleanba.core.usage import read
from cleanba.tools.cli import COMMANDS

FOLDERS = [".", "docs", "docs/algorithms", "cleanba", "benchmarks", "benchmarks/results", "examples", ".github"]
PAGES = sorted(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))
ALGORITHMS = sorted(path.stem for path in (ROOT / "docs" / "algorithms").glob("[a-z]*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
EACH_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
EACH_ALGORITHM = pytest.mark.parametrize("name", ALGORITHMS)


def test_the_pages_are_found() -> None:
    assert {"README.md", "CONTRIBUTING.md", "concepts.md", "coming-from-cleanrl.md"} <= {page.name for page in PAGES}
    assert {path.stem for path in (ROOT / "cleanba").glob("*.py")} - {"__init__"} == set(ALGORITHMS)


# Links


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@EACH_PAGE
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if not re.match(r"https?:", link):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.is_file(), f"{link}: no such file"
            assert not anchor or anchor in anchors(target), f"{link}: no such heading"


# Commands


def lines_of_code(text: str) -> Iterator[str]:
    """Of blocks that are shell commands or nothing in particular, continued lines joined; and what stands in a line
    between backticks, if it is more than the name of a command or its option."""
    for language, block in FENCE.findall(text):
        if language in ("", "bash", "yaml"):
            yield from block.replace("\\\n", " ").splitlines()
    for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if re.match(r"cleanba \w+ [^\s-]|((\w+=)?\W?python [\w/]+\.py|make train) \S", span):
            yield span


def words(line: str) -> list[str]:
    """Of a line of shell, without comments; of alternatives the first."""
    line = re.sub(r"(?<=\w)(\|\w+)+", "", re.sub(r"<\(|\)|[{}]", " ", line))
    try:
        found = shlex.split(line, comments=True)
    except ValueError:  # no shell: a drawing, or a sentence with an apostrophe
        return []
    nested = next((word for word in found if re.search(r"python \w+/\w+\.py ", word)), None)
    return words(nested.partition("=")[2] if re.match(r"\w+=", nested) else nested) if nested else found


def commands(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Program, arguments, and folders that Python is told to look in."""
    for line in lines_of_code(text):
        found = words(line)
        folders = [word.partition("=")[2] for word in found if word.startswith("PYTHONPATH=")]
        while found and re.match(r"\w+=|source$|taskset$|-c$|0$", found[0]):
            found.pop(0)
        named = [i for i, word in enumerate(found) if re.fullmatch(r"(cleanba|examples|benchmarks)/\w+\.py", word)]
        start = next((i for i in named if found[i - 1].endswith("python")), 0)
        rest = [*itertools.takewhile(lambda word: not re.match(r"[&|;$]", word), found[start + 1 :])]
        if start:
            yield found[start], rest, folders
        elif found and found[0].removeprefix(".venv/bin/") == "cleanba":
            yield "cleanba", rest, folders
        elif found[:2] == ["make", "train"]:
            yield "cleanba/ppo.py", [w for word in found[2:] for w in word.removeprefix("ARGS=").split()], folders


def check_script(script: str, argv: list[str]) -> None:
    module = algorithm("", str(ROOT / script)) if not script.startswith("cleanba/") else script_module(script)
    if hasattr(module, "Args"):
        read(module.Args, argv).check()
    elif tool := getattr(module, Path(script).stem.capitalize(), None):
        read(tool, argv)


@cache
def script_module(script: str) -> ModuleType:
    return importlib.import_module(script.removesuffix(".py").replace("/", "."))


def check_command(argv: list[str]) -> None:
    assert argv[0] in COMMANDS or argv[0] == "--help", f"there is no command cleanba {argv[0]}"
    if argv[0] == "--help":
        return
    module, name, _ = COMMANDS[argv[0]]
    command = read(getattr(importlib.import_module(module), name), argv[1:])
    script = str(getattr(command, "script", ""))
    if (ROOT / script).is_file():
        topology = ["--topology", command.topology] if hasattr(command, "topology") else []
        check_script(script, [*topology, *getattr(command, "arguments", ())])


def status(program: str, argv: list[str]) -> object:
    """The exit status if it is a bad command line, or asks for help; 0 if it could be run."""
    try:
        check_command(argv) if program == "cleanba" else check_script(program, argv)
    except SystemExit as error:
        return error.code or 0
    return 0


@EACH_PAGE
def test_commands_are_ones_that_the_code_accepts(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for program, argv, folders in commands(page.read_text()):
        with monkeypatch.context() as patch:
            for folder in [*folders, *([str(Path(program).parent)] if program.startswith("examples/") else [])]:
                patch.syspath_prepend(ROOT / folder)
            assert status(program, argv) == 0, f"{program} {shlex.join(argv)}: {capsys.readouterr().err}"


def test_commands_are_found_in_every_shape() -> None:
    text = """`cleanba diff A B`, but not `cleanba diff` or `cleanba eval --script`;
`COMMAND="python cleanba/ppo.py --seed 1"`
```
.venv/bin/python cleanba/dqn.py --seed 2 \\
    --save-model          # a comment
WANDB_MODE=offline taskset -c 0 python cleanba/ppo.py --track
ssh node "cd cleanba && X=1 python cleanba/ppo.py --seed 3" &
make train ARGS="--seed 4"
source <(cleanba completion bash|zsh)
```
"""
    assert list(commands(text)) == [
        ("cleanba/dqn.py", ["--seed", "2", "--save-model"], []),
        ("cleanba/ppo.py", ["--track"], []),
        ("cleanba/ppo.py", ["--seed", "3"], []),
        ("cleanba/ppo.py", ["--seed", "4"], []),
        ("cleanba", ["completion", "bash"], []),
        ("cleanba", ["diff", "A", "B"], []),
        ("cleanba/ppo.py", ["--seed", "1"], []),
    ]


# Defaults


def check_default(args: Any, option: str, said: str) -> None:
    name = option.removeprefix("--").replace("-", "_")
    assert hasattr(args, name), f"{option} is not an argument"
    value, said = getattr(args, name), said.split(", ")[0]
    if isinstance(value, bool):
        assert said == ("on" if value else "off"), option
    elif isinstance(value, int | float):
        assert float(said.replace(",", "")) == value, option
    elif isinstance(value, str) and value and said:
        assert said == value, option


@EACH_ALGORITHM
def test_defaults_on_the_algorithms_pages(name: str) -> None:
    args = importlib.import_module(f"cleanba.{name}").Args()
    text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    table = text.partition("Defaults:")[2].partition("\n##")[0]
    found = re.findall(r"\| `(--[\w-]+)` \| ([^|]+?) (?=\|)", table)
    assert len(found) > 8
    for option, said in found:
        check_default(args, option, said)


@pytest.mark.parametrize("page", ["coming-from-cleanrl.md", "coming-from-cleanba.md"])
def test_arguments_on_the_pages_for_newcomers(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    for script, table in re.findall(r"^## (\w+)\.py\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE):
        args = importlib.import_module(f"cleanba.{script}").Args()
        rows = re.findall(r"^\| `--.*?\|.*?\| `(--[\w-]+)` \| (.*?) ?\|", table, re.MULTILINE)
        assert len(rows) > 10
        for option, said in rows:
            check_default(args, option, said)


def test_old_arguments_that_are_answered_are_on_these_pages() -> None:
    text = "".join((ROOT / "docs" / f"coming-from-{name}.md").read_text() for name in ("cleanrl", "cleanba"))
    assert [option for option in INSTEAD if f"`{option}`" not in text] == []


# Metrics


def shaped(tree: Any, *axes: int) -> Any:
    """The same tree without its numbers, and with these axes in front."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), tree)


@cache
def named_by(name: str) -> set[str]:
    """The metrics that an algorithm's update names, with its default arguments; it is traced and not run."""
    module = importlib.import_module(f"cleanba.{name}")
    args = module.Args()
    S, T, B, k = args.num_shards, args.num_steps, args.envs_per_shard, jax.random.key(0)
    run = SimpleNamespace(args=args, lockstep=Lockstep(1, False, 1), place=Place(0, 1, ""))
    state = jax.eval_shape(partial(module.init, args=args), k)
    space = args.env_spec.observation_space
    obs = shaped(np.zeros(space.shape, space.dtype), B)
    number, flag = shaped(np.float32(0), B), shaped(np.bool_(0), B)
    acted = jax.eval_shape(partial(module.act, args=args), state.params, EnvStep(obs, number, flag), (), k)
    rollout = Rollout(
        obs=shaped(obs, S, T + 1),
        first=shaped(flag, S, T + 1),
        action=shaped(acted.action, S, T),
        reward=shaped(number, S, T),
        terminated=shaped(flag, S, T),
        truncated=shaped(flag, S, T),
        valid=shaped(flag, S, T),
        extras=shaped(acted.extras, S, T),
        carry=shaped(acted.carry, S),
    )
    update = Learner(module.update, run)._update
    shards = jax.ShapeDtypeStruct((S,), jnp.int32)
    rest, memory = state._replace(memory=()), shaped(state.memory, S)
    return set(jax.eval_shape(update, rest, memory, rollout, shards, jnp.uint32(1))[2])


def documented(name: str) -> set[str]:
    text = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    section = text.partition("\n## Logged metrics\n")[2].partition("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


@EACH_ALGORITHM
def test_every_metric_is_on_the_algorithms_page_and_no_other(name: str, reference: Path) -> None:
    records = map(json.loads, (reference / "metrics.jsonl").read_text().splitlines())
    of_every_run = set().union(*records, {"charts/eval_episodic_return", "stats/eval_time"}) - named_by("ppo")
    page = (ROOT / "docs" / "algorithms" / f"{name}.md").read_text()
    assert documented(name) - of_every_run == named_by(name)
    assert of_every_run <= documented("ppo" if "(ppo.md#logged-metrics)" in page else name)


# Examples


def test_diffs_are_up_to_date() -> None:
    diffs = algorithm("", str(ROOT / "docs" / "diffs.py"))
    shown = [page for page in PAGES if diffs.BLOCK.search(page.read_text())]
    assert [page.name for page in shown] == ["your-own-algorithm.md"]
    for page in shown:
        assert page.read_text() == diffs.with_diffs(page.read_text()), "run: python docs/diffs.py"


def test_a_masked_policy_takes_no_forbidden_action() -> None:
    masked: Any = algorithm("", str(ROOT / "examples" / "ppo_masked.py"))
    args = masked.Args(num_envs=32, num_shards=1, num_steps=20)
    params = params_of(masked, args)
    collector = Collector(masked.act, params, args, [0], jax.local_devices()[0], Role.ACT)
    [(rollout, _, _)] = collector.collect(params, 1)
    collector.close()
    rollout = jax.device_get(rollout)
    ends = rollout.obs[:-1][~rollout.valid]
    assert len(ends) > 0
    assert not ends[:, 0].any()  # at the end nothing is allowed, and yet the gradient is finite
    t, b = np.nonzero(rollout.valid)
    assert rollout.obs[t, b, 0, rollout.action[t, b]].all()
    assert (rollout.reward[t, b] == 1).all()

    @jax.jit
    def gradient(params: Any) -> Any:
        return jax.grad(masked.loss, has_aux=True)(params, masked.prepare(params, rollout, args), args)

    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient(params)))


def test_positions_are_those_of_cartpole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    some, whole = gymnasium.make("positions:CartPolePositions-v0"), gymnasium.make("CartPole-v1")
    seen, known = (env.reset(seed=3)[0] for env in (some, whole))
    for action in (0, 1, 1):
        np.testing.assert_array_equal(seen, known[[0, 2]])
        assert seen in some.observation_space
        seen, known = (env.step(action)[0] for env in (some, whole))


def test_four_queens_can_follow_any_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    env: Any = gymnasium.make("queens:Queens-v0").unwrapped

    def most(free: np.ndarray) -> int:
        """Queens that fit on these squares."""
        best = 0
        for square in np.nonzero(free)[0]:
            env._free = free.copy()
            env._put(int(square))
            best = max(best, 1 + most(env._free))
        return best

    env.reset(seed=1)
    for first in range(25):
        env._free = np.ones(25, bool)
        env._put(first)
        assert most(env._free) == 4


def test_the_notebook_reads_a_run(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "ppo"
    shutil.copytree(reference, run)
    config = json.loads((run / "config.json").read_text())
    (run / "model").mkdir()
    save_file(flatten(params_of(ppo, experiment_args(ppo, config["experiment"]))), run / "model" / "params.safetensors")
    (run / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    matplotlib.use("Agg")
    space: dict[str, Any] = {}
    for cell in json.loads((ROOT / "examples" / "read_a_run.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
            exec("".join(cell["source"]), space)
    assert space["run"].name == "ppo"
    assert len(space["plt"].get_fignums()) == 2
    assert space["acted"].action.shape == (8,)
    space["plt"].close("all")


# The site


def test_the_site_is_built_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in ("index", "concepts", "algorithms/ppo", "repository/CONTRIBUTING", "repository/cleanba/ppo.py"):
        assert (tmp_path / f"{page}.html").is_file(), page
    assert 'href="repository/cleanba/core/shards.py.html"' in (tmp_path / "concepts.html").read_text()
    for built in tmp_path.rglob("*.html"):
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]+(?:src|href)="?(https?:[^" >]+)', built.read_text())
        assert loaded == [], built
    for style in tmp_path.rglob("*.css"):
        assert not re.search(r"@import|url\(\W?https?:", style.read_text()), style


def test_drawings_are_for_light_and_dark() -> None:
    drawings = list((ROOT / "docs" / "drawings").glob("*.svg"))
    assert len(drawings) == 3
    for drawing in drawings:
        text = drawing.read_text()
        assert "<title>" in text
        used = set(re.findall(r"var\((--\w+)\)", text))
        light, dark = (set(re.findall(r"(--\w+):", block)) for block in re.findall(r"svg \{([^}]+)\}", text))
        assert used <= light == dark


# Templates


def test_templates_and_containers() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == cleanba.__version__
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert {"name", "description", "body"} <= yaml.safe_load(form.read_text()).keys()
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    dockerfile = (ROOT / ".devcontainer" / container["build"]["dockerfile"]).read_text()
    copied = [word for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE) for word in line.split()]
    assert "requirements.txt" in copied
    assert [path for path in copied if not (ROOT / path).exists()] == []
