"""Runs that are killed, interrupted, short of disk or forked, and go on as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sessions import (
    ENV,
    OFTEN,
    ROOT,
    SMALL,
    assert_same,
    checkpoints,
    end,
    finish,
    killed_copy,
    lines,
    numbers,
    start,
    wait_for,
    wait_for_updates,
)

from cleanba.tools.cli import main


def test_a_run_that_is_ended_in_every_way_goes_on_as_if_nothing_had_happened(reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, f"{SMALL} --checkpoint-every 2 --collect stepwise")
    wait_for(lambda: checkpoints(run), process)
    os.killpg(process.pid, signal.SIGKILL)
    end(process, -signal.SIGKILL)

    # Nothing but the signal makes these save; what they did up to it is not lost.
    for signum, topology in ((signal.SIGTERM, "a0-l1,2"), (signal.SIGINT, "a0,1-l1,2"), (signal.SIGUSR1, "a0-l0")):
        last = checkpoints(run)[-1]
        process = start(run, f"{SMALL} --checkpoint-every 0 --collect stepwise --topology {topology}")
        wait_for_updates(run, process)
        process.send_signal(signum)
        out, err = end(process, 128 + signum)
        assert f"going on after update {last}" in out
        assert "replaying environments" in out
        assert f"the same command goes on after update {checkpoints(run)[-1]}" in err
        ours = [line for line in err.splitlines() if "was not completed" not in line]  # if it was killed while it wrote
        assert len(ours) == 1
        assert checkpoints(run)[-1] == len(lines(run)) > last

    _, err = finish(run, SMALL)
    assert_same(run, reference)
    assert err == ""
    sessions = json.loads((run / "config.json").read_text())["sessions"]
    assert [s["topology"] for s in sessions] == ["a0-l0-d1", "a0-l1,2-d1", "a0,1-l1,2-d1", "a0-l0-d1", "a0-l0-d1"]


def test_a_run_without_a_run_dir_says_which_one_goes_on(tmp_path: Path) -> None:
    """Its name has the time in it: the same command alone would begin anew."""
    endless = SMALL.replace("7680", "7680000")
    words = [sys.executable, str(ROOT / "cleanba" / "ppo.py"), *endless.split(), "--checkpoint-every", "0"]
    with subprocess.Popen(
        words, cwd=tmp_path, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            wait_for(lambda: any(path.stat().st_size for path in tmp_path.glob("runs/*/metrics.jsonl")), process)
            process.send_signal(signal.SIGTERM)
            err = process.communicate()[1]
        finally:
            process.kill()
    [run_dir] = tmp_path.glob("runs/*")
    assert f"the same command with --run-dir {run_dir.relative_to(tmp_path)} goes on after update" in err


# Sends itself a signal at a bad moment: a checkpoint has got its name, but the run does not know it yet; or the other
# way round, the run takes it for begun.
SIGNALLED = """
import os, runpy, signal, sys
from cleanba.core.checkpoint import Checkpoints
_, moment, *sys.argv = sys.argv
method = getattr(Checkpoints, moment)
def signalled(self, *args):
    if moment == "begin":
        os.kill(os.getpid(), signal.SIGTERM)
    method(self, *args)
    os.kill(os.getpid(), signal.SIGTERM)
setattr(Checkpoints, moment, signalled)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("moment", ["begin", "commit"])
def test_a_signal_in_the_middle_of_a_checkpoint_does_not_destroy_it(moment: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-c", SIGNALLED, moment, str(ROOT / "cleanba" / "ppo.py"), "--run-dir", str(run)]
    command += [*SMALL.split(), "--checkpoint-every", "1", "--keep-checkpoints", "1"]
    done = subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr.count("\n") == 1, done.stderr
    [kept] = checkpoints(run)
    assert f"goes on after update {kept}" in done.stderr
    assert kept == len(lines(run))


def test_a_run_that_had_only_to_write_its_result_does_so(reference: Path, tmp_path: Path) -> None:
    shutil.copytree(reference, tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    finish(tmp_path / "run", SMALL)
    assert_same(tmp_path / "run", reference)


def test_a_damaged_checkpoint_is_passed_over_and_the_run_ends_the_same(reference: Path, tmp_path: Path) -> None:
    run = killed_copy(reference, tmp_path / "run", saved=2)
    good, damaged = checkpoints(run)
    shutil.rmtree(run / "checkpoints" / f"{damaged:08d}" / "state")
    out, err = finish(run, f"{SMALL} --topology a0-l1,2")
    assert err.startswith(f"warning: the checkpoint of update {damaged} is passed over: state/")
    assert err.count("\n") == 1
    assert f"going on after update {good}" in out
    assert_same(run, reference)


def test_an_unfinished_run_is_not_continued_as_another_experiment(reference: Path, tmp_path: Path) -> None:
    run = killed_copy(reference, tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    _, err = finish(run, f"{SMALL} --seed 2 --gamma 0.9", status=2)
    assert err.count("\n") == 1
    assert "(gamma 0.99 -> 0.9; seed 1 -> 2)" in err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("name", "text"), [("config.json", "{"), ("metrics.jsonl", "nonsense\n")])
def test_a_damaged_file_of_the_run_is_named_in_one_line(name: str, text: str, reference: Path, tmp_path: Path) -> None:
    run = killed_copy(reference, tmp_path / "run")
    (run / name).write_text(text)
    _, err = finish(run, SMALL, status=2)
    assert err.count("\n") == 1
    assert name in err
    assert (run / name).read_text() == text


def test_a_gymnasium_run_without_concurrency_goes_on_exactly(tmp_path: Path) -> None:
    """MountainCar computes with its actions, so their type matters too."""
    arguments = (
        "--env-id MountainCar-v0 --engine gymnasium --no-concurrency "
        "--num-envs 8 --num-shards 4 --num-steps 16 --total-timesteps 1280"
    )
    finish(tmp_path / "run", f"{arguments} {OFTEN}")
    copy = killed_copy(tmp_path / "run", tmp_path / "copy")
    finish(copy, f"{arguments} --topology a0,1-l1,2")
    assert_same(copy, tmp_path / "run")


def test_an_environment_that_is_not_deterministic_is_found_out_and_can_go_on(tmp_path: Path) -> None:
    arguments = "--env-id oracle_env:Noisy-v0 --num-envs 8 --num-shards 4 --num-steps 16 --total-timesteps 1280"
    run = tmp_path / "run"
    finish(run, f"{arguments} {OFTEN}")
    copy = killed_copy(run, tmp_path / "copy")
    _, err = finish(copy, arguments, status=1)
    assert "oracle_env:Noisy-v0 is not deterministic" in err
    assert "rollout 1 " in err
    assert "--resume-envs fresh" in err
    assert checkpoints(copy) == [4]

    finish(copy, f"{arguments} --resume-envs fresh")
    assert len(lines(copy)) == 10
    assert numbers(copy)[:4] == numbers(run)[:4]
    assert json.loads((copy / "config.json").read_text())["sessions"][-1]["envs"] == "fresh"
    assert (copy / "checkpoints" / "actions_00000005").exists()  # from where on it is exact again


def test_renewed_environments_bound_the_log_and_go_on_exactly(tmp_path: Path) -> None:
    arguments = f"{SMALL} --renew-envs-every 6"
    run = tmp_path / "run"
    finish(run, f"{arguments} --checkpoint-every 5")
    saved, last = checkpoints(run)
    assert last == 60
    logs = sorted(path.name for path in (run / "checkpoints").glob("actions_*"))
    assert logs == [f"actions_{since:08d}" for since in range(1, 61, 6) if since > saved - 6]

    copy = killed_copy(run, tmp_path / "copy")
    finish(copy, f"{arguments} --collect stepwise --topology a0-l0-d2")
    assert_same(copy, run)


def fork(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cleanba.tools.cli", "fork", *map(str, words)]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)


class TestFork:
    def test_without_changes_it_ends_the_same(self, reference: Path, tmp_path: Path) -> None:
        done = fork(reference, "--update", 4, "--run-dir", tmp_path / "new", "--", "--topology", "a0-l1,2")
        assert done.returncode == 0, done.stderr
        assert "forked after update 4" in done.stdout
        assert "going on after update 4" in done.stdout
        assert_same(tmp_path / "new", reference)
        origin = json.loads((tmp_path / "new" / "config.json").read_text())["forked_from"]
        assert origin == {"run": str(reference), "update": 4, "changed": {}}

    def test_with_changes_it_parts_from_there_on(self, reference: Path, tmp_path: Path) -> None:
        new = tmp_path / "new"
        done = fork(reference, "--update", 4, "--run-dir", new, "--", "--learning-rate", "1e-4", "--no-norm-adv")
        assert done.returncode == 0, done.stderr
        assert numbers(new)[:4] == numbers(reference)[:4]
        assert len(lines(new)) == 60
        parted = [a["fingerprint"] != b["fingerprint"] for a, b in zip(numbers(new), numbers(reference), strict=True)]
        assert parted == [False] * 4 + [True] * 56
        config = json.loads((new / "config.json").read_text())
        assert config["forked_from"]["changed"] == {"learning_rate": [0.0025, 0.0001], "norm_adv": [True, False]}
        assert config["experiment"]["learning_rate"] == 0.0001
        assert config["name"] == "new"

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("--update 4 -- --seed 2 --num-steps 16", "--seed, --num-steps cannot change"),
            ("--update 4 -- --no-concurrency", "--concurrency cannot change"),
            ("--update 3", "no checkpoint of update 3; there are [60, "),
            ("--update 4 -- --total-timesteps 384", "ends before update 4"),
            ("--update 4 -- --learning-rate fast", "--learning-rate"),
            ("--update 4 -- --topology a0", "a0"),
        ],
    )
    def test_what_cannot_be_is_refused_in_one_line(
        self, words: str, said: str, reference: Path, tmp_path: Path, capsys, monkeypatch
    ) -> None:
        monkeypatch.setattr(os, "execv", lambda *command: pytest.fail("was not refused"))
        with pytest.raises(SystemExit) as caught:
            main(["fork", str(reference), "--run-dir", str(tmp_path / "new"), *words.split()])
        assert caught.value.code == 2
        err = capsys.readouterr().err
        assert said in err
        ours = [line for line in err.splitlines() if "was not completed" not in line]  # if it was killed while it wrote
        assert len(ours) == 1
        assert not (tmp_path / "new").exists()

    def test_a_directory_that_exists_is_left_alone(self, reference: Path, tmp_path: Path, capsys, monkeypatch) -> None:
        monkeypatch.setattr(os, "execv", lambda *command: pytest.fail("was not refused"))
        with pytest.raises(SystemExit):
            main(["fork", str(reference), "--run-dir", str(tmp_path)])
        assert "exists" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_kill_a_run(small_disk: Callable[[int], Path], reference: Path) -> None:
    """There is room for one checkpoint, but not for a second one beside it: the first stays, and is gone on from."""
    disk = small_disk(50_000)
    run = disk / "run"
    subprocess.run(["fallocate", "-l", "49600k", str(disk / "other")], check=True)
    for _ in range(2):
        out, err = finish(run, f"{SMALL} --checkpoint-every 4")
        assert "No space left" in err
        assert "the last good one is of update 4" in err
        assert all(line.startswith("warning: the checkpoint of update ") for line in err.splitlines()), err
        assert checkpoints(run) == [4]
        assert_same(run, reference)
        (run / "result.json").unlink()  # as if it had been killed before
    assert "going on after update 4" in out


def test_a_run_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    bind = ["mount", "--bind", "-o", "ro", str(tmp_path / "run"), str(tmp_path / "run")]
    if subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("may not mount here")
    try:
        _, err = finish(tmp_path / "run", SMALL, status=2)
        ours = [line for line in err.splitlines() if "was not completed" not in line]  # if it was killed while it wrote
        assert len(ours) == 1
        assert f"--run-dir {tmp_path / 'run'} cannot be written: Read-only file system" in err
    finally:
        subprocess.run(["umount", str(tmp_path / "run")], check=True)
    assert list((tmp_path / "run").iterdir()) == []
