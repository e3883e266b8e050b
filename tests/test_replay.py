"""The replay memory against a list of everything that happened, on made-up and on real environments."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from synthetic import random_rollout

from cleanba import c51, dqn, dqn_atari
from cleanba.core import envs
from cleanba.core.actors import Collector
from cleanba.core.replay import Replay, Transitions, add, draw, empty, gradient_steps, step_keys, take
from cleanba.core.rollout import Acted, Rollout
from cleanba.core.seeding import Role
from cleanba.core.topology import Topology

SIZES: dict[str, Any] = dict(
    num_envs=6, num_shards=2, num_steps=4, buffer_size=6 * 12, batch_size=64, train_frequency=8
)


def remembered(args: Any, rollouts: list[list[Rollout]]) -> Replay:
    """[rollout][shard] -> the memory of all shards"""
    memory = jax.tree.map(lambda x: jnp.stack([x] * args.num_shards), empty(args))
    for shards in rollouts:
        memory = jax.jit(add, static_argnums=2)(memory, jax.tree.map(lambda *x: np.stack(x), *shards), args)
    return memory


def sampled(memory: Replay, keys: jax.Array, args: Any) -> Transitions:
    return take(memory, draw(memory, keys, args), args)


def draws(args: Any, memory: Replay, number: int = 8) -> list[Any]:
    keys = jax.vmap(lambda i: jax.random.split(jax.random.key(i), args.num_shards))(jnp.arange(number))
    return [jax.device_get(jax.jit(sampled, static_argnums=2)(memory, own, args)) for own in keys]


def steps_of(rollouts: list[list[Rollout]], shard: int, last: int) -> list[tuple]:
    """Every step of a shard that is not a reset, of its last rows: what was seen, done, answered, and what followed."""
    rows = [(own[shard], t) for own in rollouts for t in range(own[shard].reward.shape[0])][-last:]
    return [
        (r.obs[t, b], r.action[t, b], r.reward[t, b], r.terminated[t, b], r.obs[t + 1, b])
        for r, t in rows
        for b in range(r.reward.shape[1])
        if r.valid[t, b]
    ]


def flat(step: Any) -> tuple:
    return tuple(np.concatenate([np.ravel(x) for x in step]).tolist())


def consistent(rng: np.random.Generator, args: Any, number: int) -> list[list[Rollout]]:
    """Rollouts that follow each other: what ended one begins the next."""
    rollouts: list[list[Rollout]] = []
    for _ in range(number):
        new = [random_rollout(rng, args.num_steps, args.envs_per_shard, D=4, A=2) for _ in range(args.num_shards)]
        if rollouts:
            for old, own in zip(rollouts[-1], new, strict=True):
                own.obs[0] = old.obs[-1]
        rollouts.append(new)
    return rollouts


@pytest.mark.parametrize("number", [1, 2, 3, 4, 7])
def test_what_is_drawn_happened_and_everything_that_is_kept_can_be_drawn(number: int) -> None:
    args = dqn.Args(**SIZES)
    rollouts = consistent(np.random.default_rng(number), args, number)
    memory = remembered(args, rollouts)
    kept = min(number * args.num_steps, args.rows - 1)
    for shard in range(args.num_shards):
        happened = {flat(step) for step in steps_of(rollouts, shard, kept)}
        drawn = set()
        for batch in draws(args, memory, 24):
            rows = zip(*(x[shard] for x in batch[:5]), batch.weight[shard], strict=True)
            for *step, weight in rows:
                if weight:
                    drawn.add(flat(step))
        assert drawn == happened


def test_reset_steps_are_not_drawn_and_the_others_equally_often() -> None:
    args = dqn.Args(**(SIZES | dict(batch_size=2048)))
    rollouts = consistent(np.random.default_rng(0), args, 2)
    batches = draws(args, remembered(args, rollouts), 16)
    assert np.mean([batch.weight.mean() for batch in batches]) > 0.98  # four draws, a fifth of the steps are resets
    rewards = np.concatenate([batch.reward[0][batch.weight[0] > 0] for batch in batches])
    _, counts = np.unique(rewards, return_counts=True)
    assert counts.size == len(steps_of(rollouts, 0, 8))
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_what_followed_is_not_taken_from_other_environments() -> None:
    """Where environments are made anew, the last step before has no successor."""
    args = dqn.Args(**SIZES)
    rollouts = consistent(np.random.default_rng(0), args, 2)
    for own in rollouts[1]:
        own.first[0], own.obs[0] = True, 1e6
    for batch in draws(args, remembered(args, rollouts)):
        assert not (batch.next_obs[batch.weight > 0] == 1e6).any()


def test_shards_keep_to_themselves() -> None:
    args = dqn.Args(**SIZES)
    rollouts = consistent(np.random.default_rng(0), args, 3)
    both, alone = remembered(args, rollouts), remembered(args, [own[1:] * 2 for own in rollouts])
    assert all(np.array_equal(a[1], b[0]) for a, b in zip(both, alone, strict=True))


@pytest.mark.parametrize(("game", "protocol"), [("Breakout-v5", "classic"), ("Breakout-v5", "machado")])
def test_stacks_are_put_together_from_single_frames(game: str, protocol: str) -> None:
    """Real games, with lost lives, over which a stack goes on, and new games, where it begins anew."""
    sizes: dict[str, Any] = dict(num_envs=4, num_shards=2, num_steps=96, buffer_size=4 * 288, batch_size=128)
    args = dqn_atari.Args(env_id=game, atari_protocol=protocol, **sizes)  # type: ignore[arg-type]
    assert jax.eval_shape(lambda: empty(args)).obs.shape == (289, 2, 84, 84)

    def at_random(params: Any, step: Any, carry: Any, key: jax.Array, args: Any) -> Acted:
        return Acted(jax.random.randint(key, step.first.shape, 0, 4), carry)

    collector = Collector(at_random, None, args, [0, 1], jax.local_devices()[0], Role.ACT)
    rollouts = [[jax.device_get(own[0]) for own in collector.collect({}, n)] for n in range(1, 6)]
    collector.close()
    ends = sum(own.terminated.sum() for shards in rollouts for own in shards)
    assert ends > 1
    kept = args.rows - args.frames
    happened = [{step[0].tobytes() + step[4].tobytes() for step in steps_of(rollouts, shard, kept)} for shard in (0, 1)]
    for batch in draws(args, remembered(args, rollouts)):
        for shard in (0, 1):
            pairs = zip(batch.obs[shard], batch.next_obs[shard], strict=True)
            assert {a.tobytes() + b.tobytes() for a, b in pairs} <= happened[shard]


def test_gradient_steps_wait_for_learning_to_start() -> None:
    args = dqn.Args(**(SIZES | dict(learning_starts=48)))
    rollouts = consistent(np.random.default_rng(0), args, 3)

    def step(state: jax.Array, time: jax.Array, batch: Transitions) -> tuple[jax.Array, dict]:
        return state + 1, {"time": time, "even": (time, time % 16 == 0)}

    for number, taken in ((2, 0), (3, 3)):
        memory = remembered(args, rollouts[:number])
        keys = step_keys(memory, jax.random.split(jax.random.key(0), args.num_shards), args)
        state, metrics = gradient_steps(step, jnp.int32(0), memory, keys, args)
        assert state == taken
        assert np.all(metrics["time"][1]) == (taken > 0)
    assert metrics["time"][0].tolist() == [56, 64, 72]
    assert metrics["even"][1].tolist() == [False, True, False]


def test_every_gradient_step_has_a_minibatch_of_its_own_by_its_key() -> None:
    args = dqn.Args(**(SIZES | dict(learning_starts=0)))
    memory = remembered(args, consistent(np.random.default_rng(0), args, 3))
    keys = jax.random.split(jax.random.key(0), args.num_shards)

    def step(state: tuple, time: jax.Array, batch: Transitions, other: jax.Array) -> tuple[tuple, dict]:
        return state, {"batch": batch.obs, "other": other}

    others = jnp.arange(args.gradient_steps)
    _, metrics = gradient_steps(step, (), memory, step_keys(memory, keys, args), args, others)
    given = metrics["batch"][0]
    for i, time in enumerate([56, 64, 72]):
        own = jax.vmap(partial(jax.random.fold_in, data=time))(keys)
        assert np.array_equal(given[i], sampled(memory, own, args).obs)
    assert not np.array_equal(given[0], given[1])
    assert metrics["other"][0].tolist() == others.tolist()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(buffer_size=20), "must be at least 24"),
        (dict(batch_size=7), "--num-shards 2 does not divide --batch-size 7; 6 or 8 would do"),
        (dict(train_frequency=7), "21 or 28 would do"),
        (dict(buffer_size=10**13), "GiB are there"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: dict, words: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as end:
        dqn.Args(**(SIZES | changes)).check()
    assert end.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("topology", ["a0-l0", "a0-l1,2"])
def test_a_memory_that_does_not_fit_onto_its_devices_is_refused(
    topology: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Stand-ins for GPUs, which are not here; half of the shards need half of the memory."""
    args = dqn.Args(**SIZES, topology=topology)
    needed = 2 * args.replay_bytes // len(args.layout.learners)
    limits = {"bytes_limit": needed + 100, "bytes_in_use": 100}
    device = SimpleNamespace(memory_stats=lambda: limits)
    monkeypatch.setattr(Topology, "mesh", SimpleNamespace(local_devices=[device]))
    args.check_devices()
    limits["bytes_in_use"] += 1
    with pytest.raises(SystemExit) as end:
        args.check_devices()
    assert end.value.code == 2
    assert "half at the start only, on" in capsys.readouterr().err


def test_the_memory_of_an_atari_run_is_that_of_single_frames() -> None:
    assert dqn_atari.Args(env_id="Pong-v5").replay_bytes == pytest.approx(1_000_000 * 84 * 84, rel=0.01)


def test_the_projection_moves_each_probability_to_its_neighbours() -> None:
    args = c51.Args(n_atoms=11, v_min=-5.0, v_max=5.0)
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(11), 20).astype(np.float32)
    returns = rng.uniform(-9, 9, (20, 11)).astype(np.float32)
    returns[0] = np.arange(-5, 6)  # on the atoms
    wanted = np.zeros((20, 11))
    for n in range(20):
        for p, x in zip(probs[n], returns[n], strict=True):
            place = min(max(x, -5.0), 5.0) + 5
            low = int(np.floor(place))
            wanted[n, low] += p * (1 - (place - low))
            if place > low:
                wanted[n, low + 1] += p * (place - low)
    np.testing.assert_allclose(c51.project(jnp.asarray(returns), jnp.asarray(probs), args), wanted, atol=1e-5)


def test_envs_of_several_threads_answer_in_order() -> None:
    for env_id in ("CartPole-v1", "HalfCheetah-v4"):
        engine = envs.EnvPoolEngine(env_id, "machado", 8, list(range(16)), 3)
        one = envs.EnvPoolEngine(env_id, "machado", 8, list(range(16)), 1)
        space: Any = envs.make_spec(env_id, "envpool", "machado").action_space
        assert np.array_equal(engine.reset(), one.reset())
        for i in range(50):
            space.seed(i)
            action = np.stack([space.sample() for _ in range(16)]).reshape(2, 8, *space.shape)
            for a, b in zip(engine.step(action), one.step(action), strict=True):
                assert np.array_equal(a, b)
