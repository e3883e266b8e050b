"""Keys and environment seeds by name: what they are for decides them, never how often somebody asked before.

Nothing here has a state, so there is nothing to save, and no two users can be handed the same stream.
"""

from collections.abc import Sequence
from enum import IntEnum

import jax
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


def env_seeds(seed: int, role: Role, indices: Sequence[int], since: int = 1) -> list[int]:
    """One seed for each global environment index, all different: an odd multiplier permutes the 31-bit numbers.

    `since` is the rollout that the environments are made for: those that follow others are seeded anew.
    """
    names = [seed, role] if since == 1 else [seed, role, since]
    base = int(np.random.SeedSequence(names).generate_state(1)[0])
    return [(base + index * 0x9E3779B1) % 2**31 for index in indices]
