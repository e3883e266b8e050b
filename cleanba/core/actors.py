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
from cleanba.core.checkpoint import Mark, digest, like, mark
from cleanba.core.rollout import Acted, Cursor, EnvStep, Episodes, Rollout, Row, advance, assemble
from cleanba.core.seeding import Role, key
from cleanba.core.shards import fenced
from cleanba.core.topology import to_device


class Collected(NamedTuple):
    """Rollout n, as the learner gets it. All but `marks` is of all shards, in whichever process they are."""

    rollouts: Rollout  # [S, T, B, ...], spread over the learners
    version: int  # of the parameters that acted
    steps: int  # valid ones
    returns: list[float]  # of the episodes that ended, in order of shard, step and environment
    lengths: list[int]
    marks: dict[int, Mark]  # where the shards of this process ended
    votes: np.ndarray  # [processes, ...] what each process wants the run to know


class ReplayError(RuntimeError):
    """Environments that did not arrive where the same actions had led before."""


class Collector:
    """Turns the environments of some shards into rollouts, fused or stepwise: the bits are the same.

    The environments are made for rollout `since`.
    """

    def __init__(
        self,
        act: Callable[..., Acted],
        args: Any,
        shards: Sequence[int],
        device: jax.Device,
        role: Role,
        since: int = 1,
    ):
        self._args, self._device, self._role, self.since = args, device, role, since
        self._shards = list(shards)
        self._act = fenced(partial(act, args=args))
        self._engine = envs.make(args, shards, role, since)
        wants_fused = args.collect == "fused" or (args.collect == "auto" and device.platform == "cpu")
        self.fused = wants_fused and self._engine.xla_step is not None
        cursors = [self._start(obs) for obs in self._engine.reset()]
        self._cursors = to_device(cursors, device) if self.fused else cursors
        self._act_at = jax.jit(lambda params, step, carry, k, t: self._act(params, step, carry, fold(k, t)))
        self._rollout: Callable[..., tuple] = jax.jit(self._fused_rollout) if self.fused else self._stepwise_rollout
        self._replay: Callable[..., Cursor] = jax.jit(self._fused_replay) if self.fused else self._stepwise_replay

    def _start(self, obs: np.ndarray) -> Cursor:
        B = len(obs)
        step = EnvStep(obs, np.zeros(B, np.float32), np.ones(B, bool))
        return Cursor(step, (), np.zeros(B, bool), np.zeros(B, np.float32), np.zeros(B, np.int32))

    def collect(self, params: Any, shard: int, n: int) -> tuple[Rollout, Episodes, Cursor]:
        """Rollout n of one shard and where it ends, on this collector's device (stepwise: in host memory)."""
        local = self._shards.index(shard)
        rollout_key = to_device(key(self._args.seed, self._role, shard, n), self._device)
        at = self._cursors[local], rollout_key, np.int32(local)
        self._cursors[local], rollout, episodes = self._rollout(params, *at)
        return rollout, episodes, self._cursors[local]

    def replay(self, shard: int, actions: np.ndarray) -> Cursor:
        """Take the actions of an earlier rollout [T, B, ...] without asking the policy; where they lead."""
        local = self._shards.index(shard)
        self._cursors[local] = self._replay(self._cursors[local], actions, np.int32(local))
        return self._cursors[local]

    def remember(self, shard: int, arrays: dict[str, np.ndarray]) -> None:
        """Give a recurrent policy the memory that it had here."""
        local = self._shards.index(shard)
        cursor = self._cursors[local]
        carry = like(cursor.carry, arrays)
        self._cursors[local] = cursor._replace(carry=to_device(carry, self._device) if self.fused else carry)

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

    def _fused_replay(self, start: Cursor, actions: jax.Array, local: jax.Array) -> Cursor:
        xla_step = self._engine.xla_step
        assert xla_step is not None

        def step(carry: tuple, action: jax.Array) -> tuple[tuple, None]:
            handle, cursor = carry
            handle, outcome = xla_step(handle, local, action)
            return (handle, advance(cursor, Acted(action, cursor.carry), outcome)[0]), None

        return jax.lax.scan(step, (self._engine.handle, start), actions)[0][1]

    def _stepwise_replay(self, start: Cursor, actions: np.ndarray, local: Any) -> Cursor:
        cursor = start
        for action in actions:
            cursor, _ = advance(cursor, Acted(action, cursor.carry), self._engine.step(local, action))
        return cursor

    def close(self) -> None:
        """Release the environments."""
        self._engine.close()


def fold(k: jax.Array, t: Any) -> jax.Array:
    """The key of step t."""
    return jax.random.fold_in(k, t)


class Actors:
    """The actor threads of this process. Entering starts them; leaving ends them and closes their environments."""

    def __init__(self, act: Callable[..., Acted], run: Any):
        self._act, self._run, self._args, self._lockstep = act, run, run.args, run.lockstep
        self._topology = run.args.layout
        self._devices = [device for device in self._topology.actor_devices for _ in range(self._args.num_actor_threads)]
        blocks = np.array_split(self._topology.shards_of(run.place.process, self._args.num_shards), len(self._devices))
        self._threads = [
            threading.Thread(
                target=self._main, args=(i, device, block.tolist()), name=f"cleanba-actor-{i}", daemon=True
            )
            for i, (device, block) in enumerate(zip(self._devices, blocks, strict=True))
        ]
        self._is_first = True

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

        def rollout(n: int, params: Any) -> dict[int, tuple[Rollout, Episodes, Mark]]:
            nonlocal collector
            since = self._run.envs_since(n)
            if collector is None or collector.since != since:
                if collector is not None:
                    collector.close()
                collector = Collector(self._act, self._args, shards, device, Role.ACT, since)
                for shard in shards if since < n else ():
                    self._replay(collector, shard, n - 1)
            return {shard: self._collect(collector, params, shard, n) for shard in shards}

        self._lockstep.actor(thread, rollout)
        if collector is not None:
            collector.close()

    def _replay(self, collector: Collector, shard: int, last: int) -> None:
        """Bring a shard's new environments to where rollout `last` had ended."""
        log = self._run.checkpoints.actions.read(shard, collector.since, last)
        for n, (actions, reached) in enumerate(log, start=collector.since):
            self._lockstep.check()
            end = collector.replay(shard, actions)
            if digest(end._replace(carry=())) != reached:
                raise ReplayError(
                    f"{self._args.env_id} is not deterministic: given the same seeds and actions, shard {shard} saw "
                    f"something else in rollout {n} than before. --resume-envs fresh goes on with new environments"
                )
            self._run.replayed(shard, n)
        if shard in self._run.carries:
            collector.remember(shard, self._run.carries[shard])

    def _collect(self, collector: Collector, params: Any, shard: int, n: int) -> tuple[Rollout, Episodes, Mark]:
        self._lockstep.check()
        try:
            rollout, episodes, end = collector.collect(params, shard, n)
            learner = self._topology.learner_of(shard, self._args.num_shards)
            return to_device(rollout, learner), jax.device_get(episodes), mark(rollout.action, end)
        except Exception as error:
            raise RuntimeError(f"actor failed in shard {shard}, rollout {n}: {error}") from error

    def publish(self, version: int, params: Any) -> None:
        """Hand the actors a new version of the parameters. A resumed run first hands out the version that the rollout
        under way used."""
        if self._is_first and self._run.acting is not None:
            self._hand_over(version - 1, self._topology.replicate(self._run.acting))
        self._is_first = False
        self._hand_over(version, params)

    def _hand_over(self, version: int, params: Any) -> None:
        copies = {device: to_device(self._topology.local(params), device) for device in set(self._devices)}
        self._lockstep.publish(version, [copies[device] for device in self._devices])

    def collect(self, n: int) -> Collected:
        """Wait for rollout n of every shard."""
        version, parts = self._lockstep.collect(n)
        shards = {shard: item for part in parts for shard, item in part.items()}
        rollouts, episodes, marks = ({shard: item[i] for shard, item in sorted(shards.items())} for i in range(3))
        stacked = Episodes(*(np.stack(x) for x in zip(*episodes.values(), strict=True)))  # [S of this process, T, B]
        steps = np.array([np.asarray(rollout.valid).sum() for rollout in rollouts.values()])
        votes, (stacked, steps) = self._share(self._run.vote(), (stacked, steps))
        returns, lengths = (x[stacked.over].tolist() for x in (stacked.returns, stacked.lengths))
        together = self._topology.stack(rollouts, self._args.num_shards)
        return Collected(together, version, int(steps.sum()), returns, lengths, marks, votes)

    def _share(self, vote: np.ndarray, own: Any) -> tuple[np.ndarray, Any]:
        """Every process's vote [processes, ...], and what is known of its shards as if they all were here [S, ...]."""
        if self._topology.processes == 1:
            return vote[None], own
        S = self._args.num_shards
        counts = [len(self._topology.shards_of(p, S)) for p in range(self._topology.processes)]
        padded = jax.tree.map(lambda x: np.concatenate([x, np.repeat(x[:1], max(counts) - len(x), axis=0)]), own)
        votes, everyone = self._lockstep.call(lambda: self._topology.gather((vote, padded)))
        parts = jax.tree.map(lambda x: np.concatenate([x[p, :count] for p, count in enumerate(counts)]), everyone)
        return votes, parts
