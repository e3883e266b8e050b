"""CartPolePositions-v0: CartPole that shows where things are and not how fast they move, so that memory is needed.

`ppo_atari_lstm.py --network mlp --observe 0 2` sees the same of CartPole-v1; this is for algorithms without memory.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box


class Positions(gymnasium.ObservationWrapper):
    """Of the cart and of the pole."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        whole = env.observation_space
        assert isinstance(whole, Box)
        self.observation_space = Box(whole.low[[0, 2]], whole.high[[0, 2]])

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Without velocities."""
        return observation[[0, 2]]


def make(**options: Any) -> gymnasium.Env:
    """The environment, with CartPole's own limit of 500 steps."""
    return Positions(gymnasium.make("CartPole-v1", **options))


gymnasium.register("CartPolePositions-v0", entry_point=make)
