"""Evaluation: which episodes count, videos of what was really played, and training that does not notice it."""

import ctypes
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from sessions import SMALL, finish, killed_copy, lines, numbers, result
from synthetic import params_of

from cleanba import ppo
from cleanba.core import envs
from cleanba.core.evaluate import Film, Player, standard_error
from cleanba.core.rollout import Acted
from cleanba.core.run import Run, flatten
from cleanba.core.seeding import Role
from cleanba.tools.cli import main

ARGS = ppo.Args(num_steps=16, collect="stepwise")
ENGINES = pytest.mark.parametrize("engine", ["envpool", "gymnasium"])


def push_right(params: Any, step: Any, carry: Any, key: Any, args: Any) -> Acted:
    """The pole falls after about ten steps."""
    del params, key, args
    return Acted(jnp.ones(step.first.shape, jnp.int32), carry)


def lengths_by_hand(num_envs: int, episodes: int) -> list[list[int]]:
    """Of the first episodes of each environment, in which each step gives 1."""
    args = replace(ARGS, num_envs=num_envs, num_shards=1)
    engine = envs.make(args, [0], Role.EVALUATE)
    engine.reset()
    lengths: list[list[int]] = [[0] for _ in range(num_envs)]
    resets = np.zeros(num_envs, bool)
    while min(map(len, lengths)) <= episodes:
        over = engine.step(np.ones((1, num_envs), np.int32)).over[0]
        for env in range(num_envs):
            lengths[env][-1] += not resets[env]
            if over[env]:
                lengths[env].append(0)
        resets = over
    engine.close()
    return [own[:episodes] for own in lengths]


@pytest.mark.parametrize(("num_envs", "episodes"), [(1, 3), (3, 7), (4, 4)])
def test_the_first_episodes_of_every_environment_count(num_envs: int, episodes: int) -> None:
    rounds = -(-episodes // num_envs)
    expected = np.array(lengths_by_hand(num_envs, rounds)).T.ravel()[:episodes]
    assert Player(push_right, ARGS, num_envs).play({}, episodes) == expected.tolist()
    assert len(set(expected)) > 1


def test_every_play_is_in_the_same_environments_and_compiles_nothing_new() -> None:
    params, other = params_of(ppo, ARGS), params_of(ppo, ARGS, seed=1)
    player = Player(ppo.act, ARGS, 4)
    first = player.play(params, 8)
    assert player._collector is not None
    compiled = player._collector._act_on_all._cache_size()  # type: ignore[attr-defined]
    assert player.play(other, 8) != first
    assert player.play(params, 8) == first
    assert player._collector._act_on_all._cache_size() == compiled  # type: ignore[attr-defined]


def test_fused_plays_are_the_same() -> None:
    player = Player(push_right, replace(ARGS, collect="fused"), 4)
    expected = Player(push_right, ARGS, 4).play({}, 8)
    assert [player.play({}, 8), player.play({}, 8)] == [expected, expected]


@ENGINES
def test_what_is_shown_is_the_first_episode_and_changes_nothing(engine: Any) -> None:
    args = replace(ARGS, engine=engine)
    params = params_of(ppo, args)
    frames: list[np.ndarray] = []
    shown = Player(ppo.act, args, 3, frames.append).play(params, 6)
    assert shown == Player(ppo.act, args, 3).play(params, 6)
    assert len(frames) == 1 + shown[0]  # a reward of 1 for each step
    assert {(frame.shape, frame.dtype) for frame in frames} == {((400, 600, 3), np.dtype(np.uint8))}
    assert len({frame.tobytes() for frame in frames}) > len(frames) / 2


def first_frame(args: Any) -> np.ndarray:
    """Of an environment that is shown."""
    frames: list[np.ndarray] = []
    engine = envs.make(replace(args, num_envs=1, num_shards=1), [0], Role.EVALUATE, show=frames.append)
    engine.reset()
    engine.close()
    [frame] = frames
    return frame


def test_atari_is_shown_as_it_is_and_not_as_the_network_sees_it() -> None:
    frame = first_frame(replace(ARGS, env_id="Pong-v5"))
    assert frame.shape == (210, 160, 3)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) >= 4


def test_mujoco_is_shown_where_there_is_a_driver() -> None:
    try:
        frame = first_frame(replace(ARGS, env_id="HalfCheetah-v4"))
    except envs.EnvError as error:
        if "failed to initialize EGL" not in str(error):
            raise
        pytest.skip(str(error))
    assert frame.shape == (480, 480, 3)
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 100


@pytest.mark.parametrize(
    ("env_id", "said"),
    [("oracle_env:Oracle-v0", "gymnasium cannot render oracle_env:Oracle-v0"), ("HalfCheetah-v4", "EGL.*no such file")],
)
def test_what_cannot_be_rendered_is_said_in_one_line(env_id: str, said: str, monkeypatch: Any) -> None:
    def nowhere(*args: Any, **options: Any) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", nowhere)
    with pytest.raises(envs.EnvError, match=said) as caught:
        first_frame(replace(ARGS, env_id=env_id))
    assert "\n" not in str(caught.value)


def test_an_engine_that_fails_to_render_is_named(monkeypatch: Any) -> None:
    def fails(self: Any) -> np.ndarray:
        raise RuntimeError("render not\nimplemented")

    monkeypatch.setattr(envs.EnvPoolEngine, "render", fails)
    with pytest.raises(envs.EnvError, match=r"^envpool cannot render CartPole-v1: render not implemented$"):
        first_frame(ARGS)


def read_video(path: Path, height: int, width: int) -> np.ndarray:
    """[frames, height, width, 3]"""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    pixels = subprocess.run(command, capture_output=True, check=True).stdout
    return np.frombuffer(pixels, np.uint8).reshape(-1, height, width, 3)


def test_a_film_has_the_frames_it_was_shown(tmp_path: Path) -> None:
    film = Film(tmp_path / "videos" / "film.mp4")
    colors = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]] * 4)
    for color in colors:
        assert not film.path.exists()
        film.show(np.broadcast_to(color, (48, 62, 3)).astype(np.uint8))
    film.close()
    frames = read_video(film.path, 48, 62)
    assert len(frames) == 12
    np.testing.assert_allclose(frames.mean((1, 2)), colors, atol=12)
    assert list(film.path.parent.iterdir()) == [film.path]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run directory with a model in it."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    save_file(flatten(params_of(ppo, ARGS)), tmp_path / "run" / "model" / "params.safetensors")
    config = {"algorithm": "ppo", "experiment": ARGS.experiment}
    (tmp_path / "run" / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "run"


def evaluated(capsys: Any, run: Path, *words: object) -> dict[str, Any]:
    """What `cleanba eval` prints."""
    assert main(["eval", str(run), *map(str, words)]) is None
    return json.loads(capsys.readouterr().out)


def test_the_command_prints_and_writes_all_there_is_to_know(saved: Path, capsys: Any) -> None:
    said = evaluated(capsys, saved, "--episodes", 5, "--num-envs", 2, "--seed", 3, "--out", saved / "eval.json")
    assert said == json.loads((saved / "eval.json").read_text())
    returns = said["returns"]
    assert returns == Player(ppo.act, replace(ARGS, seed=3), 2).play(params_of(ppo, ARGS), 5)
    assert (said["env_id"], said["seed"], said["num_envs"], said["episodes"]) == ("CartPole-v1", 3, 2, 5)
    assert said["mean"] == pytest.approx(sum(returns) / 5)
    assert said["standard_error"] == pytest.approx(np.sqrt(np.var(returns) * 5 / 4 / 5))
    assert not (saved / "videos").exists()


def test_the_command_films_an_episode_of_the_evaluation(saved: Path, capsys: Any) -> None:
    said = evaluated(capsys, saved, "--episodes", 3, "--video")
    assert said["video"] == str(saved / "videos" / "seed-1.mp4")
    assert said["returns"] == Player(ppo.act, ARGS, 3).play(params_of(ppo, ARGS), 3)
    assert len(read_video(Path(said["video"]), 400, 600)) == 1 + said["returns"][0]


def test_a_training_that_cannot_be_filmed_is_refused_before_it_begins(tmp_path: Path, capfd: Any) -> None:
    with pytest.raises(SystemExit) as caught:
        Run(replace(ARGS, env_id="oracle_env:Oracle-v0", capture_video=True, run_dir=str(tmp_path / "run"))).__enter__()
    assert caught.value.code == 2
    assert "--capture-video: gymnasium cannot render oracle_env:Oracle-v0" in capfd.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_return_has_no_standard_error() -> None:
    assert standard_error([3.0]) is None
    assert standard_error([1.0, 3.0]) == 1.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--episodes 0", "--episodes 0 must be at least 1"),
        ("--num-envs 0", "--num-envs 0 must be at least 1"),
        ("--out nowhere/eval.json", "--out nowhere/eval.json: there is no directory nowhere"),
        ("--video", "gymnasium cannot render oracle_env:Oracle-v0"),
    ],
)
def test_the_command_refuses_in_one_line(saved: Path, capsys: Any, words: str, said: str) -> None:
    config = {"algorithm": "ppo", "experiment": replace(ARGS, env_id="oracle_env:Oracle-v0").experiment}
    (saved / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as caught:
        main(["eval", str(saved), *words.split()])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert not (saved / "videos").exists()


EVALUATED = "charts/eval_episodic_return"


def test_evaluating_while_training_changes_no_number_also_over_a_resume(reference: Path, tmp_path: Path) -> None:
    run, evaluation = tmp_path / "run", "--eval-every 20 --eval-episodes 4"
    finish(run, f"{SMALL} --checkpoint-every 40 {evaluation}")
    records = numbers(run)
    evaluations = {record["update"]: record.pop(EVALUATED) for record in records if EVALUATED in record}
    assert records == numbers(reference)
    assert result(run) == result(reference)
    assert list(evaluations) == [20, 40, 60]
    assert len(set(evaluations.values())) > 1
    assert "stats/eval_time" in json.loads(lines(run)[19])
    assert main(["diff", str(run), str(reference)]) == 0

    copy = killed_copy(run, tmp_path / "copy")
    finish(copy, f"{SMALL} {evaluation} --topology a0-l1,2 --save-model --capture-video")
    assert numbers(copy) == numbers(run)
    assert len(read_video(copy / "videos" / "update-60.mp4", 400, 600)) > 1
    assert result(copy)["eval_episodic_return"] == evaluations[60]
