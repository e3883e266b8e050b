"""Keys and environment seeds by name: what they are for decides them, never how often somebody asked before.
Also `permutation`, which is JAX's own, only faster.

Nothing here has a state, so there is nothing to save, and no two users can be handed the same stream.
"""

import math
from collections.abc import Sequence
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np


class Role(IntEnum):
    """What a stream of random numbers is for."""

    INIT = 0
    ACT = 1
    LEARN = 2
    EVALUATE = 3


def key(seed: int, role: Role, *names: int | jax.Array) -> jax.Array:
    """The key of (seed, role, names...), such as (seed, ACT, shard, rollout) with the step folded in later."""
    result = jax.random.key(seed)
    for name in (role, *names):
        result = jax.random.fold_in(result, name)
    return result


def permutation(key: jax.Array, size: int) -> jax.Array:
    """The numbers below `size` in the order of `jax.random.permutation(key, size)`, to the bit, but sooner.

    JAX sorts pairs of a random number and an index. XLA sorts pairs slowly on the CPU, single numbers six times as
    fast. So here the index stands in the low bits of what is sorted, below a part of the random number; sorted by
    its low part first, then by its high part, the whole is in order.
    """
    place, bits = jnp.arange(size, dtype=jnp.uint32), (size - 1).bit_length()
    order = place
    for _ in range(math.ceil(3 * math.log(max(1, size)) / math.log(2**32 - 1))):  # rounds, as JAX counts them
        key, own = jax.random.split(key)
        numbers, sorting = jax.random.bits(own, (size,), jnp.uint32), place
        for low in range(0, 32, 32 - bits):
            part = numbers[sorting] >> low << bits
            sorting = sorting[jnp.sort(part | place) & (1 << bits) - 1]
        order = order[sorting]
    return order.astype(jnp.int32)


def env_seeds(seed: int, role: Role, indices: Sequence[int], since: int = 1) -> list[int]:
    """One seed for each global environment index, all different: an odd multiplier permutes the 31-bit numbers.

    `since` is the rollout that the environments are made for: those that follow others are seeded anew.
    """
    names = [seed, role] if since == 1 else [seed, role, since]
    base = int(np.random.SeedSequence(names).generate_state(1)[0])
    return [(base + index * 0x9E3779B1) % 2**31 for index in indices]
