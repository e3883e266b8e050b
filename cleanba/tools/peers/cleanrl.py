"""A file of CleanRL's on a workload, as published: unchanged, with EnvPool, Gym and SB3 of its time."""

import builtins
import json
import runpy
import sys
from typing import Any

import envpool
import gym
import numpy as np
from work import Meter


def as_gym(space: Any) -> gym.Space:
    """A space of Gymnasium's."""
    return gym.spaces.Discrete(space.n) if hasattr(space, "n") else gym.spaces.Box(space.low, space.high)


class EnvPoolEnv(gym.Env):
    """One environment of EnvPool, where Gym has none: its MuJoCo of that time does not install any more."""

    def __init__(self, env_id: str):
        self._envs = envpool.make(env_id, env_type="gymnasium", num_envs=1, seed=1)
        self.observation_space, self.action_space = map(as_gym, (self._envs.observation_space, self._envs.action_space))

    def seed(self, seed: int | None = None) -> None:
        """EnvPool's are seeded when they are made."""

    def reset(self, **_: Any) -> np.ndarray:
        """The first observation."""
        return self._envs.reset()[0][0]

    def step(self, action: np.ndarray) -> tuple:
        """Observation, reward, end, and whether the time was over."""
        obs, reward, terminated, truncated, _ = self._envs.step(np.asarray([action], self._envs.action_space.dtype))
        return obs[0], reward[0], terminated[0] or truncated[0], {"TimeLimit.truncated": truncated[0]}


work: dict[str, Any] = json.loads(sys.argv[1])
meter, show = Meter(work["steps"]), print


def listen(*words: Any) -> None:
    """In the place of print: CleanRL's files say "SPS:" after each update (or every 100 steps)."""
    if words[0] == "SPS:" and meter.updated(show):
        sys.exit()


np.float_ = np.float64  # a name that Gym uses and NumPy has dropped
if work["env_id"] not in gym.envs.registry.env_specs:
    gym.register(work["env_id"], entry_point=EnvPoolEnv, kwargs={"env_id": work["env_id"]})
sys.argv = [work["file"], *work["arguments"]]
builtins.print = listen
runpy.run_path(work["file"], run_name="__main__")
