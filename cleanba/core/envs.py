"""Environments of several shards behind one small interface, by EnvPool or by Gymnasium; the Atari protocols.

An engine holds the shards of one actor thread, which take their steps together. `step` answers with NumPy arrays;
`xla_step`, where it is not None, does so inside a jitted call. Both reset on the step after an end (see rollout.py).
"""

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import envpool
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, flatten_space

from cleanba.core.rollout import Outcome
from cleanba.core.seeding import Role, env_seeds

warnings.filterwarnings("ignore", ".*precision lowered by casting")  # EnvPool's float64 bounds of float32 spaces

ATARI_PROTOCOLS: dict[str, dict[str, Any]] = {
    # Machado et al. 2018 (arXiv:1709.06009), as the original Cleanba sets it; fire on reset is EnvPool's default.
    "machado": dict(
        repeat_action_probability=0.25,
        full_action_space=True,
        episodic_life=False,
        noop_max=1,
        max_episode_steps=27_000,
        reward_clip=True,
    ),
    # The wrappers of Mnih et al. 2015 and of most results up to 2018.
    "classic": dict(
        repeat_action_probability=0.0,
        full_action_space=False,
        episodic_life=True,
        noop_max=30,
        max_episode_steps=27_000,
        reward_clip=True,
    ),
}


Show = Callable[[np.ndarray], None]  # is given frames, [height, width, 3] of uint8


class EnvError(Exception):
    """An environment that cannot be used, said in one line."""


class EnvSpec(NamedTuple):
    """What an environment shows and takes, and which engine runs it."""

    engine: str
    observation_space: Box
    action_space: gymnasium.Space
    can_fuse: bool  # step inside a jitted call

    @property
    def num_actions(self) -> int:
        """The number of discrete actions; an error where they are not discrete."""
        if not isinstance(self.action_space, Discrete):
            raise EnvError(f"this algorithm needs discrete actions, the environment has {self.action_space}")
        return int(self.action_space.n)

    @property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The lowest and highest continuous action; an error where they are not continuous."""
        if not isinstance(self.action_space, Box):
            raise EnvError(f"this algorithm needs continuous actions, the environment has {self.action_space}")
        return self.action_space.low.astype(np.float32), self.action_space.high.astype(np.float32)

    @property
    def action_types(self) -> tuple[type, type]:
        """Of an action as the engines get it, and the narrowest that it fits into."""
        if not isinstance(self.action_space, Discrete):
            return np.float32, np.float32
        return np.int32, np.uint8 if self.action_space.n <= 256 else np.int32


class Engine(Protocol):
    """Environments of s shards, each with B of them."""

    handle: Any
    xla_step: Callable[..., Any] | None

    def reset(self) -> np.ndarray:
        """The first observations, [s, B, ...]."""

    def step(self, action: np.ndarray) -> Outcome:
        """Act in all environments, [s, B, ...]."""

    def render(self) -> np.ndarray:
        """What one would see of the first environment, [height, width, 3]; it must have been made to be shown."""

    def close(self) -> None:
        """Release the environments."""


def make(args: Any, shards: Sequence[int], role: Role, since: int = 1, show: Show | None = None) -> Engine:
    """The environments of these shards from rollout `since` on, seeded by their global indices. `show` is given the
    frames of the first one's first episode."""
    num_envs = args.envs_per_shard
    indices = [shard * num_envs + i for shard in shards for i in range(num_envs)]
    seeds = env_seeds(args.seed, role, indices, since)
    is_shown = show is not None
    engine: Engine
    if args.env_spec.engine == "gymnasium":
        engine = GymnasiumEngine(args.env_id, num_envs, seeds, indices, is_shown)
    else:
        engine = EnvPoolEngine(args.env_id, args.atari_protocol, num_envs, seeds, args.env_threads, is_shown)
    return engine if show is None else Shown(engine, show, f"{args.env_spec.engine} cannot render {args.env_id}")


@functools.cache
def _envpool_ids() -> frozenset[str]:
    return frozenset(envpool.list_all_envs())


@functools.cache
def make_spec(env_id: str, engine: str, protocol: str) -> EnvSpec:
    """Look an environment up without keeping it; `auto` prefers EnvPool. Raises EnvError."""
    if engine == "auto":
        engine = "envpool" if env_id in _envpool_ids() else "gymnasium"
    if engine == "envpool" and env_id not in _envpool_ids():
        raise EnvError(f"EnvPool has no environment {env_id!r}; try --engine gymnasium, or one like {_alike(env_id)}")
    if engine == "envpool":
        spec = envpool.make_spec(env_id, **envpool_options(env_id, protocol))
        observation_space, action_space = spec.gymnasium_observation_space, spec.gymnasium_action_space
        can_fuse = _can_fuse(spec)
    else:
        try:
            env = gymnasium.make(env_id)
        except (gymnasium.error.Error, ImportError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise EnvError(f"no environment {env_id!r} ({reason}); EnvPool has {_alike(env_id)}") from error
        observation_space, action_space, can_fuse = env.observation_space, env.action_space, False
        env.close()
    if not _is_array(observation_space):
        raise EnvError(f"{env_id!r} shows {observation_space}; it must be an array (a Box space) or a Dict of such")
    if isinstance(observation_space, Dict):
        observation_space = flatten_space(observation_space)
    if not isinstance(action_space, Discrete | Box):
        raise EnvError(f"{env_id!r} takes {action_space}; an action must be Discrete or a Box")
    return EnvSpec(engine, observation_space, action_space, can_fuse)


def _is_array(space: gymnasium.Space) -> bool:
    """Whether it is one, or a tree of them, as DeepMind Control has it, which is laid out as one row."""
    return all(map(_is_array, space.values())) if isinstance(space, Dict) else isinstance(space, Box)


def _in_a_row(obs: Any, space: gymnasium.Space, join: Callable[..., Any]) -> Any:
    """Observations of a Dict space as `flatten_space` orders them, [B, ...] -> [B, numbers]; arrays as they are."""
    if not isinstance(space, Dict):
        return obs
    parts = [_in_a_row(obs[name], own, join) for name, own in space.items()]
    return join([part.reshape(len(part), -1) for part in parts], axis=-1)


def _can_fuse(spec: Any) -> bool:
    """EnvPool has no XLA functions on other systems, and none of 64 bits while JAX runs with 32."""
    arrays = (*spec.state_array_spec.values(), *spec.action_array_spec.values())
    dtypes = {np.dtype(array.dtype) for array in arrays}
    return sys.platform == "linux" and all(jax.dtypes.canonicalize_dtype(dtype) == dtype for dtype in dtypes)


def _alike(env_id: str) -> str:
    """Names of EnvPool's that look like this one."""
    known = [*get_close_matches(env_id, _envpool_ids(), 3, 0.6), "CartPole-v1", "Pong-v5"]
    return ", ".join(dict.fromkeys(known))


def envpool_options(env_id: str, protocol: str) -> dict[str, Any]:
    """What EnvPool is told besides the number of environments and their seeds."""
    is_atari = "repeat_action_probability" in envpool.make_spec(env_id).config._fields
    return ATARI_PROTOCOLS[protocol] if is_atari else {}


class EnvPoolEngine:
    """One EnvPool for all shards."""

    def __init__(
        self,
        env_id: str,
        protocol: str,
        num_envs: int,
        seeds: Sequence[int],
        num_threads: int,
        is_shown: bool = False,
    ):
        self._ids, self._shape = np.arange(len(seeds), dtype=np.int32), (-1, num_envs)
        options = envpool_options(env_id, protocol)
        self._lives = options.get("episodic_life", False)
        self._atari = bool(options)
        if is_shown:
            _load_egl(env_id)
        self._pool = envpool.make(
            env_id,
            env_type="gymnasium",
            num_envs=len(seeds),
            num_threads=min(num_threads, len(seeds)),
            seed=list(seeds),
            render_mode="rgb_array" if is_shown else None,
            **options,
        )
        self._space = self._pool.spec.gymnasium_observation_space
        self._action_dtype = np.dtype(self._pool.spec.action_array_spec["action"].dtype)
        self.xla_step = self._make_xla_step() if _can_fuse(self._pool.spec) else None

    def reset(self) -> np.ndarray:
        """The first observations."""
        obs, info = self._pool.reset()
        if not np.array_equal(info["env_id"], self._ids):
            raise RuntimeError(f"EnvPool answered in the order {info['env_id']}, not in the order it was asked")
        obs = _in_a_row(obs, self._space, np.concatenate)
        return _narrow(obs.reshape(*self._shape, *obs.shape[1:]))

    def step(self, action: np.ndarray) -> Outcome:
        """Act in all environments."""
        self._pool.send(action.reshape(-1, *action.shape[2:]).astype(self._action_dtype), self._ids)
        return jax.tree.map(_narrow, self._outcome(self._pool.recv(), np.concatenate))

    def _make_xla_step(self) -> Callable[..., Any]:
        handle, recv, send, _ = self._pool.xla()
        self.handle = jnp.asarray(handle)

        def xla_step(handle: jax.Array, action: jax.Array) -> tuple[jax.Array, Outcome]:
            action = action.reshape(-1, *action.shape[2:]).astype(self._action_dtype)
            handle, batch = recv(send(handle, action, self._ids))
            return handle, self._outcome(batch, jnp.concatenate)

        return xla_step

    def _outcome(self, batch: tuple, join: Callable[..., Any]) -> Outcome:
        obs, reward, terminated, truncated, info = batch
        obs = _in_a_row(obs, self._space, join)
        score = info["reward"] if self._atari else reward
        # With episodic life a lost life terminates; only `info` then tells whether the game itself is over.
        over = (info["terminated"].astype(bool) if self._lives else terminated) | truncated
        # In the order that they were asked in, however many threads EnvPool has: it waits for all (its `is_sync_`).
        answers = (obs, reward, terminated, truncated, score, over)
        return Outcome(*(x.reshape(*self._shape, *x.shape[1:]) for x in answers))

    def render(self) -> np.ndarray:
        """The first environment."""
        return np.asarray(self._pool.render(env_ids=[0]))[0]

    def close(self) -> None:
        """Release the environments."""
        self._pool.close()


def _load_egl(env_id: str) -> None:
    """MuJoCo looks for OpenGL among the functions that all libraries share, where EnvPool's own EGL is not, and ends
    the process if it finds none: so that EGL, which its environments have loaded, is shared."""
    if ".mujoco." not in type(envpool.make_spec(env_id)).__mro__[1].__module__:
        return
    own = sorted((Path(envpool.__file__).parent.parent / "envpool.libs").glob("libEGL-*"))
    try:
        ctypes.CDLL(str(own[0]) if own else "libEGL.so.1", mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise EnvError(f"envpool cannot render {env_id} without EGL: {error}") from error


class _Named(gymnasium.Wrapper):
    """Says which environment failed, and at which step: Gymnasium's vector environment does not."""

    def __init__(self, env: gymnasium.Env, index: int):
        super().__init__(env)
        self._index, self._steps = index, 0

    def step(self, action: Any) -> Any:
        """Step, and name the place of a failure."""
        self._steps += 1
        try:
            return super().step(action)
        except Exception as error:
            where = f"environment {self._index} of {self.spec.id if self.spec else self.env} at its step {self._steps}"
            raise RuntimeError(f"{where}: {type(error).__name__}: {error}") from error


class GymnasiumEngine:
    """Gymnasium's synchronous vector environment, one a shard."""

    handle: Any = None
    xla_step: Callable[..., Any] | None = None

    def __init__(
        self, env_id: str, num_envs: int, seeds: Sequence[int], indices: Sequence[int], is_shown: bool = False
    ):
        blocks = [slice(i, i + num_envs) for i in range(0, len(indices), num_envs)]
        how = _render_mode(env_id) if is_shown else {}
        makers = [lambda index=index: _Named(_make_in_a_row(env_id, **how), index) for index in indices]
        self._shards = [gymnasium.vector.SyncVectorEnv(makers[block]) for block in blocks]
        self._seeds: list[list[int | None]] = [list(seeds[block]) for block in blocks]

    def reset(self) -> np.ndarray:
        """The first observations."""
        pairs = zip(self._shards, self._seeds, strict=True)
        return np.stack([_narrow(envs.reset(seed=seeds)[0]) for envs, seeds in pairs])

    def step(self, action: np.ndarray) -> Outcome:
        """Act in all environments."""
        results = [envs.step(own)[:4] for envs, own in zip(self._shards, action, strict=True)]
        obs, reward, terminated, truncated = (np.stack(x) for x in zip(*results, strict=True))
        outcome = Outcome(obs, reward, terminated, truncated, score=reward, over=terminated | truncated)
        return jax.tree.map(_narrow, outcome)

    def render(self) -> np.ndarray:
        """The first environment."""
        return np.asarray(self._shards[0].envs[0].render())

    def close(self) -> None:
        """Release the environments."""
        for envs in self._shards:
            envs.close()


def _make_in_a_row(env_id: str, **how: Any) -> gymnasium.Env:
    env = gymnasium.make(env_id, **how)
    return gymnasium.wrappers.FlattenObservation(env) if isinstance(env.observation_space, Dict) else env


def _render_mode(env_id: str) -> dict[str, Any]:
    """What to make a Gymnasium environment with; one that cannot render would only warn. Pygame, with which many draw,
    shall neither greet nor look for a screen."""
    os.environ |= {"PYGAME_HIDE_SUPPORT_PROMPT": "1", "SDL_VIDEODRIVER": "dummy"}
    env = gymnasium.make(env_id)
    modes = env.metadata.get("render_modes", [])
    env.close()
    if "rgb_array" not in modes:
        raise EnvError(f"gymnasium cannot render {env_id}: its render modes are {modes}, without rgb_array")
    return {"render_mode": "rgb_array"}


class Shown:
    """An engine whose first environment is shown, frame by frame, until its first episode is over."""

    handle: Any = None
    xla_step: Callable[..., Any] | None = None

    def __init__(self, engine: Engine, show: Show, refusal: str):
        self._engine, self._show, self._refusal = engine, show, refusal
        self._is_over = False

    def reset(self) -> np.ndarray:
        """The first observations; EnvError if there is nothing to see."""
        obs = self._engine.reset()
        try:
            frame = self.render()
        except (RuntimeError, ImportError, gymnasium.error.Error) as error:
            raise EnvError(f"{self._refusal}: {' '.join(str(error).split())}") from error
        self._show(frame)
        return obs

    def step(self, action: np.ndarray) -> Outcome:
        """Act in all environments."""
        outcome = self._engine.step(action)
        if not self._is_over:
            self._show(self.render())
            self._is_over = bool(outcome.over[0, 0])
        return outcome

    def render(self) -> np.ndarray:
        """The first environment."""
        return self._engine.render()

    def close(self) -> None:
        """Release the environments."""
        self._engine.close()


def _narrow(x: np.ndarray) -> np.ndarray:
    """A copy in JAX's width: both engines may write their arrays again, and MuJoCo's observations have 64 bits."""
    return np.array(x, jax.dtypes.canonicalize_dtype(x.dtype))
