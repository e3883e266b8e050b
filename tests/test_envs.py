"""Engines: the Atari protocols arrive, what cannot be used is refused, and a failing environment is named."""

from typing import Any

import envpool
import jax
import numpy as np
import pytest
from gymnasium.spaces import Discrete, flatten

from cleanba import ppo
from cleanba.core import envs
from cleanba.core.actors import Collector
from cleanba.core.rollout import Acted
from cleanba.core.seeding import Role, env_seeds


def args_for(env_id: str, **changes: Any) -> ppo.Args:
    return ppo.Args(**(dict(env_id=env_id, num_envs=2, num_shards=1, num_steps=8) | changes))  # type: ignore[arg-type]


def played(args: ppo.Args, steps: int, noop: bool = False) -> list[envs.Outcome]:
    """Outcomes of random play, or of doing nothing, in shard 0."""
    engine = envs.make(args, [0], Role.ACT)
    engine.reset()
    rng = np.random.default_rng(0)
    result = []
    for _ in range(steps):
        action = np.zeros(args.num_envs) if noop else rng.integers(0, args.env_spec.num_actions, args.num_envs)
        result.append(jax.tree.map(lambda x: x[0], engine.step(action.astype(np.int32)[None])))
    engine.close()
    return result


@pytest.mark.parametrize(("protocol", "actions"), [("machado", 18), ("classic", 6)])
def test_protocols_decide_the_actions(protocol: str, actions: int) -> None:
    spec = args_for("Pong-v5", atari_protocol=protocol).env_spec
    assert spec.engine == "envpool"
    assert spec.num_actions == actions
    assert spec.observation_space.shape == (4, 84, 84)
    assert spec.observation_space.dtype == np.uint8


@pytest.mark.parametrize("protocol", ["machado", "classic"])
def test_protocols_reach_envpool(protocol: str) -> None:
    engine = envs.make(args_for("Breakout-v5", atari_protocol=protocol), [0], Role.ACT)
    assert isinstance(engine, envs.EnvPoolEngine)
    config = engine._pool.config
    engine.close()
    machado = protocol == "machado"
    assert config["repeat_action_probability"] == pytest.approx(0.25 if machado else 0.0)
    assert config["full_action_space"] is machado
    assert config["episodic_life"] is not machado
    assert config["noop_max"] == (1 if machado else 30)
    assert config["max_episode_steps"] == 27_000
    assert config["reward_clip"] is True


def test_classic_ends_the_learners_episode_with_a_life_and_the_reported_one_with_the_game() -> None:
    outcomes = played(args_for("Breakout-v5", atari_protocol="classic"), 450)
    terminated, over = (np.stack([getattr(o, name) for o in outcomes]) for name in ("terminated", "over"))
    for env in range(2):
        lives = 0
        for t in range(450):
            lives += terminated[t, env]
            if over[t, env]:
                assert lives % 5 == 0  # Breakout has five
        assert over[:, env].sum() == lives // 5 >= 1


def test_machado_plays_whole_games() -> None:
    outcomes = played(args_for("Breakout-v5"), 300)
    terminated, over = (np.stack([getattr(o, name) for o in outcomes]) for name in ("terminated", "over"))
    assert np.array_equal(terminated, over)
    assert 1 <= over.sum() <= 300 * 2 / 60  # no game of five lives is that short


@pytest.mark.parametrize("protocol", ["machado", "classic"])
def test_rewards_are_clipped_and_scores_are_not(protocol: str) -> None:
    outcomes = played(args_for("MsPacman-v5", atari_protocol=protocol), 150)
    reward, score = (np.stack([getattr(o, name) for o in outcomes]) for name in ("reward", "score"))
    assert score.max() >= 10
    assert np.array_equal(reward, np.sign(score))


def random_act(params: Any, step: Any, carry: Any, key: jax.Array, args: Any) -> Acted:
    return Acted(jax.random.randint(key, step.first.shape, 0, args.env_spec.num_actions), carry, {})


def test_reported_returns_are_scores_of_whole_games() -> None:
    """A lost life ends the learner's episode, goes on in the reported one, and its reset row is no step."""
    args = args_for("Breakout-v5", atari_protocol="classic", num_steps=450)
    collector = Collector(random_act, None, args, [0], jax.local_devices()[0], Role.ACT)
    [(rollout, episodes, _)] = jax.device_get(collector.collect({}, 1))
    collector.close()
    assert episodes.over.sum() < rollout.terminated.sum()
    for env in range(2):
        begin, games = 0, 0
        for t in np.flatnonzero(episodes.over[:, env]):
            rows = slice(begin, t + 1)
            assert episodes.lengths[t, env] == rollout.valid[rows, env].sum()
            assert episodes.returns[t, env] >= rollout.reward[rows, env].sum()  # bricks higher up give more than 1
            assert rollout.terminated[rows, env].sum() == 5
            begin, games = int(t) + 1, games + 1
        assert games >= 1


@pytest.mark.parametrize(
    ("env_id", "engine", "wanted"),
    [
        ("CartPol-v1", "auto", "CartPole-v1"),
        ("Ponk-v5", "envpool", "Pong-v5"),
        ("no_such_module:Env-v0", "auto", "no_such_module"),
        ("Pong-v5", "gymnasium", "Pong-v5"),
    ],
)
def test_an_unknown_environment_is_answered_with_what_there_is(env_id: str, engine: str, wanted: str) -> None:
    with pytest.raises(envs.EnvError) as caught:
        envs.make_spec(env_id, engine, "machado")
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("env_id", "engine"), [("FrozenLake-v1", "auto"), ("CliffWalking-v1", "gymnasium")])
def test_observations_that_are_no_array_are_refused(env_id: str, engine: str) -> None:
    with pytest.raises(envs.EnvError, match="a Dict of such"):
        envs.make_spec(env_id, engine, "machado")


def test_box_actions_are_described_but_not_counted() -> None:
    spec = envs.make_spec("Pendulum-v1", "auto", "machado")
    assert spec.engine == "envpool"
    with pytest.raises(envs.EnvError, match="discrete actions"):
        _ = spec.num_actions


def test_any_registered_gymnasium_environment_can_be_used() -> None:
    spec = envs.make_spec("oracle_env:Oracle-v0", "auto", "machado")
    assert spec.engine == "gymnasium"
    assert isinstance(spec.action_space, Discrete)
    assert spec.num_actions == 2


@pytest.mark.parametrize("env", [dict(env_id="CartPole-v1", engine="gymnasium"), dict(env_id="CartPole-v1")])
def test_environments_are_seeded_one_by_one(env: dict) -> None:
    starts = []
    for shards in ([0, 1], [1], [0]):
        engine = envs.make(args_for(**env, num_envs=8, num_shards=2), shards, Role.ACT)
        starts.append(engine.reset())
        engine.close()
    both = np.concatenate(list(starts[0]))
    assert len(np.unique(both, axis=0)) == 8
    assert np.array_equal(starts[0][1], starts[1][0])
    assert np.array_equal(starts[0][0], starts[2][0])


def test_a_tree_of_arrays_is_shown_as_a_row_by_gymnasium() -> None:
    args = args_for("oracle_env:Parts-v0")
    assert args.env_spec.observation_space.shape == (7,)
    engine = envs.make(args, [0], Role.ACT)
    engine.reset()
    obs = engine.step(np.zeros((1, 2), np.int32)).obs
    engine.close()
    # In the order of Gymnasium's Dict, which sorts names: ones, steps/a, steps/b.
    assert obs.tolist() == [[[1, 1, 1, 1, -1, 1, 0]] * 2]


def test_a_tree_of_arrays_is_shown_as_a_row_by_envpool() -> None:
    args = args_for("WalkerWalk-v1")
    spec, space = args.env_spec, envpool.make_spec("WalkerWalk-v1").gymnasium_observation_space
    engine = envs.make(args, [0], Role.ACT)
    pool = envpool.make("WalkerWalk-v1", env_type="gymnasium", num_envs=2, seed=env_seeds(1, Role.ACT, [0, 1], 1))
    action = np.random.default_rng(0).uniform(-1, 1, (2, len(spec.action_bounds[0])))
    for ours, theirs in ((engine.reset(), pool.reset()[0]), (engine.step(action[None]).obs, pool.step(action)[0])):
        assert ours.shape == (1, 2, *spec.observation_space.shape)
        assert ours.dtype == np.float32
        for row, env in zip(ours[0], range(2), strict=True):
            one = jax.tree.map(lambda x, env=env: x[env], {name: theirs[name] for name in space})
            assert np.array_equal(row, np.float32(np.asarray(flatten(space, one))))
    engine.close()
    pool.close()


def test_a_failing_gymnasium_environment_is_named() -> None:
    args = args_for("oracle_env:Raises-v0", num_envs=6, num_shards=3)
    engine = envs.make(args, [1, 2], Role.ACT)
    engine.reset()
    action = np.zeros((2, 2), np.int32)
    for _ in range(7):  # five steps, a reset, a step
        engine.step(action)
    said = r"environment 2 of \S*Raises-v0 at its step 7: .*the pole fell off"
    with pytest.raises(RuntimeError, match=said) as caught:
        engine.step(action)
    assert isinstance(caught.value.__cause__, ValueError)
    engine.close()


def test_outcomes_are_copies_in_jax_width() -> None:
    for env in (dict(env_id="CartPole-v1"), dict(env_id="CartPole-v1", engine="gymnasium")):
        engine = envs.make(args_for(**env), [0], Role.ACT)
        engine.reset()
        first = engine.step(np.zeros((1, 2), np.int32))
        before = [x.copy() for x in first]
        engine.step(np.ones((1, 2), np.int32))
        engine.close()
        assert all(np.array_equal(a, b) for a, b in zip(first, before, strict=True))
        assert {x.dtype for x in first} == {np.dtype(np.float32), np.dtype(bool)}
