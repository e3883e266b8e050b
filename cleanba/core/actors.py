"""Actor threads: each steps its shards and hands their rollouts to the learner, in lockstep."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.core import envs
from cleanba.core.rollout import Acted, Cursor, EnvStep, Episodes, Rollout, Row, advance, assemble
from cleanba.core.seeding import Role, key
from cleanba.core.shards import fenced
from cleanba.core.topology import to_device


class Collected(NamedTuple):
    """Rollout n of all shards, as the learner gets it."""

    rollouts: Rollout  # [S, T, B, ...], spread over the learners
    version: int  # of the parameters that acted
    steps: int  # valid ones
    returns: list[float]  # of the episodes that ended, in order of shard, step and environment
    lengths: list[int]


class Collector:
    """Turns the environments of some shards into rollouts, fused or stepwise: the bits are the same."""

    def __init__(self, act: Callable[..., Acted], args: Any, shards: Sequence[int], device: jax.Device, role: Role):
        self._args, self._device, self._role = args, device, role
        self._shards = list(shards)
        self._act = fenced(partial(act, args=args))
        self._engine = envs.make(args, shards, role)
        wants_fused = args.collect == "fused" or (args.collect == "auto" and device.platform == "cpu")
        self.fused = wants_fused and self._engine.xla_step is not None
        cursors = [self._start(obs) for obs in self._engine.reset()]
        self._cursors = to_device(cursors, device) if self.fused else cursors
        self._act_at = jax.jit(lambda params, step, carry, k, t: self._act(params, step, carry, fold(k, t)))
        self._rollout: Callable[..., tuple] = jax.jit(self._fused_rollout) if self.fused else self._stepwise_rollout

    def _start(self, obs: np.ndarray) -> Cursor:
        B = len(obs)
        step = EnvStep(obs, np.zeros(B, np.float32), np.ones(B, bool))
        return Cursor(step, (), np.zeros(B, bool), np.zeros(B, np.float32), np.zeros(B, np.int32))

    def collect(self, params: Any, shard: int, n: int) -> tuple[Rollout, Episodes]:
        """Rollout n of one shard, on this collector's device (stepwise: in host memory)."""
        local = self._shards.index(shard)
        rollout_key = to_device(key(self._args.seed, self._role, shard, n), self._device)
        at = self._cursors[local], rollout_key, np.int32(local)
        self._cursors[local], rollout, episodes = self._rollout(params, *at)
        return rollout, episodes

    def _fused_rollout(self, params: Any, start: Cursor, rollout_key: jax.Array, local: jax.Array) -> tuple:
        xla_step = self._engine.xla_step
        assert xla_step is not None

        def step(carry: tuple, t: jax.Array) -> tuple[tuple, Row]:
            handle, cursor = carry
            acted = self._act(params, cursor.step, cursor.carry, fold(rollout_key, t))
            handle, outcome = xla_step(handle, local, acted.action)
            cursor, row = advance(cursor, acted, outcome)
            return (handle, cursor), row

        steps = jnp.arange(self._args.num_steps)
        (_, end), rows = jax.lax.scan(step, (self._engine.handle, start), steps)
        return end, *assemble(start, rows, end, jnp)

    def _stepwise_rollout(self, params: Any, start: Cursor, rollout_key: jax.Array, local: Any) -> tuple:
        cursor = start
        rows: list[Row] = []
        for t in range(self._args.num_steps):
            acted = self._act_at(params, cursor.step, cursor.carry, rollout_key, np.int32(t))
            acted = acted._replace(action=np.asarray(acted.action), extras=jax.tree.map(np.asarray, acted.extras))
            cursor, row = advance(cursor, acted, self._engine.step(local, acted.action))
            rows.append(row)
        stacked = jax.tree.map(lambda *x: np.stack(x), *rows)
        return cursor, *assemble(start, stacked, cursor, np)

    def close(self) -> None:
        """Release the environments."""
        self._engine.close()


def fold(k: jax.Array, t: Any) -> jax.Array:
    """The key of step t."""
    return jax.random.fold_in(k, t)


class Actors:
    """The actor threads of this process. Entering starts them; leaving ends them and closes their environments."""

    def __init__(self, act: Callable[..., Acted], run: Any):
        self._act, self._args, self._lockstep = act, run.args, run.lockstep
        self._topology = run.args.layout
        devices = [device for device in self._topology.actor_devices for _ in range(self._args.num_actor_threads)]
        blocks = np.array_split(np.arange(self._args.num_shards), len(devices))
        self._devices = devices
        self._threads = [
            threading.Thread(
                target=self._main, args=(i, device, block.tolist()), name=f"cleanba-actor-{i}", daemon=True
            )
            for i, (device, block) in enumerate(zip(devices, blocks, strict=True))
        ]

    def __enter__(self) -> "Actors":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._lockstep.stop()
        deadline = time.monotonic() + 2.0
        for thread in self._threads:
            thread.join(timeout=None if failure[0] is None else max(0.0, deadline - time.monotonic()))

    def _main(self, thread: int, device: jax.Device, shards: list[int]) -> None:
        collector: Collector | None = None

        def rollout(n: int, params: Any) -> dict[int, tuple[Rollout, Episodes]]:
            nonlocal collector
            collector = collector or Collector(self._act, self._args, shards, device, Role.ACT)
            return {shard: self._collect(collector, params, shard, n) for shard in shards}

        self._lockstep.actor(thread, rollout)
        if collector is not None:
            collector.close()

    def _collect(self, collector: Collector, params: Any, shard: int, n: int) -> tuple[Rollout, Episodes]:
        self._lockstep.check()
        try:
            rollout, episodes = collector.collect(params, shard, n)
            return to_device(rollout, self._topology.learner_of(shard, self._args.num_shards)), jax.device_get(episodes)
        except Exception as error:
            raise RuntimeError(f"actor failed in shard {shard}, rollout {n}: {error}") from error

    def publish(self, version: int, params: Any) -> None:
        """Hand the actors a new version of the parameters."""
        copies = {device: to_device(params, device) for device in set(self._devices)}
        self._lockstep.publish(version, [copies[device] for device in self._devices])

    def collect(self, n: int) -> Collected:
        """Wait for rollout n of every shard."""
        version, parts = self._lockstep.collect(n)
        shards = {shard: item for part in parts for shard, item in part.items()}
        rollouts, episodes = zip(*(shards[shard] for shard in sorted(shards)), strict=True)
        over = np.stack([e.over for e in episodes])  # [S, T, B]
        returns, lengths = (np.stack(x)[over] for x in zip(*((e.returns, e.lengths) for e in episodes), strict=True))
        steps = sum(int(np.asarray(rollout.valid).sum()) for rollout in rollouts)
        return Collected(self._topology.stack(rollouts), version, steps, returns.tolist(), lengths.tolist())
