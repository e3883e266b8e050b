"""`cleanba benchmark` and `cleanba tune`: what they start, how they end, and that the same command goes on."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from sessions import ENV, OFTEN, ROOT, SMALL, STARTED, assert_same, checkpoints, end, wait_for
from test_launch import directives, fake, run_job

from cleanba.core import args, envs
from cleanba.core.run import hold
from cleanba.ppo import Args
from cleanba.tools import grid
from cleanba.tools.benchmark import table
from cleanba.tools.cli import main
from cleanba.tools.grid import ENV_SETS, Job, Share, Workers, markdown, ranges, share_out
from cleanba.tools.tune import Tune, parse_search, part_returns

STUB = '''"""Stands in for a training. STUB_FAIL and STUB_WAIT name runs, ENV/SEED, that fail or wait for a signal."""

import json, os, signal, sys
from pathlib import Path

if __name__ != "__main__":  # read by the grid; a run itself needs no JAX
    from dataclasses import dataclass
    from cleanba.core.args import CoreArgs

    @dataclass(frozen=True)
    class Args(CoreArgs):
        """A stub with ten updates."""

        total_timesteps: int = 640
        """steps"""
        num_envs: int = 8
        """environments"""
        num_steps: int = 8
        """steps of a rollout"""
        learning_rate: float = 0.1
        """the return is 100 times this"""
else:
    words = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    run = Path(words["--run-dir"])
    run.mkdir(exist_ok=True)
    name = words["--env-id"] + "/" + words["--seed"]
    score = 100 * float(words.get("--learning-rate", 0.1)) + int(words["--seed"])
    session = {"argv": sys.argv[1:], "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
    session["cores"] = sorted(os.sched_getaffinity(0))
    with (run / "sessions.jsonl").open("a") as sessions:
        sessions.write(json.dumps(session) + "\\n")

    def stop(signum, frame):
        (run / "checkpoint").touch()
        os._exit(128 + signum)

    def write(updates):
        record = {"charts/episodes": 2, "charts/episodic_return": score}
        records = [{"update": n, "global_step": 64 * n} | record for n in range(1, updates + 1)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))

    if name in os.environ.get("STUB_FAIL", "").split():
        print("many words\\n" * 20 + "and then it failed")
        sys.exit(3)
    if name in os.environ.get("STUB_WAIT", "").split() and not (run / "checkpoint").exists():
        signal.signal(signal.SIGTERM, stop)
        write(5)
        (run / "waiting").touch()
        sys.stdin.read()
        sys.exit("the grid is gone")
    write(10)
    result = {"global_step": 640, "sps": 7.0, "episodic_return": score}
    (run / "result.json.tmp").write_text(json.dumps(result))
    (run / "result.json.tmp").replace(run / "result.json")  # there as a whole or not at all, as a real one
'''
CARTPOLE, ACROBOT = "CartPole-v1", "Acrobot-v1"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in, with the stub in it and no GPU."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return tmp_path


def cleanba(*argv: object) -> int:
    try:
        return main([str(word) for word in argv]) or 0
    except SystemExit as error:
        return int(error.code or 0)


def benchmark(*argv: object) -> int:
    return cleanba("benchmark", "--script", "stub.py", "--run-dir", "out", *argv)


def sessions(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "sessions.jsonl").read_text().splitlines()]


def started(folder: Path) -> dict[str, int]:
    """How often each run was started."""
    return {path.parent.name: len(sessions(path.parent)) for path in sorted(folder.rglob("sessions.jsonl"))}


class TestMachine:
    def test_ranges(self):
        assert ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"

    def test_every_worker_has_its_own_cores(self, monkeypatch):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {7, 3, 4, 5, 6})
        assert share_out(2, 1) == [Share((3, 4), ()), Share((5, 6, 7), ())]
        assert share_out(6, 1) == [Share((), ())] * 6  # too few: all share them

    def test_every_worker_has_its_own_gpus(self, monkeypatch, capsys):
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2,3,5,6")
        assert [share.gpus for share in share_out(2, 2)] == [("0", "2"), ("3", "5")]
        with pytest.raises(SystemExit):
            share_out(3, 2)
        assert "use --workers 2, or JAX_PLATFORMS=cpu" in capsys.readouterr().err
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        assert [share.gpus for share in share_out(3, 2)] == [()] * 3

    def test_gpus_are_counted(self, monkeypatch, tmp_path):
        monkeypatch.delenv("JAX_PLATFORMS", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert grid.gpus_here() == []
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: X (UUID: y)'\necho 'GPU 1: X (UUID: z)'\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        assert grid.gpus_here() == ["0", "1"]


class TestBenchmark:
    def test_runs_and_tables(self, work, capsys):
        assert benchmark("--env-ids", CARTPOLE, ACROBOT, "--num-seeds", 2, "--workers", 2) == 0
        out = work / "out"
        names = [f"{env_id}__stub__{seed}" for env_id in (ACROBOT, CARTPOLE) for seed in (1, 2)]
        assert started(out) == dict.fromkeys(names, 1)
        shares = [sorted(share.cores or os.sched_getaffinity(0)) for share in share_out(2, 1)]
        assert all(sessions(out / name)[0]["cores"] in shares for name in names)
        written = (out / "benchmark.md").read_text()
        cells = [line.strip("| ").split(" | ") for line in written.splitlines()[2:]]
        assert [[cell.strip() for cell in row] for row in cells] == [
            [env_id, "2 of 2", "11.50", "0.50", "640", "7"] for env_id in (CARTPOLE, ACROBOT)
        ]
        assert written in capsys.readouterr().out
        report = json.loads((out / "benchmark.json").read_text())
        assert report["environments"][0]["episodic_return"] == {"mean": 11.5, "std": 0.5, "values": [11.0, 12.0]}
        assert report["runs"][0]["result"]["episodic_return"] == 11.0
        assert benchmark("--env-ids", CARTPOLE, ACROBOT, "--num-seeds", 2) == 0
        assert started(out) == dict.fromkeys(names, 1)  # nothing is repeated
        assert written in capsys.readouterr().out

    def test_failures_are_shown_and_tried_again(self, work, monkeypatch, capsys):
        monkeypatch.setenv("STUB_FAIL", f"{CARTPOLE}/1 {ACROBOT}/2")
        options = ["--env-ids", CARTPOLE, ACROBOT, "--num-seeds", 2]
        assert benchmark(*options) == 1
        out, err = capsys.readouterr()
        assert "1 of 2" in out
        assert "FAILED out/CartPole-v1__stub__1 (status 3); the end of " in err
        assert err.count("    many words\n    and then it failed\n") == 2
        assert err.count("many words") == 2 * (grid.LAST_LINES - 1)
        assert "2 of 4 runs failed" in err
        monkeypatch.delenv("STUB_FAIL")
        assert benchmark(*options) == 0
        assert list(started(work / "out").values()) == [1, 2, 2, 1]

    def test_gpus_reach_the_run(self, work, monkeypatch):
        monkeypatch.delenv("JAX_PLATFORMS")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
        assert benchmark("--env-ids", CARTPOLE, "--num-seeds", 2, "--workers", 2) == 0
        found = [sessions(work / "out" / f"{CARTPOLE}__stub__{seed}")[0]["gpus"] for seed in (1, 2)]
        assert found == ["4", "5"]

    def test_a_command_of_cleanrl(self, work, monkeypatch):
        (work / "other").mkdir()
        (work / "other" / "stub.py").write_text(STUB)
        options = ["--env-ids", CARTPOLE, "--num-seeds", 1, "--start-seed", 5, "--workers", 1, "--no-auto-tag"]
        command = "python other/stub.py --learning-rate 0.5 --exp-name 'a b'"
        assert cleanba("benchmark", "--command", command, *options) == 0
        run = work / "runs" / "benchmark" / "a-b" / f"{CARTPOLE}__a-b__5"
        where = ["--env-id", CARTPOLE, "--seed", "5", "--run-dir", str(run.relative_to(work))]
        assert sessions(run)[0]["argv"] == ["--learning-rate", "0.5", "--exp-name", "a b", *where]

    def test_tracked_runs_are_tagged(self, work, monkeypatch):
        monkeypatch.setenv("WANDB_TAGS", "mine")
        monkeypatch.chdir(ROOT)
        commit = subprocess.check_output(["git", "describe", "--tags", "--always"], text=True).strip()
        out = ["--run-dir", work / "out", "--env-ids", CARTPOLE, "--num-seeds", 1]
        fake(work, "sbatch")
        monkeypatch.setenv("PATH", str(work), prepend=os.pathsep)
        command = f"{sys.executable} {work / 'stub.py'} --track"
        assert cleanba("benchmark", "--command", command, *out, "--slurm", "--no-auto-tag") == 0
        assert os.environ["WANDB_TAGS"] == "mine"
        assert cleanba("benchmark", "--command", command, *out, "--slurm") == 0
        assert os.environ["WANDB_TAGS"] == f"mine,{commit}"

    def test_another_experiment_is_left_alone(self, work, capsys):
        assert benchmark("--env-ids", CARTPOLE, "--num-seeds", 1) == 0
        config = {"algorithm": "stub", "experiment": {"seed": 1}}
        (work / "out" / f"{CARTPOLE}__stub__1" / "config.json").write_text(json.dumps(config))
        capsys.readouterr()
        assert benchmark("--env-ids", CARTPOLE, "--num-seeds", 1) == 2
        assert "learning_rate None -> 0.1" in capsys.readouterr().err

    def test_a_folder_in_use_is_left_alone(self, work, capsys):
        with hold(work / "out", "grid"):
            assert benchmark("--env-ids", CARTPOLE) == 2
        assert "is in use by a grid" in capsys.readouterr().err
        assert started(work / "out") == {}

    def test_the_evaluation_is_in_the_table(self):
        none: dict[str, Any] = {"mean": None, "std": None, "values": []}
        summary = {"env_id": "X", "planned": 3, "seeds": [1], "episodic_return": none, "global_step": none, "sps": none}
        evaluated = {"eval_episodic_return": {"mean": 1234.5, "std": 0.25, "values": [1234.5]}}
        [header, _, row] = table([summary | evaluated])
        assert header == "| environment |  seeds | evaluation |  std | steps | steps/s |"
        assert row == "| X           | 1 of 3 |   1,234.50 | 0.25 |     - |       - |"


class TestEnds:
    """What happens to a grid in a process of its own."""

    def start(self, *argv: object) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "cleanba.tools.cli", "benchmark", *map(str, argv)]
        pipes: dict = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        STARTED.append(subprocess.Popen(command, env=ENV | os.environ, text=True, start_new_session=True, **pipes))
        return STARTED[-1]

    def test_a_run_is_killed_and_then_the_grid(self, work, monkeypatch):
        monkeypatch.setenv("STUB_WAIT", " ".join(f"{env}/{seed}" for env in (CARTPOLE, ACROBOT) for seed in (1, 2)))
        out = work / "out"
        options = ["--env-ids", CARTPOLE, ACROBOT, "--num-seeds", 2, "--workers", 2]
        process = self.start("--script", "stub.py", "--run-dir", "out", *options)
        names = [f"{env_id}__stub__{seed}" for seed in (1, 2) for env_id in (CARTPOLE, ACROBOT)]
        wait_for(lambda: all((out / name / "waiting").exists() for name in names[:2]), process)
        os.kill(sessions(out / names[0])[0]["pid"], signal.SIGKILL)
        wait_for((out / names[2] / "waiting").exists, process)  # its worker goes on with the next
        process.send_signal(signal.SIGTERM)
        said, err = end(process, 128 + signal.SIGTERM)
        assert "FAILED    out/CartPole-v1__stub__1" in said
        assert "(SIGKILL)" in err
        assert "the same command goes on" in err
        assert [(out / name / "checkpoint").exists() for name in names[:3]] == [False, True, True]
        assert not (out / names[3]).exists()
        for name in names[:3]:
            with pytest.raises(ProcessLookupError):
                os.kill(sessions(out / name)[-1]["pid"], 0)
        monkeypatch.delenv("STUB_WAIT")
        assert benchmark(*options) == 0
        assert started(out) == dict(zip(sorted(names), [2, 1, 2, 2], strict=True))

    def test_a_killed_grid_leaves_nothing_running_and_the_same_command_goes_on(self, work, reference):
        out = work / "out"
        run = out / f"{CARTPOLE}__ppo__1"
        options = ["--script", "ppo.py", "--run-dir", "out", "--env-ids", CARTPOLE, "--num-seeds", 1]
        arguments = ["--", *SMALL.split(), *OFTEN.split()]
        process = self.start(*options, *arguments)
        wait_for(lambda: checkpoints(run), process)
        [child] = subprocess.check_output(["pgrep", "-P", str(process.pid)], text=True).split()
        process.kill()
        end(process, -signal.SIGKILL)
        watch = subprocess.Popen(["tail", "--pid", child, "-f", "/dev/null"], stdout=subprocess.PIPE, text=True)
        STARTED.append(watch)
        end(watch, 0)
        assert not (run / "result.json").exists()
        assert cleanba("benchmark", *options, *arguments) == 0
        assert_same(run, reference)
        assert "going on after update" in run.with_name(f"{run.name}.log").read_text()

    def test_a_second_ctrl_c_does_not_wait(self, monkeypatch):
        sent: list[int] = []
        workers = Workers([])
        monkeypatch.setattr(workers, "_running", [SimpleNamespace(send=sent.append)])
        workers._stop_all(signal.SIGINT)
        workers._stop_all(signal.SIGINT)  # within a second: the same one, handed on
        assert sent == [signal.SIGTERM]
        workers._signal_time -= 2
        workers._stop_all(signal.SIGTERM)  # a scheduler repeats itself
        workers._stop_all(signal.SIGINT)
        assert sent == [signal.SIGTERM, signal.SIGKILL]
        assert workers.signal == signal.SIGINT

    def test_a_run_of_several_processes_ends_with_the_grid_too(self, monkeypatch):
        done: list[str] = []
        monkeypatch.setattr(args, "end_with_supervisor", lambda: done.append("watches"))
        monkeypatch.setattr(args, "supervise", lambda *_: done.append("starts its processes"))
        with pytest.raises(SystemExit):
            args.parse(Args, ["--topology", "a0-l0-d2"])
        assert done == ["watches", "starts its processes"]


@pytest.fixture
def programs(work: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is on the path."""
    (work / "bin").mkdir()
    monkeypatch.setenv("PATH", str(work / "bin"))
    return work / "bin"


CLEANRL = """#!/bin/bash
#SBATCH --gpus-per-task={{gpus_per_task}}
#SBATCH --cpus-per-gpu={{cpus_per_gpu}}
#SBATCH --ntasks={{ntasks}}
#SBATCH --array={{array}}
{{nodes}}

env_ids={{env_ids}}
seeds={{seeds}}
env_id=${env_ids[$SLURM_ARRAY_TASK_ID / {{len_seeds}}]}
seed=${seeds[$SLURM_ARRAY_TASK_ID % {{len_seeds}}]}
srun {{command}} --env-id $env_id --seed $seed
"""


class TestSlurm:
    OPTIONS = ["--env-ids", CARTPOLE, ACROBOT, "--num-seeds", 3, "--start-seed", 4, "--workers", 2]

    def job(self, work: Path) -> Path:
        return work / "out" / "array.sbatch"

    def commands(self, work: Path, programs: Path, count: int) -> list[list[str]]:
        """What srun is given in each task of the array."""
        srun, found = fake(programs, "srun"), []
        for i in range(count):
            assert run_job(self.job(work), SLURM_ARRAY_TASK_ID=str(i)) == 0
            found.append([word for word in json.loads(srun.read_text()) if not word.startswith("--kill-on")])
        return found

    @pytest.mark.parametrize("template", ["", CLEANRL])
    def test_each_task_of_the_array_is_one_run(self, work, programs, template):
        more: list[object] = ["--slurm", "--slurm-time", "1:00:00", "--slurm-partition", "gpu"]
        if template:
            (work / "template").write_text(template)
            more = ["--slurm-template-path", "template"]
        more += ["--slurm-gpus-per-task", 1, "--slurm-ntasks", 1, "--slurm-total-cpus", 10, "--slurm-nodes", 1]
        sbatch = fake(programs, "sbatch")
        assert benchmark(*self.OPTIONS, *more, "--", "--exp-name", "$(touch x) 'y'") == 0
        assert json.loads(sbatch.read_text()) == [str(self.job(work).relative_to(work))]
        options = directives(self.job(work))
        common = {"array": "0-5%2", "gpus-per-task": "1", "ntasks": "1", "nodes": "1"}
        own = {"time": "1:00:00", "partition": "gpu", "cpus-per-task": "10", "requeue": "", "signal": "USR1@90"}
        assert options.items() >= (common | ({"cpus-per-gpu": "10"} if template else own)).items()
        found = self.commands(work, programs, 6)
        pairs = [(env_id, seed) for env_id in (CARTPOLE, ACROBOT) for seed in (4, 5, 6)]
        for words, (env_id, seed) in zip(found, pairs, strict=True):
            run_dir = work / "out" / f"{env_id}__--touch-x---y-__{seed}"
            argv = ["--exp-name", "$(touch x) 'y'", "--run-dir", str(run_dir), "--env-id", env_id, "--seed", str(seed)]
            assert words[-len(argv) - 2 :] == [sys.executable, "stub.py", *argv]
        assert not (work / "x").exists()

    def test_only_what_is_unfinished_is_submitted(self, work, programs, capsys):
        sbatch = fake(programs, "sbatch", 5)
        for seed in (5, 6):
            assert benchmark("--env-ids", CARTPOLE, "--start-seed", seed, "--num-seeds", 1) == 0
        assert benchmark(*self.OPTIONS, "--slurm") == 5
        assert directives(self.job(work))["array"] == "0,3-5%2"
        sbatch.unlink()
        assert benchmark(*self.OPTIONS) == 0
        capsys.readouterr()
        assert benchmark(*self.OPTIONS, "--slurm") == 0
        assert "| Acrobot-v1  | 3 of 3 |" in capsys.readouterr().out
        assert not sbatch.exists()

    def test_dry_run_shows_the_job_and_writes_nothing(self, work, programs, capsys):
        assert benchmark(*self.OPTIONS, "--slurm", "--dry-run") == 0
        out = capsys.readouterr().out
        assert "#SBATCH --array=0-5%2\n" in out
        assert f"env_ids=({CARTPOLE} {ACROBOT})\nseeds=(4 5 6)\n" in out
        assert "6 runs in " in out
        assert not (work / "out").exists()


class TestAtari57:
    def test_they_are_games_of_envpool(self):
        games = ENV_SETS["atari57"]
        assert len(set(games)) == 57
        assert set(games) <= envs._envpool_ids()

    def test_the_whole_grid_is_planned(self, work, capsys):
        options = ["--env-ids", "atari57", "--dry-run", "--run-dir", "out"]
        assert cleanba("benchmark", "--script", "ppo_atari.py", *options) == 0
        out = capsys.readouterr().out.splitlines()
        commands = [shlex.split(line) for line in out if "ppo_atari.py" in line]
        assert len(commands) == 171
        assert len({command[command.index("--run-dir") + 1] for command in commands}) == 171
        assert sum(line.endswith(" |    new |    new |    new |") for line in out) == 57
        assert any(line.startswith("171 runs in ") and line.endswith(": 0 finished, 171 to do") for line in out)
        assert not (work / "out").exists()


ONE = ["--script", "stub.py", "--env-ids", CARTPOLE]
SEARCH = ["--search", "learning-rate=log:0.01:1.0"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["benchmark", "--env-ids", CARTPOLE], "--script ppo.py"),
        (["benchmark", "--script", "missing.py", "--env-ids", CARTPOLE], "missing.py is not a Python file"),
        (["benchmark", "--script", "stub.py"], "name environments"),
        (["benchmark", "--script", "stub.py", "--env-ids", "Cartpole-v1"], "no environment 'Cartpole-v1'"),
        (["benchmark", *ONE, "Acrobat-v1"], "no environment 'Acrobat-v1'"),
        (["benchmark", *ONE, CARTPOLE], "names CartPole-v1 twice"),
        (["benchmark", *ONE, "--num-seeds", "0"], "--num-seeds 0"),
        (["benchmark", *ONE, "--workers", "-1"], "--workers -1"),
        (["benchmark", *ONE, "--start-seed", str(2**32 - 1)], "too large"),
        (["benchmark", *ONE, "--", "--seed", "1"], "use --num-seeds"),
        (["benchmark", *ONE, "--", "--run_dir=x"], "use --run-dir before"),
        (["benchmark", *ONE, "--", "--num-envs", "9"], "8 or 16 would do"),
        (["benchmark", *ONE, "--command", "python stub.py"], "not both"),
        (["benchmark", "--env-ids", CARTPOLE, "--command", "python 'stub.py"], "cannot be read"),
        (["benchmark", "--env-ids", CARTPOLE, "--command", "python -m stub"], "does not run a script"),
        (["benchmark", "--env-ids", CARTPOLE, "--command", "nowhere stub.py"], "no program 'nowhere'"),
        (["benchmark", *ONE, "--slurm-nodes", "1"], "without --slurm"),
        (["benchmark", *ONE, "--slurm"], "sbatch is not on this machine"),
        (["benchmark", *ONE, "--slurm-ntasks", "2", "--slurm", "--dry-run"], "-d1"),
        (["benchmark", *ONE, "--slurm-time", "1 x", "--slurm"], "--slurm-time"),
        (["benchmark", *ONE, "--slurm-template-path", "no", "--dry-run"], "no"),
        (["tune", *ONE], "say what to try"),
        (["tune", *ONE, ACROBOT, *SEARCH], "need --target-scores"),
        (["tune", *ONE, "--target-scores", f"{ACROBOT}=0:1", *SEARCH], "each env"),
        (["tune", *ONE, "--target-scores", f"{CARTPOLE}=5:5", *SEARCH], "ENV=LOW"),
        (["tune", *ONE, "--num-trials", "0", *SEARCH], "--num-trials 0"),
        (["tune", *ONE, *SEARCH, *SEARCH[1:]], "twice"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(work, programs, capsys, argv, said):
    before = sorted(work.rglob("*"))
    assert cleanba(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert sorted(path for path in work.rglob("*") if "__pycache__" not in str(path)) == before


class TestSearch:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("learning-rate=log:1e-4:1e-2", optuna.distributions.FloatDistribution(1e-4, 1e-2, log=True)),
            ("gamma=0:1", optuna.distributions.FloatDistribution(0.0, 1.0)),
            ("num_steps=log:8:256", optuna.distributions.IntDistribution(8, 256, log=True)),
            ("num-steps=32,64,128", optuna.distributions.CategoricalDistribution([32, 64, 128])),
            ("anneal-lr=true,false", optuna.distributions.CategoricalDistribution([True, False])),
            ("engine=auto,gymnasium", optuna.distributions.CategoricalDistribution(["auto", "gymnasium"])),
        ],
    )
    def test_is_read(self, text, expected):
        assert parse_search(text, Args()) == (text.partition("=")[0].replace("-", "_"), expected)

    @pytest.mark.parametrize(
        "text",
        [
            "learning-rate",
            "learning-rate=",
            "learning-rate=1:2:3",
            "learning-rate=2:1",
            "learning-rate=nan:1",
            "learning-rate=log:0:1",
            "learning-rate=__import__('os')",
            "num-steps=0.5:2",
            "anneal-lr=0,1",
            "anneal-lr=true:false",
            "engine=auto,magic",
            "engine=auto:gymnasium",
            "seed=1,2",
            "env-id=a,b",
            "run-dir=a,b",
            "nothing=1,2",
        ],
    )
    def test_is_refused(self, text, capsys):
        with pytest.raises(SystemExit, match="2"):
            parse_search(text, Args())
        assert capsys.readouterr().err.count("\n") == 1


class TestTune:
    OPTIONS = ["--script", "stub.py", "--run-dir", "out", "--env-ids", CARTPOLE, ACROBOT]
    OPTIONS += ["--target-scores", f"{CARTPOLE}=0:100", f"{ACROBOT}=-100:100"]

    def tune(self, *argv: object, search: str = "learning-rate=0.2,0.6") -> int:
        return cleanba("tune", *self.OPTIONS, "--search", search, *argv)

    def study(self) -> optuna.Study:
        return optuna.load_study(study_name="tune", storage="sqlite:///out/study.db")

    @pytest.mark.parametrize(("aggregation", "score"), [("average", 0.5), ("median", 0.3), ("max", 1.0), ("min", 0.2)])
    def test_score(self, aggregation, score):
        targets = ("A=0:10", "B=-10:10", "C=100:200")
        tune = Tune(env_ids=("A", "B", "C"), target_scores=targets, aggregation=aggregation)
        assert tune.score({1: [2.0, -4.0, 200.0]}) == pytest.approx(score)
        assert tune.score({1: [2.0, -4.0, 200.0], 2: [0.0, -10.0, 100.0]}) == pytest.approx(score / 2)
        assert tune.score({1: [2.0, None, 200.0]}) is None

    def test_searches_and_goes_on(self, work, capsys):
        assert self.tune("--num-trials", 3, "--workers", 2) == 0
        first = capsys.readouterr().out
        [best] = [line for line in first.splitlines() if line.startswith("best: ")]
        report = json.loads((work / "out" / "tune.json").read_text())
        tried = [trial["params"]["learning_rate"] for trial in report["trials"]]
        assert set(tried) == {0.2, 0.6}
        # the return of seed 1 is 100 x the learning rate + 1
        scores = {0.2: (0.21 + 1.21 / 2) / 2, 0.6: (0.61 + 1.61 / 2) / 2}
        assert [trial["score"] for trial in report["trials"]] == pytest.approx([scores[x] for x in tried])
        assert report["best_command"] == best.removeprefix("best: ")
        command = f"cleanba benchmark --script stub.py --env-ids {CARTPOLE} {ACROBOT} -- --learning-rate 0.6"
        assert report["best_command"] == command
        assert (work / "out" / "tune.md").read_text() in first
        before = started(work / "out")
        assert len(list((work / "out").rglob("sessions.jsonl"))) == 6
        assert self.tune("--num-trials", 3) == 0
        assert started(work / "out") == before
        assert self.tune("--num-trials", 4) == 0
        assert len(self.study().trials) == 4

    def test_an_interrupted_trial_goes_on(self, work):
        assert self.tune("--num-trials", 1) == 0
        study = self.study()
        study.enqueue_trial({"learning_rate": 0.6})
        broken = study.ask({"learning_rate": optuna.distributions.CategoricalDistribution([0.2, 0.6])})
        broken.report(0.5, 0)
        assert self.tune("--num-trials", 2) == 0
        assert [trial.state.name for trial in self.study().trials] == ["COMPLETE", "COMPLETE"]
        assert self.study().trials[broken.number].value == pytest.approx((0.61 + 1.61 / 2) / 2)

    def test_another_search_is_refused(self, work, capsys):
        assert self.tune("--num-trials", 1) == 0
        capsys.readouterr()
        assert self.tune("--num-trials", 2, "--aggregation", "min") == 2
        assert "aggregation average -> min" in capsys.readouterr().err

    def test_a_failing_trial_is_shown(self, work, monkeypatch, capsys):
        monkeypatch.setenv("STUB_FAIL", f"{ACROBOT}/1")
        assert self.tune("--num-trials", 2) == 1
        out, err = capsys.readouterr()
        assert "trials: 2 failed; wrote" in out
        assert "and then it failed" in err

    def test_a_bad_trial_is_pruned(self, work, monkeypatch, capsys):
        """Both of its runs are at half; five trials were better there."""
        monkeypatch.setattr(grid, "LOOK_EVERY", 0.05)
        assert self.tune("--num-trials", 1, search="learning-rate=0.1:0.6") == 0
        study = self.study()
        better = {part: 0.9 for part in range(10)}
        space = {"learning_rate": optuna.distributions.FloatDistribution(0.1, 0.6)}
        trial: Callable[..., Any] = optuna.trial.create_trial
        for _ in range(4):
            returns = {"returns": {CARTPOLE: 1.0, ACROBOT: 1.0}}
            own = dict(params={"learning_rate": 0.5}, distributions=space, user_attrs=returns)
            study.add_trial(trial(value=0.9, intermediate_values=better, **own))
        monkeypatch.setenv("STUB_WAIT", f"{CARTPOLE}/1 {ACROBOT}/1")
        assert self.tune("--num-trials", 6, "--workers", 2, search="learning-rate=0.1:0.6") == 0
        pruned = self.study().trials[5]
        assert pruned.state.name == "PRUNED"
        assert max(pruned.intermediate_values) < 5
        for env_id in (CARTPOLE, ACROBOT):
            run = work / "out" / "trial-0005" / f"{env_id}__stub__1"
            assert (run / "checkpoint").exists()
        assert "trial 5: pruned" in capsys.readouterr().out

    def test_parts_of_a_run(self, tmp_path):
        own = args.CoreArgs(total_timesteps=25, num_envs=1, num_steps=1)
        records = [
            {"update": n, "global_step": n, "charts/episodes": n % 3} | ({"charts/episodic_return": n} if n % 3 else {})
            for n in range(1, 12)
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        # parts end after updates 3, 5, 8, 10, 13, ...
        assert part_returns(Job(own, tmp_path, [])) == pytest.approx([(1 + 2 * 2) / 3, (4 + 5 * 2) / 3, 23 / 3, 10.0])


def test_columns_line_up() -> None:
    assert markdown(["a", "bb"], [["long", 1], ["x", 22222]]) == [
        "| a    |    bb |",
        "| ---- | ----: |",
        "| long |     1 |",
        "| x    | 22222 |",
    ]


def test_a_single_environment_needs_no_target() -> None:
    assert Tune(env_ids=("A",)).score({1: [3.0], 2: [5.0]}) == 4.0
