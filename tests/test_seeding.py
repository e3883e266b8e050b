"""No two users of random numbers share a stream, and nobody's stream depends on how the work is spread."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cleanba.core.seeding import Role, env_seeds, key, permutation


def test_keys_are_distinct_over_roles_shards_rollouts_and_steps() -> None:
    """Also from the keys of the levels above: a shard's key is nobody's step key."""

    def keys(role: jax.Array, shard: jax.Array, rollout: jax.Array) -> jax.Array:
        own = key(3, role, shard, rollout)  # type: ignore[arg-type]
        steps = jax.vmap(lambda t: jax.random.fold_in(own, t))(jnp.arange(16))
        return jax.random.key_data(jnp.concatenate([own[None], steps]))

    names = jnp.array(list(itertools.product(map(int, Role), range(24), range(40))), jnp.uint32)
    low = np.asarray(jax.jit(jax.vmap(lambda n: keys(*n)))(names)).reshape(-1, 2)
    above = [key(3, role) for role in Role] + [key(3, role, shard) for role in Role for shard in range(24)]
    data = np.concatenate([low, np.stack([jax.random.key_data(k) for k in [jax.random.key(3), *above]])])
    assert len(data) == 4 * 24 * 40 * 17 + 4 * 24 + 4 + 1
    assert len(np.unique(data, axis=0)) == len(data)


def test_keys_of_other_seeds_are_others() -> None:
    data = [tuple(jax.random.key_data(key(seed, Role.ACT, 0, 1)).tolist()) for seed in (0, 1, 2, 2**31, 2**32 - 1)]
    assert len(set(data)) == len(data)


def test_a_key_is_the_same_inside_a_compiled_call() -> None:
    inside = jax.jit(lambda shard: jax.random.key_data(key(5, Role.LEARN, shard, 7)))(jnp.uint32(3))
    assert np.array_equal(inside, jax.random.key_data(key(5, Role.LEARN, 3, 7)))


@pytest.mark.parametrize("seed", [0, 1, 12345, 2**32 - 1])
def test_environment_seeds_are_distinct_and_fit(seed: int) -> None:
    seeds = env_seeds(seed, Role.ACT, range(10_000))
    assert len(set(seeds)) == 10_000
    assert all(type(s) is int and 0 <= s < 2**31 for s in seeds)  # EnvPool takes 32-bit signed integers


def test_environment_seeds_differ_between_roles_and_neighbouring_seeds() -> None:
    groups = [env_seeds(seed, role, range(64)) for seed in range(8) for role in (Role.ACT, Role.EVALUATE)]
    assert len(set(itertools.chain(*groups))) == 16 * 64


def test_renewed_environments_are_seeded_anew() -> None:
    groups = [env_seeds(7, Role.ACT, range(64), since) for since in (1, 2, 6, 11)]
    assert len(set(itertools.chain(*groups))) == 4 * 64


def test_environment_seeds_do_not_depend_on_the_grouping() -> None:
    together = env_seeds(7, Role.ACT, range(24))
    for size in (1, 3, 8):
        parts = [env_seeds(7, Role.ACT, range(i, i + size)) for i in range(0, 24, size)]
        assert list(itertools.chain(*parts)) == together
    assert env_seeds(7, Role.ACT, [5, 17]) == [together[5], together[17]]


# Around the sizes at which the random numbers take another part to sort by, and at which JAX takes another round.
@pytest.mark.parametrize("size", [1, 2, 3, 100, 1024, 1625, 1626, 65_536, 65_537])
def test_a_permutation_is_that_of_jax(size: int) -> None:
    keys = [key(seed, Role.LEARN, 2) for seed in range(3)]
    own, other = (np.stack([f(k, size) for k in keys]) for f in (permutation, jax.random.permutation))
    assert np.array_equal(own, other)
    assert own.dtype == other.dtype
