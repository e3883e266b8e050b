"""Time alignment, episode statistics and equal bits of every way to collect, on real environments through Collector."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthetic import params_of

from cleanba import ppo
from cleanba.core.actors import Collector
from cleanba.core.rollout import Acted, Episodes, Rollout
from cleanba.core.seeding import Role


def random_act(params: Any, step: Any, carry: Any, key: jax.Array, args: Any) -> Acted:
    """At random, but not independent of what is seen; notes all that it saw."""
    seen = jnp.sum(step.obs.astype(jnp.float32), axis=range(1, step.obs.ndim)).astype(jnp.int32)  # [B]
    action = (jax.random.randint(key, seen.shape, 0, 1000) + seen) % args.env_spec.num_actions
    return Acted(action, carry, {"seen": seen, "reward": step.reward, "first": step.first})


def balance(params: Any, step: Any, carry: Any, key: jax.Array, args: Any) -> Acted:
    """A controller that keeps CartPole's pole up for 500 steps."""
    x, speed, angle, turn = jnp.moveaxis(step.obs, 1, 0)
    return Acted((3 * angle + turn + 0.02 * x + 0.1 * speed > 0).astype(jnp.int32), carry, {})


@functools.cache
def rollouts_of(
    act: Any, shards: tuple[int, ...] = (0, 1), rollouts: int = 4, **changes: Any
) -> list[list[tuple[Rollout, Episodes]]]:
    """[shard][rollout]"""
    sizes = dict(num_envs=6, num_shards=2, num_steps=40, seed=5)
    args = ppo.Args(**(sizes | changes))
    collector = Collector(act, None, args, shards, jax.local_devices()[0], Role.ACT)
    assert collector.fused == (args.collect != "stepwise" and args.env_spec.engine == "envpool")
    try:
        result = [[own[:2] for own in collector.collect({}, n)] for n in range(1, rollouts + 1)]
    finally:
        collector.close()
    return [[jax.device_get(both[i]) for both in result] for i in range(len(shards))]


def joined(parts: list[tuple[Rollout, Episodes]]) -> tuple[Rollout, Episodes]:
    """Consecutive rollouts as one long one."""
    rollouts, episodes = zip(*parts, strict=True)
    without_last = [r._replace(obs=r.obs[:-1], first=r.first[:-1]) for r in rollouts]
    whole = jax.tree.map(lambda *x: np.concatenate(x), *without_last)
    last = rollouts[-1]
    whole = whole._replace(
        obs=np.concatenate([whole.obs, last.obs[-1:]]), first=np.concatenate([whole.first, last.first[-1:]])
    )
    return whole, jax.tree.map(lambda *x: np.concatenate(x), *episodes)


ENVS = [
    dict(env_id="CartPole-v1"),
    dict(env_id="Catch-v0"),
    dict(env_id="CartPole-v1", engine="gymnasium"),
    dict(env_id="oracle_env:Oracle-v0"),
]
NAMES = ["CartPole", "Catch", "Gymnasium-CartPole", "Oracle"]


@pytest.mark.parametrize("env", ENVS, ids=NAMES)
def test_time_is_aligned(env: dict) -> None:
    both_shards = rollouts_of(random_act, **env)
    for parts in both_shards:
        for (one, _), (following, _) in itertools.pairwise(parts):
            assert np.array_equal(one.obs[-1], following.obs[0])
            assert np.array_equal(one.first[-1], following.first[0])
        rollout, episodes = joined(parts)
        ended = rollout.terminated | rollout.truncated
        assert ended.sum() > 5
        assert not (rollout.terminated & rollout.truncated).any()
        assert rollout.first[0].all()
        assert rollout.valid[0].all()
        # Only the row after an end is a reset; only the row after a reset shows a first observation.
        assert np.array_equal(rollout.valid[1:], ~ended[:-1])
        assert np.array_equal(rollout.first[1:], ~rollout.valid)
        assert (rollout.reward[~rollout.valid] == 0).all()
        assert not ended[~rollout.valid].any()
        # The policy saw obs[t], the reward that came with it, and whether it was a first one.
        seen = rollout.obs[:-1].astype(np.float32).sum(axis=tuple(range(2, rollout.obs.ndim)))
        assert (abs(rollout.extras["seen"] - seen) < 1 + 1e-4).all()
        assert np.array_equal(rollout.extras["first"], rollout.first[:-1])
        assert np.array_equal(rollout.extras["reward"][1:], rollout.reward[:-1])
        assert np.array_equal(episodes.over, ended)
        check_episodes(rollout, episodes)
    assert not np.array_equal(both_shards[0][0][0].obs, both_shards[1][0][0].obs)


def check_episodes(rollout: Rollout, episodes: Episodes) -> None:
    """Returns and lengths, added up again from the valid rewards."""
    for b in range(rollout.reward.shape[1]):
        total, length = 0.0, 0
        for t in range(len(rollout.reward)):
            total += float(rollout.reward[t, b])
            length += int(rollout.valid[t, b])
            if rollout.terminated[t, b] or rollout.truncated[t, b]:
                assert episodes.returns[t, b] == pytest.approx(total, abs=1e-5)
                assert episodes.lengths[t, b] == length
                total, length = 0.0, 0


def test_observations_follow_the_physics_of_cartpole() -> None:
    """obs[t + 1] is what followed action[t], also at an end: position and angle move by their speeds."""
    parts = rollouts_of(random_act, env_id="CartPole-v1")
    for shard in parts:
        rollout, _ = joined(shard)
        now, following = rollout.obs[:-1], rollout.obs[1:]
        moved = now[..., [0, 2]] + 0.02 * now[..., [1, 3]]
        np.testing.assert_allclose(following[..., [0, 2]][rollout.valid], moved[rollout.valid], atol=1e-5)
        faster = following[..., 1] > now[..., 1]  # pushed to the right
        assert np.array_equal(faster[rollout.valid], (rollout.action == 1)[rollout.valid])
        fell = (abs(following[..., 0]) > 2.4) | (abs(following[..., 2]) > 12 * 2 * np.pi / 360)
        assert np.array_equal(fell[rollout.valid], rollout.terminated[rollout.valid])
        assert (abs(rollout.obs[rollout.first]) <= 0.05).all()


@pytest.mark.parametrize("engine", ["envpool", "gymnasium"])
def test_cartpole_is_cut_after_500_steps_not_ended(engine: str) -> None:
    [parts] = rollouts_of(balance, (0,), 2, env_id="CartPole-v1", engine=engine, num_envs=8, num_steps=260)
    rollout, episodes = joined(parts)
    assert rollout.truncated[499].all()
    assert rollout.truncated.sum() == 4
    assert not rollout.terminated.any()
    assert not rollout.valid[500].any()
    assert rollout.first[501].all()
    assert (episodes.lengths[499] == 500).all()
    assert (episodes.returns[499] == 500).all()
    # What follows the cut is the true last observation, close to the one before, not a fresh one.
    assert (abs(rollout.obs[500] - rollout.obs[499]) < 0.6).all()


@pytest.mark.parametrize(
    "env",
    [
        dict(env_id="CartPole-v1"),
        dict(env_id="Catch-v0"),
        dict(env_id="Pong-v5", num_steps=10),
    ],
    ids=["CartPole", "Catch", "Pong"],
)
def test_fused_and_stepwise_and_any_threads_give_the_same_bits(env: dict[str, Any]) -> None:
    ways: list[dict] = [{}, dict(collect="stepwise"), dict(env_threads=3)]
    runs = [rollouts_of(random_act, **(env | way)) for way in ways]
    leaves = [jax.tree.leaves(run) for run in runs]
    for other in leaves[1:]:
        for a, b in zip(leaves[0], other, strict=True):
            assert a.dtype == b.dtype
            assert a.tobytes() == b.tobytes()


def test_a_real_policy_collects_the_same_bits_fused_and_stepwise() -> None:
    args = ppo.Args(num_envs=16, num_shards=2, num_steps=40)
    params = params_of(ppo, args)
    runs = []
    for collect in ("fused", "stepwise"):
        own = ppo.Args(num_envs=16, num_shards=2, num_steps=40, collect=collect)
        collector = Collector(ppo.act, params, own, [0, 1], jax.local_devices()[0], Role.ACT)
        runs.append([jax.device_get(collector.collect(params, n)) for n in (1, 2)])
        collector.close()
    for a, b in zip(*map(jax.tree.leaves, runs), strict=True):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes())


def test_a_shard_does_not_depend_on_the_shards_beside_it() -> None:
    together = rollouts_of(random_act, env_id="CartPole-v1")
    [alone] = rollouts_of(random_act, (1,), env_id="CartPole-v1")
    for a, b in zip(jax.tree.leaves(alone), jax.tree.leaves(together[1]), strict=True):
        assert a.tobytes() == b.tobytes()
