"""`cleanba bench` measures what it says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from sessions import ENV, ROOT

from cleanba.core.clock import Clock
from cleanba.tools import peers
from cleanba.tools.bench import PARTS, WAITS, Bench, summarize, table

WORK = "--num-envs 16 --num-steps 8 --num-shards 4"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cleanba.tools.cli", "bench", *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("more", ["", "--no-concurrency --collect stepwise --topology a0,1-l0"])
def test_every_part_is_measured(more: str, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    arguments = [*WORK.split(), *more.split()]
    done = bench(
        str(ROOT / "cleanba" / "ppo.py"), "--rounds", "2", "--updates", "1", "--out", str(out), "--", *arguments
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    speeds = report["steps_per_second"]
    assert list(speeds) == [*PARTS, "ceiling"]
    for median, low, high in speeds.values():
        assert 0 < low <= median <= high
    assert set(report["share_of_time"]) == set(WAITS)
    assert report["arguments"] == arguments
    assert f"| training | {speeds['training'][0]:,.0f} |" in done.stdout
    assert not any(path.name != "bench.json" for path in tmp_path.iterdir())


def test_the_ceiling_is_one_part_after_another() -> None:
    line = {f"stats/{wait}_time": 0.5 for wait in WAITS}
    figures = {part: [(seconds, 1.0)] * 3 for part, seconds in zip(PARTS, (1.0, 2.0, 5.0, 10.0), strict=True)}
    report = summarize(figures | {"waits": [[line, line]] * 3, "other": [5.0] * 3, "first_update": [3.0]}, steps=80)
    assert report["steps_per_second"]["environments"] == [80, 80, 80]
    assert report["steps_per_second"]["ceiling"] == pytest.approx([10] * 3)
    assert report["of_ceiling"] == pytest.approx([0.8] * 3)
    assert report["times_peer"]["other"] == pytest.approx([1.6] * 3)
    assert report["share_of_time"]["log"] == pytest.approx([0.1] * 3)
    lines = table(report | {"script": "x.py", "arguments": [], "topology": "a0-l0-d1", "cores": 2, "rounds": 3})
    assert "| of the ceiling | 0.80 | 0.80 .. 0.80 |" in lines


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py"], "nowhere.py is not a Python file"),
        ([str(ROOT / "cleanba" / "ppo.py"), "--rounds", "0"], "must be at least 1"),
        ([str(ROOT / "cleanba" / "ppo.py"), "--out", "no/such/place.json"], "there is no such directory"),
        ([str(ROOT / "cleanba" / "ppo.py"), "--", "--topology", "a0-l0-d2"], "use -d1"),
        ([str(ROOT / "cleanba" / "impala_atari.py"), "--peers"], "compare with ppo.py"),
        ([str(ROOT / "cleanba" / "ppo_continuous_action.py"), "--peers"], "--env-id HalfCheetah-v4: "),
        ([str(ROOT / "cleanba" / "ppo_atari_lstm.py"), "--peers"], "no recurrent policy"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_peers_are_installed_once_and_again_when_others_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    (tmp_path / "cleanba" / "peers").mkdir(parents=True)  # as `python -m venv` would
    peers.install()
    made = len(commands)
    assert made > 1
    peers.install()
    assert len(commands) == made
    monkeypatch.setattr(peers, "CLEANRL", ("cleanrl==2.0.0",))
    peers.install()
    assert "cleanrl==2.0.0" in commands[-1]


def test_cleanrl_is_given_the_workload_in_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = peers.cleanrl(Path("python"), "ppo.py", 512, "Acrobot-v1", num_envs=4, learning_rate=2.5e-4)
    words = "--num-envs 4 --learning-rate 0.00025 --env-id Acrobot-v1 --total-timesteps 1000000000"
    assert peer.work["arguments"] == words.split()
    assert peer.work["file"] == f"{tmp_path}/cleanba/peers/cleanrl/cleanrl/ppo.py"


def test_a_peer_writes_nothing_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lazy.py").write_text("import tempfile\nopen('log', 'w')\ntempfile.mkdtemp()\nprint(7.5)\n")
    monkeypatch.setattr(peers, "HERE", tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert peers.Peer("lazy", Path(sys.executable), {}).steps_per_second() == 7.5
    assert [path.name for path in tmp_path.iterdir()] == ["lazy.py"]


def test_a_peer_that_fails_is_left_out_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {"able": "print(7.5)", "unable": "raise SystemExit('I know vectors only')"}
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)
    monkeypatch.setattr(peers, "HERE", tmp_path)
    others = [peers.Peer(name, Path(sys.executable), {}) for name in programs]
    monkeypatch.setattr("cleanba.tools.bench.peers_for", lambda args: others)
    out = tmp_path / "bench.json"
    Bench(ROOT / "cleanba" / "ppo.py", tuple(WORK.split()), rounds=2, updates=1, peers=True, out=out).main()
    report = json.loads(out.read_text())
    assert list(report["times_peer"]) == ["able"]
    assert report["steps_per_second"]["able"] == [7.5] * 3
    assert "warning: unable cannot do this and is left out: I know vectors only\n" in capsys.readouterr().err


def test_a_clock_takes_the_mean_over_threads_and_begins_anew() -> None:
    clock = Clock()
    with clock("a"), clock("b"):
        pass
    spent = clock.lap()
    assert list(spent) == ["a", "b"]
    assert spent["a"] >= spent["b"] >= 0
    assert clock.lap() == {}
