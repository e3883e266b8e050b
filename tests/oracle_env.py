"""Environments for tests, registered with Gymnasium on import: use them as `oracle_env:Oracle-v0`."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete

GAMMA = 0.9
POISON = 1000.0  # shown after a termination: whoever bootstraps from it is found out


class Oracle(gymnasium.Env):
    """Shows (exact remaining discounted return, step, is it over). Rewards do not depend on actions.

    Half of the episodes are cut: the observation after the cut still tells what would have followed.
    """

    def __init__(self, gamma: float = GAMMA, longest: int = 9):
        self.observation_space = Box(-np.inf, np.inf, (3,), np.float32)
        self.action_space = Discrete(2)
        self._gamma, self._longest = gamma, longest

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        length = int(self.np_random.integers(1, self._longest + 1))
        self._cut = bool(self.np_random.random() < 0.5)
        beyond = int(self.np_random.integers(1, 6)) if self._cut else 0
        self._rewards = self.np_random.uniform(-1, 1, length + beyond)
        self._length, self._t = length, 0
        return self._look(), {}

    def _look(self) -> np.ndarray:
        following = self._rewards[self._t :]
        remaining = float(np.sum(following * self._gamma ** np.arange(len(following))))
        over = self._t == len(self._rewards)
        return np.array([POISON if over else remaining, self._t, over], np.float32)

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward = float(self._rewards[self._t])
        self._t += 1
        at_end = self._t == self._length
        return self._look(), reward, at_end and not self._cut, at_end and self._cut, {}


class Raises(gymnasium.Env):
    """Raises at its step number `at`, counted over all episodes of five steps each."""

    def __init__(self, at: int = 7):
        self.observation_space, self.action_space = Box(-1, 1, (1,), np.float32), Discrete(2)
        self._at, self._steps = at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        if self._steps == self._at:
            raise ValueError("the pole fell off")
        return np.zeros(1, np.float32), 1.0, self._steps % 5 == 0, False, {}


class Noisy(gymnasium.Env):
    """Cannot be repeated: its noise does not come from its seed."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = Box(0, 1, (2,), np.float32), Discrete(2)
        self._noise = np.random.default_rng()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._steps = 0
        return self._noise.random(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._steps += 1
        return self._noise.random(2, np.float32), float(action), self._steps == 9, False, {}


class Parts(gymnasium.Env):
    """Shows a tree of arrays: how many steps it took, twice, and a square of ones."""

    observation_space = Dict({"steps": Dict({"b": Box(0, 9, (2,)), "a": Box(0, 9, ())}), "ones": Box(0, 1, (2, 2))})
    action_space = Discrete(2)

    def _obs(self) -> dict:
        count = np.float32(self._count)
        return {"ones": np.ones((2, 2), np.float32), "steps": {"a": np.array(-count), "b": np.array([count, 0])}}

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """No steps yet."""
        super().reset(seed=seed)
        self._count = 0
        return self._obs(), {}

    def step(self, action: int) -> tuple:
        """One more."""
        self._count += 1
        return self._obs(), 0.0, False, False, {}


gymnasium.register("Oracle-v0", "oracle_env:Oracle", disable_env_checker=True)
gymnasium.register("Raises-v0", "oracle_env:Raises", disable_env_checker=True)
gymnasium.register("Noisy-v0", "oracle_env:Noisy", disable_env_checker=True)
gymnasium.register("Parts-v0", "oracle_env:Parts", disable_env_checker=True)
