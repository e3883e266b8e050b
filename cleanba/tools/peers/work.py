"""What the peers share: the environments and the measuring. Runs in their environment, without Cleanba."""

import time
from collections.abc import Callable
from typing import Any

import envpool
import numpy as np

WARM_UP = 2  # updates that are not timed: programs are compiled in them
SECONDS = 5.0  # at least, of whole updates, are timed


def make_envs(work: dict[str, Any]) -> Any:
    """The workload's environments, by EnvPool."""
    return envpool.make(work["env_id"], env_type="gymnasium", num_envs=work["num_envs"], seed=1, **work["env_options"])


class Meter:
    """Called after each update: prints the steps per second of the timed ones and tells when they are done."""

    def __init__(self, steps: int):
        self._steps, self._times = steps, list[float]()

    def updated(self, show: Callable[[float], None] = print) -> bool:
        """Whether that was the last one."""
        self._times.append(time.perf_counter())
        timed = len(self._times) - WARM_UP
        if timed < 1 or self._times[-1] - self._times[WARM_UP - 1] < SECONDS:
            return False
        show(timed * self._steps / (self._times[-1] - self._times[WARM_UP - 1]))
        return True


def make_vec_env(work: dict[str, Any]) -> Any:
    """The same environments as Stable-Baselines3 wants them: reset in the step that ends an episode."""
    from stable_baselines3.common.vec_env import VecEnv

    class EnvPoolVecEnv(VecEnv):
        def __init__(self) -> None:
            self._envs = make_envs(work)
            super().__init__(work["num_envs"], self._envs.observation_space, self._envs.action_space)

        def reset(self) -> np.ndarray:
            return self._envs.reset()[0]

        def step_async(self, actions: np.ndarray) -> None:
            self._actions = actions

        def step_wait(self) -> tuple:
            obs, reward, terminated, truncated, _ = self._envs.step(self._actions.astype(np.int32))
            done = terminated | truncated
            infos: list[dict[str, Any]] = [{} for _ in done]
            for i in np.nonzero(done)[0]:
                infos[i] = {"terminal_observation": obs[i].copy(), "TimeLimit.truncated": not terminated[i]}
            if done.any():
                obs[done] = self._envs.reset(np.nonzero(done)[0].astype(np.int32))[0]
            return obs, reward, done, infos

        def close(self) -> None:
            self._envs.close()

        def get_attr(self, name: str, indices: Any = None) -> list:
            return [None] * self.num_envs

        def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
            raise NotImplementedError

        def env_method(self, name: str, *args: Any, **options: Any) -> list:
            raise NotImplementedError

        def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list[bool]:
            return [False] * self.num_envs

    return EnvPoolVecEnv()


def options(work: dict[str, Any]) -> dict[str, Any]:
    """The workload in the words of Stable-Baselines3 and SBX."""
    return dict(
        n_steps=work["num_steps"],
        batch_size=work["num_envs"] * work["num_steps"] // work["num_minibatches"],
        n_epochs=work["update_epochs"],
        learning_rate=work["learning_rate"],
        gamma=work["gamma"],
        gae_lambda=work["gae_lambda"],
        clip_range=work["clip_coef"],
        ent_coef=work["ent_coef"],
        vf_coef=work["vf_coef"],
        max_grad_norm=work["max_grad_norm"],
    )


def learn(ppo: Any, work: dict[str, Any]) -> None:
    """Train a PPO of Stable-Baselines3 or SBX for as long as it is measured."""
    from stable_baselines3.common.callbacks import BaseCallback

    class Measured(BaseCallback):
        def __init__(self) -> None:
            super().__init__()
            self._meter, self._begun, self._goes_on = Meter(work["steps"]), False, True

        def _on_rollout_start(self) -> None:
            if self._begun and self._meter.updated():
                self._goes_on = False
            self._begun = True

        def _on_step(self) -> bool:
            return self._goes_on

    envs = make_vec_env(work)
    frames = len(envs.observation_space.shape) == 3
    model = ppo("CnnPolicy" if frames else "MlpPolicy", envs, **options(work))
    model.learn(10**9, callback=Measured())
