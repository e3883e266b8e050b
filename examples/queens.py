"""Queens-v0: put queens on a board of 5 x 5, one after another, so that none attacks another.

Most squares are forbidden at any time, and the observation says which: its first row is 1 where an action is allowed.
Used by ppo_masked.py; docs/your-own-algorithm.md tells the story.
"""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

SIZE = 5
ROW, COLUMN = np.divmod(np.arange(SIZE * SIZE), SIZE)


class Queens(gymnasium.Env):
    """A reward of 1 for each queen. The episode ends when no square is free, or on a square that is not."""

    observation_space = Box(0, 1, (2, SIZE * SIZE), np.float32)
    action_space = Discrete(SIZE * SIZE)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        """One queen stands already, on any square."""
        super().reset(seed=seed)
        self._free = np.ones(SIZE * SIZE, bool)
        self._queens = np.zeros(SIZE * SIZE, bool)
        self._put(int(self.np_random.integers(SIZE * SIZE)))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Put a queen on this square."""
        if not self._free[action]:
            return self._observe(), 0.0, True, False, {}
        self._put(int(action))
        return self._observe(), 1.0, not self._free.any(), False, {}

    def _put(self, square: int) -> None:
        self._queens[square] = True
        row, column = ROW - ROW[square], COLUMN - COLUMN[square]
        self._free &= (row != 0) & (column != 0) & (abs(row) != abs(column))

    def _observe(self) -> np.ndarray:
        return np.stack([self._free, self._queens]).astype(np.float32)


gymnasium.register("Queens-v0", "queens:Queens")
