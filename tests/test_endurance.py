"""A long run costs at its end what it cost at its beginning: no compiling, no growing memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import ENV, ROOT

# Writes, for each update, the programs that were compiled so far and the memory that the process holds, in MiB.
WATCHED = """
import json, os, runpy, sys
import jax
from cleanba.core.run import Run
compiled, lines, log = [], [], Run.log
def note(event, seconds, **more):
    if event == "/jax/core/compile/backend_compile_duration":
        compiled.append(more.get("fun_name"))
jax.monitoring.register_event_duration_secs_listener(note)
def watched(self, *args):
    log(self, *args)
    pages = int(open("/proc/self/statm").read().split()[1])
    lines.append([len(compiled), pages * os.sysconf("SC_PAGE_SIZE") / 2**20])
Run.log = watched
_, out, *sys.argv = sys.argv
runpy.run_path(sys.argv[0], run_name="__main__")
open(out, "w").write(json.dumps(lines))
"""


def watch(arguments: str, folder: Path) -> list[tuple[int, float]]:
    """Compiled programs and MiB after each update."""
    script, *rest = arguments.split()
    command = [sys.executable, "-c", WATCHED, str(folder / "out"), str(ROOT / "cleanba" / script), *rest]
    subprocess.run([*command, "--run-dir", str(folder / "run")], env=ENV, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "out").read_text())


@pytest.mark.parametrize(
    "arguments",
    [
        "ppo.py --num-envs 16 --num-steps 8 --total-timesteps 768",
        "ppo.py --num-envs 16 --num-steps 8 --total-timesteps 768 --collect stepwise --topology a0,1-l1,2",
        "ppo.py --num-envs 16 --num-steps 8 --total-timesteps 768 --no-concurrency --checkpoint-every 2",
        "ppo_atari.py --network nature --num-envs 8 --num-steps 4 --total-timesteps 160",
    ],
)
def test_nothing_is_compiled_after_the_second_update(arguments: str, tmp_path: Path) -> None:
    programs = [count for count, _ in watch(arguments, tmp_path)]
    assert len(programs) >= 5
    assert programs[0] > 0
    assert len(set(programs[1:])) == 1, programs


def test_memory_does_not_grow(tmp_path: Path) -> None:
    """If each of the last 300 updates kept its rollout, that would be 15 MiB."""
    arguments = "ppo.py --num-envs 128 --num-steps 16 --num-minibatches 1 --update-epochs 1 --total-timesteps 1228800"
    memory = [mebibytes for _, mebibytes in watch(f"{arguments} --checkpoint-every 50", tmp_path)]
    assert len(memory) == 600
    assert memory[-1] - memory[299] < 8, memory[::50]
