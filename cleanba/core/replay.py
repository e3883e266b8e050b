"""Replay memory: the last steps of each shard, on its learner, as a ring over time.

Row i of a ring holds an observation, the action and its consequence. What followed is the observation of row i + 1, so
none is stored twice, and of a stack of frames only the newest is stored. C rows are a whole number of rollouts, so each
is written in one piece; one row more holds what followed row C - 1.

Everything here copies or counts, nothing rounds: it needs no fence. So it works on all of a learner's shards at once,
and a memory is changed where it lies, never copied.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from cleanba.core.args import CoreArgs
from cleanba.core.rollout import Rollout

TRIES = 4  # draws for each transition; the first that is not a reset step counts


@dataclass(frozen=True)
class ReplayArgs(CoreArgs):
    """The arguments of every algorithm that replays. Steps are counted over all environments, resets among them."""

    buffer_size: int = 10_000
    """steps that are kept; it is cut to whole rollouts"""
    batch_size: int = 128
    """transitions of a gradient step"""
    learning_starts: int = 10_000
    """environment steps before the first gradient step"""
    train_frequency: int = 10
    """environment steps for each gradient step"""

    @property
    def rows(self) -> int:
        """C"""
        return self.buffer_size // self.steps_per_update * self.num_steps

    @property
    def gradient_steps(self) -> int:
        """Of an update."""
        return self.steps_per_update // self.train_frequency

    @property
    def frames(self) -> int:
        """Of the stack that an observation is; 1 where it is none, or kept whole."""
        return 1

    @property
    def replay_bytes(self) -> int:
        """Of all shards together."""
        one = jax.eval_shape(lambda: empty(self))
        return self.num_shards * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(one))

    @property
    def remark(self) -> str:
        """How large the memory is, and where."""
        return f"memory of {self.replay_bytes / 2**20:,.1f} MiB, in {self.num_shards} shards on their learners"

    def check(self) -> Self:
        """The sizes fit to each other, and the memory into the machine."""
        super().check()
        least = (1 + self.frames // self.num_steps) * self.steps_per_update
        self.check_that(
            self.buffer_size >= least,
            f"--buffer-size {self.buffer_size} must be at least {least}: whole rollouts of over {self.frames} steps",
        )
        self.check_that(self.batch_size > 0, "--batch-size must be at least 1")
        self.check_divides("num_shards", "batch_size", self.batch_size)
        self.check_divides("train_frequency", "--num-envs x --num-steps", self.steps_per_update)
        # In this process; twice, because a checkpoint copies it to host memory before it is written.
        self._check_fits(2 * self.replay_bytes // self.place.processes, _available_memory(), "half for checkpoints")
        return self

    def check_devices(self) -> None:
        """The memory fits onto each learner of this process, where devices have a memory of their own."""
        shards = self.layout.shares(self.num_shards).shape[1]
        for device in self.layout.mesh.local_devices:
            stats = device.memory_stats() or {}  # the CPU has none
            if "bytes_limit" in stats:
                there = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
                # Twice, because shards are put together.
                needed = 2 * self.replay_bytes * shards // self.num_shards
                self._check_fits(needed, there, f"half at the start only, on {device}")

    def _check_fits(self, needed: int, there: int, why: str) -> None:
        self.check_that(
            needed <= there,
            f"--buffer-size {self.buffer_size} needs {needed / 2**30:.1f} GiB of memory, {why}; "
            f"{there / 2**30:.1f} GiB are there; {int(self.buffer_size * there / needed * 0.9)} would do",
        )


def _available_memory() -> int:
    """Bytes that a process can have, of the machine and of its container; without Linux's word for it, any number."""
    there = 2**63
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        there = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
        there = min(there, limit - used)
    return there


class Replay(NamedTuple):
    """The memory of one shard; with a leading axis of shards, [S / L, ...], in an update."""

    obs: jax.Array  # [C + 1, B, ...]
    begins: jax.Array  # [C + 1, B] a stack of frames is filled up with this one
    action: jax.Array  # [C, B, ...]
    reward: jax.Array  # [C, B]
    terminated: jax.Array
    valid: jax.Array
    written: jax.Array  # [] rows, ever


class Transitions(NamedTuple):
    """Steps drawn from a memory, [S / L, N, ...]."""

    obs: jax.Array
    action: jax.Array
    reward: jax.Array
    terminated: jax.Array
    next_obs: jax.Array  # the true one, also where the episode ended
    weight: jax.Array  # 1; 0 where only reset steps were drawn


def empty(args: Any) -> Replay:
    """One shard's memory before the first rollout."""
    C, B, spec = args.rows, args.envs_per_shard, args.env_spec
    obs = spec.observation_space
    shape = obs.shape[1:] if args.frames > 1 else obs.shape
    zeros, flags = jnp.zeros, jnp.zeros((C, B), bool)
    return Replay(
        obs=zeros((C + 1, B, *shape), jax.dtypes.canonicalize_dtype(obs.dtype)),
        begins=zeros((C + 1, B), bool),
        action=zeros((C, B, *spec.action_space.shape), spec.action_types[0]),
        reward=zeros((C, B)),
        terminated=flags,
        valid=flags,
        written=zeros((), jnp.int32),
    )


def add(replay: Replay, rollouts: Rollout, args: Any) -> Replay:
    """Write the rollouts of all shards, over the oldest ones."""
    obs, begins = rollouts.obs, rollouts.first
    if args.frames > 1:  # a lost life is an end after which the stack goes on
        begins &= (obs[:, :, :, :-1] == obs[:, :, :, -1:]).all(axis=(3, 4, 5))
        obs = obs[:, :, :, -1]
    new = (obs, begins, rollouts.action, rollouts.reward, rollouts.terminated, rollouts.valid)
    at = replay.written[0] % args.rows
    put = jax.lax.dynamic_update_slice_in_dim
    # Before an episode's first observation there is a reset step, or environments were made anew: nothing followed.
    last = (at - 1) % args.rows
    cut = replay.valid[:, last] & ~rollouts.first[:, 0]
    replay = replay._replace(valid=replay.valid.at[:, last].set(cut))
    rings = [put(ring, rows.astype(ring.dtype), at, axis=1) for ring, rows in zip(replay[:-1], new, strict=True)]
    return Replay._make([*rings, replay.written + args.num_steps])


def step_keys(replay: Replay, keys: jax.Array, args: Any) -> jax.Array:
    """A key for each gradient step of an update and each shard, [G, S / L]."""
    return jax.vmap(lambda time: jax.vmap(lambda key: jax.random.fold_in(key, time))(keys))(_times(replay, args))


def gradient_steps(
    step: Callable[..., tuple], state: Any, replay: Replay, keys: jax.Array, args: Any, *others: Any
) -> tuple[Any, dict[str, Any]]:
    """`step(state, time, batch, *others)` for each gradient step of an update: at the number of environment steps that
    it belongs to, with a minibatch drawn by its `keys`, [G, S / L], and its own of `others`, [G, ...].

    None of them before learning starts, and then none of their metrics counts. The places of all minibatches are drawn
    at once, because random numbers cost the CPU by the call; their contents, which may be large, are taken one
    minibatch at a time.
    """
    learns = replay.written[0] * args.num_envs > args.learning_starts

    def one_step(state: Any, now: tuple) -> tuple[Any, dict]:
        time, places, others = now
        return step(state, time, take(replay, places, args), *others)

    def all_steps(state: Any) -> tuple[Any, dict]:
        places = jax.vmap(lambda keys: draw(replay, keys, args))(keys)
        return jax.lax.scan(one_step, state, (_times(replay, args), places, others))

    def none(state: Any) -> tuple[Any, dict]:
        return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(all_steps, state)[1])

    state, metrics = jax.lax.cond(learns, all_steps, none, state)
    return state, {name: (x[0], x[1] & learns) if isinstance(x, tuple) else (x, learns) for name, x in metrics.items()}


def _times(replay: Replay, args: Any) -> jax.Array:
    """The number of environment steps that each gradient step of an update belongs to, [G]."""
    before = replay.written[0] * args.num_envs - args.steps_per_update
    return before + args.train_frequency * jnp.arange(1, args.gradient_steps + 1)


def draw(replay: Replay, keys: jax.Array, args: Any) -> tuple[jax.Array, jax.Array]:
    """Rows and environments of a minibatch, [S / L, N], evenly from every shard: steps drawn with replacement, each as
    likely as any other."""
    C, written = args.rows, replay.written[0]
    N, B = args.batch_size // args.num_shards, args.envs_per_shard
    # What followed the newest row is written over the oldest one; below that, frames of a stack would be missing.
    kept = jnp.minimum(written, C - args.frames)

    def of_shard(key: jax.Array, valid: jax.Array) -> tuple[jax.Array, jax.Array]:
        age_key, env_key = jax.random.split(key)
        rows = (written - 1 - jax.random.randint(age_key, (TRIES, N), 0, kept)) % C
        envs = jax.random.randint(env_key, (TRIES, N), 0, B)
        chosen = jnp.argmax(valid[rows, envs], axis=0)[None]
        return jnp.take_along_axis(rows, chosen, axis=0)[0], jnp.take_along_axis(envs, chosen, axis=0)[0]

    return jax.vmap(of_shard)(keys, replay.valid)


def take(replay: Replay, places: tuple[jax.Array, jax.Array], args: Any) -> Transitions:
    """The steps at these rows and environments."""
    row, env = places
    action, reward, terminated, valid = (_at(ring, row, env) for ring in replay[2:-1])
    obs, next_obs = (_observed(replay, at, env, args) for at in (row, row + 1))
    return Transitions(obs, action, reward, terminated, next_obs, valid.astype(jnp.float32))


def _observed(replay: Replay, row: jax.Array, env: jax.Array, args: Any) -> jax.Array:
    """What was seen at these rows, [S / L, N, ...], with the frames before it where it is a stack."""
    if args.frames == 1:
        return _at(replay.obs, row, env)
    frames = [_at(replay.obs, row, env)]
    for _ in range(args.frames - 1):
        before = jnp.where(row > 0, row - 1, args.rows - 1)
        row = jnp.where(_at(replay.begins, row, env), row, before)
        frames.append(_at(replay.obs, row, env))
    return jnp.stack(frames[::-1], axis=2)


def _at(ring: jax.Array, row: jax.Array, env: jax.Array) -> jax.Array:
    return jax.vmap(lambda ring, row, env: ring[row, env])(ring, row, env)
