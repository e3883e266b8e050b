"""Computing over shards: the same bits for every number of learners."""

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from synthetic import TinyNetwork, bits, learn, params_of, random_rollouts

from cleanba import ppo
from cleanba.core.actors import Collector
from cleanba.core.lockstep import Lockstep
from cleanba.core.seeding import Role
from cleanba.core.shards import LONG, Learner, State, accumulate, each_shard, fenced, total
from cleanba.core.topology import LEARNER, Topology, to_device


def layout(learners: int) -> Topology:
    return Topology((0,), tuple(range(learners)))


def over(learners: int, function: Any, *trees: Any, out: P) -> Any:
    """Call `function` on every learner, with its shards."""
    mesh = layout(learners).mesh
    mapped = jax.shard_map(function, mesh=mesh, in_specs=P(LEARNER), out_specs=out, check_vma=False)
    return jax.device_get(jax.jit(mapped)(*trees))


def function(x: Any) -> dict[str, jax.Array]:
    return {"sum": jnp.sum(jnp.tanh(x["a"]) * x["b"]), "rows": x["a"].T @ x["a"]}


def some_trees(shards: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shards)
    return {k: rng.normal(size=(shards, 7, 5)).astype(np.float32) for k in "ab"}


@pytest.mark.parametrize("shards", [1, 2, 6])
def test_each_shard_equals_a_plain_map(shards: int) -> None:
    x = some_trees(shards)
    result = jax.jit(lambda x: each_shard(function, x))(x)
    expected = [function(jax.tree.map(lambda leaf, i=i: leaf[i], x)) for i in range(shards)]
    for i, want in enumerate(expected):
        for name, value in want.items():
            np.testing.assert_allclose(result[name][i], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("kind", ["float", "int", "bool", "key"])
def test_what_stands_in_the_first_place_changes_nothing_else(kind: str, shards: int) -> None:
    """A NaN, a zero or False there adds a round to the loop; the result must not show it."""
    if kind == "float":
        x: Any = np.arange(1, 3 * shards + 1, dtype=np.float32).reshape(shards, 3)
        x[0, 0] = np.nan
    elif kind == "key":
        x = jax.random.wrap_key_data(jnp.array([[0, i] for i in range(shards)], jnp.uint32))
    else:
        x = np.arange(3 * shards).reshape(shards, 3).astype(np.int32 if kind == "int" else bool)

    def double(x: jax.Array) -> jax.Array:
        return jax.random.bits(x, (2,)) if kind == "key" else x * 2

    result = np.asarray(jax.jit(lambda x: each_shard(double, x))(x))
    expected = np.stack([np.asarray(double(one)) for one in x])
    assert np.array_equal(result, expected, equal_nan=kind == "float")
    assert kind != "float" or np.isnan(result).sum() == 1


def test_fenced_is_the_function() -> None:
    x = jax.tree.map(lambda leaf: leaf[0], some_trees(1))
    for name, value in jax.jit(fenced(function))(x).items():
        np.testing.assert_allclose(value, function(x)[name], rtol=1e-5, atol=1e-5)


def test_accumulate_adds_up() -> None:
    x = some_trees(5)
    result = jax.jit(lambda x: accumulate(function, x))(x)
    expected = [function(jax.tree.map(lambda leaf, i=i: leaf[i], x)) for i in range(5)]
    for name, value in result.items():
        np.testing.assert_allclose(value, sum(want[name] for want in expected), rtol=1e-5, atol=1e-5)


def tree_sum(x: np.ndarray) -> np.ndarray:
    """Neighbours, then neighbouring sums; whoever has no neighbour waits."""
    terms = list(x)
    while len(terms) > 1:
        pairs = [terms[i] + terms[i + 1] for i in range(0, len(terms) - 1, 2)]
        terms = pairs + terms[len(pairs) * 2 :]
    return terms[0]


@pytest.mark.parametrize("size", [1001, LONG + 1])
@pytest.mark.parametrize(
    ("shards", "learners"), [(1, [1]), (8, [1, 2, 4, 8]), (6, [1, 2, 3, 6]), (7, [1, 7]), (24, [1, 2, 3, 4, 6, 8])]
)
def test_total_is_one_fixed_tree(shards: int, learners: list[int], size: int) -> None:
    rng = np.random.default_rng(shards)
    x = (rng.normal(size=(shards, size)) * 10.0 ** rng.integers(-4, 5, (shards, size))).astype(np.float32)
    expected = tree_sum(x)
    assert shards < 3 or not np.array_equal(expected, np.sum(x, axis=0))  # the order matters here
    for count in learners:
        result = over(count, lambda x: total({"x": x}), x, out=P())["x"]
        assert result.tobytes() == expected.tobytes(), f"{count} learners"


@pytest.mark.parametrize("size", [1001, LONG])
@pytest.mark.parametrize(("shards", "learners"), [(4, 3), (6, 4), (7, 2), (8, 3), (8, 5)])
def test_learners_that_cannot_share_evenly_count_no_shard_twice(shards: int, learners: int, size: int) -> None:
    rng = np.random.default_rng(shards)
    x = {name: rng.normal(size=(shards, size)).astype(np.float32) for name in "ab"}
    topology = layout(learners)
    args = SimpleNamespace(layout=topology, num_shards=shards, seed=1)
    learner = Learner(
        lambda state, rollouts, keys, args: (State(total(rollouts), ()), {}),
        SimpleNamespace(args=args, lockstep=Lockstep(1, False, 1)),
    )
    own = {
        i: to_device({name: values[i] for name, values in x.items()}, topology.learner_of(i, shards))
        for i in range(shards)
    }
    collected = SimpleNamespace(rollouts=topology.stack(own, shards), version=1)
    state, _ = learner(State({}, ()), collected, 1)
    for name, values in x.items():
        assert np.asarray(state.params[name]).tobytes() == tree_sum(values).tobytes()


@pytest.mark.parametrize("learners", [1, 2, 3, 6])
def test_what_is_summed_together_is_sent_together(learners: int) -> None:
    """And where each learner holds the same power of two of shards, it sends only their sum."""
    mapped = jax.shard_map(total, mesh=layout(learners).mesh, in_specs=P(LEARNER), out_specs=P(), check_vma=False)
    x = {"a": np.ones((6, 3), np.float32), "b": np.ones((6, 2, 4), np.float32), "c": np.ones(6, np.float32)}
    messages = re.findall(r"(\w+)\[([\d,]+)\] = all_gather", str(jax.make_jaxpr(mapped)(x)))
    rows = {1: 0, 2: 6, 3: 3, 6: 6}[learners]  # of all learners: two with three shards each, three with a sum each
    assert messages == ([("f32", f"{rows},12")] if rows else [])


@pytest.mark.parametrize(("learners", "received"), [(2, [2 * LONG]), (4, [LONG, LONG]), (8, [LONG, LONG])])
def test_of_long_messages_a_learner_receives_less_than_two(learners: int, received: list[int]) -> None:
    """However many learners there are; what it sends to itself is counted here."""
    mapped = jax.shard_map(total, mesh=layout(learners).mesh, in_specs=P(LEARNER), out_specs=P(), check_vma=False)
    program = str(jax.make_jaxpr(mapped)(np.ones((8, LONG), np.float32)))
    shapes = re.findall(r"f32\[([\d,]+)\] = all_(?:gather|to_all)", program)
    assert [np.prod([int(n) for n in shape.split(",")]) for shape in shapes] == received


def test_the_mean_loss_gradient_has_the_same_bits_for_every_number_of_learners() -> None:
    x = some_trees(8)

    def gradient(x: Any) -> Any:
        return total(each_shard(jax.grad(lambda x: jnp.sum(jnp.tanh(x["a"] @ x["b"].T) ** 2)), x))

    results = [bits(over(count, gradient, x, out=P())) for count in (1, 2, 4, 8)]
    assert results[0] == results[1] == results[2] == results[3]


@pytest.mark.parametrize(("shards", "learners"), [(8, 1), (8, 3), (8, 8), (6, 4), (7, 5), (24, 8)])
def test_every_shard_has_one_learner_and_all_learners_equal_shapes(shards: int, learners: int) -> None:
    topology = layout(learners)
    shares = topology.shares(shards)
    assert shares.shape == (learners, -(-shards // learners))
    assert [shard for share in shares for shard in dict.fromkeys(share.tolist())] == list(range(shards))
    for shard in range(shards):
        [learner] = {int(row) for row in np.nonzero(shares == shard)[0]}
        assert topology.learner_of(shard, shards) == jax.local_devices()[learner]


def test_a_ppo_update_has_the_same_bits_for_every_number_of_learners() -> None:
    sizes = dict(env_id="CartPole-v1", num_envs=32, num_shards=8, num_steps=8, num_minibatches=2, update_epochs=2)
    args = [ppo.Args(**sizes, topology=str(layout(count))) for count in (1, 2, 4, 8)]  # type: ignore[arg-type]
    params = params_of(ppo, args[0])
    rollouts = random_rollouts(20, args[0], D=4, A=2)
    results = [learn(ppo, a, params, rollouts, updates=2) for a in args]
    assert bits(results[0][0].params) != bits(params)
    for state, metrics in results[1:]:
        assert bits(state) == bits(results[0][0])
        assert metrics == results[0][1]


def test_an_impala_update_has_the_same_bits_for_every_number_of_learners(tiny_impala: SimpleNamespace) -> None:
    # Four learners cannot share six shards evenly: two of them repeat one, which must not count twice.
    args = [tiny_impala.args(num_shards=6, num_envs=24, topology=str(layout(count))) for count in (1, 4)]
    params = TinyNetwork.params(np.random.default_rng(21))
    rollouts = random_rollouts(22, args[0])
    (one, metrics), (four, four_metrics) = (learn(tiny_impala.module, a, params, rollouts, updates=2) for a in args)
    assert bits(one.params) != bits(params)
    assert bits(one) == bits(four)
    assert metrics == four_metrics


def test_a_learner_with_one_shard_logs_the_same_losses() -> None:
    """Its loop over shards has one round; nothing of the gradient may be hoisted out and merged with what is around."""
    sizes = dict(env_id="CartPole-v1", num_envs=16, num_shards=4, num_steps=32, concurrency=False)
    runs = []
    for topology in ("a0-l0", "a0-l0,1,2,3"):
        args = ppo.Args(**sizes, topology=topology)  # type: ignore[arg-type]
        params = params_of(ppo, args)
        device = jax.local_devices()[0]
        collector = Collector(ppo.act, params, args, range(4), device, Role.ACT)
        rollouts = [jax.device_get(rollout) for rollout, *_ in collector.collect(params, 1)]
        collector.close()
        runs.append(learn(ppo, args, params, rollouts))
    (state, metrics), (other_state, other_metrics) = runs
    assert metrics == other_metrics
    assert bits(state) == bits(other_state)
