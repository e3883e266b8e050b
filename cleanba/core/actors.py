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
from cleanba.core.shards import each_shard
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

    All shards take a step together, since waking EnvPool's threads costs more than a step of a small environment; the
    policy acts on one shard after another, whose shapes do not depend on how many there are. The environments are made
    for rollout `since`; `params`, of whichever version, tell how large a recurrent policy's memory is. Where there is
    somebody to `show` frames to (see envs.make), the rollouts are stepwise.
    """

    def __init__(
        self,
        act: Callable[..., Acted],
        params: Any,
        args: Any,
        shards: Sequence[int],
        device: jax.Device,
        role: Role,
        since: int = 1,
        show: envs.Show | None = None,
    ):
        self._args, self._device, self._role, self.since, self._show = args, device, role, since, show
        self._shards = np.array(shards, np.uint32)
        self._act = partial(act, args=args)
        self._act_on_all = jax.jit(lambda params, cursor, n, t: self._act_on(params, cursor, self._keys(n, t)))
        self.open(params)

    def open(self, params: Any) -> None:
        """Make the environments: after `close`, the same ones anew. What is compiled for stepwise rollouts is kept;
        fused ones have the environments' address in them."""
        args, device = self._args, self._device
        self._engine = envs.make(args, self._shards.tolist(), self._role, self.since, self._show)
        wants_fused = args.collect == "fused" or (args.collect == "auto" and device.platform == "cpu")
        self.fused = wants_fused and self._engine.xla_step is not None
        self._cursor = self._place(self._start(params, self._engine.reset()))  # [s, B, ...]
        self._rollout: Callable[..., tuple] = jax.jit(self._fused_rollout) if self.fused else self._stepwise_rollout
        self._replay: Callable[..., Cursor] = jax.jit(self._fused_replay) if self.fused else self._stepwise_replay

    def _start(self, params: Any, obs: np.ndarray) -> Cursor:
        """The first observations. A policy that is given no memory answers with its first one."""
        shape = obs.shape[:2]
        step = EnvStep(obs, np.zeros(shape, np.float32), np.ones(shape, bool))
        start = Cursor(step, (), np.zeros(shape, bool), np.zeros(shape, np.float32), np.zeros(shape, np.int32))
        carry = jax.eval_shape(lambda: self._act_on(params, start, self._keys(0, 0))).carry
        return start._replace(carry=jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), carry))

    def _place(self, tree: Any) -> Any:
        return to_device(tree, self._device) if self.fused else tree

    def collect(self, params: Any, n: int) -> list[tuple[Rollout, Episodes, Cursor]]:
        """Rollout n of each shard and where it ends, on this collector's device (stepwise: in host memory)."""
        self._cursor, rollouts = self._rollout(params, self._cursor, np.uint32(n))
        return [(*each, end) for each, end in zip(rollouts, self._ends(), strict=True)]

    def replay(self, actions: np.ndarray) -> list[Cursor]:
        """Take the actions of an earlier rollout [s, T, B, ...] without asking the policy; where they lead."""
        self._cursor = self._replay(self._cursor, np.moveaxis(actions, 1, 0))
        return self._ends()

    def remember(self, carries: Sequence[dict[str, np.ndarray]]) -> None:
        """Give a recurrent policy the memory that it had here, shard by shard."""
        each = [like(end.carry, arrays) for end, arrays in zip(self._ends(), carries, strict=True)]
        self._cursor = self._cursor._replace(carry=self._place(jax.tree.map(lambda *x: np.stack(x), *each)))

    def _ends(self) -> list[Cursor]:
        return self._each(jax.device_get(self._cursor))

    def _each(self, tree: Any) -> list[Any]:
        """[s, ...] -> s trees, so that a shard's rollout is in one piece."""
        return [jax.tree.map(lambda x, i=i: x[i], tree) for i in range(len(self._shards))]

    def _keys(self, n: jax.Array | int, t: jax.Array | int) -> jax.Array:
        """Of each shard, [s]."""
        return jax.vmap(lambda shard: key(self._args.seed, self._role, shard, n, t))(self._shards)

    def _act_on(self, params: Any, cursor: Cursor, keys: jax.Array) -> Acted:
        return each_shard(partial(self._act, params), cursor.step, cursor.carry, keys)

    def _fused_rollout(self, params: Any, start: Cursor, n: jax.Array) -> tuple:
        xla_step = self._engine.xla_step
        assert xla_step is not None

        def step(carry: tuple, keys: jax.Array) -> tuple[tuple, Row]:
            handle, cursor = carry
            acted = self._act_on(params, cursor, keys)
            handle, outcome = xla_step(handle, acted.action)
            cursor, row = advance(cursor, acted, outcome)
            return (handle, cursor), row

        keys = jax.vmap(partial(self._keys, n))(jnp.arange(self._args.num_steps, dtype=jnp.uint32))
        (_, end), rows = jax.lax.scan(step, (self._engine.handle, start), keys)
        return end, self._assemble(start, rows, end, jnp)

    def _stepwise_rollout(self, params: Any, start: Cursor, n: np.uint32) -> tuple:
        cursor = start
        rows: list[Row] = []
        for t in range(self._args.num_steps):
            acted = self._act_on_all(params, cursor, n, np.uint32(t))
            acted = acted._replace(action=np.asarray(acted.action), extras=jax.tree.map(np.asarray, acted.extras))
            cursor, row = advance(cursor, acted, self._engine.step(acted.action))
            rows.append(row)
        return cursor, self._assemble(start, jax.tree.map(lambda *x: np.stack(x), *rows), cursor, np)

    def _assemble(self, start: Cursor, rows: Row, end: Cursor, numpy: Any) -> list[tuple[Rollout, Episodes]]:
        """Of rows [T, s, ...], a rollout for each shard."""
        own = self._each(jax.tree.map(lambda x: numpy.moveaxis(x, 1, 0), rows))
        return [assemble(*place, numpy) for place in zip(self._each(start), own, self._each(end), strict=True)]

    def _fused_replay(self, start: Cursor, actions: jax.Array) -> Cursor:
        xla_step = self._engine.xla_step
        assert xla_step is not None

        def step(carry: tuple, action: jax.Array) -> tuple[tuple, None]:
            handle, cursor = carry
            handle, outcome = xla_step(handle, action)
            return (handle, advance(cursor, Acted(action, cursor.carry), outcome)[0]), None

        return jax.lax.scan(step, (self._engine.handle, start), actions)[0][1]

    def _stepwise_replay(self, start: Cursor, actions: np.ndarray) -> Cursor:
        cursor = start
        for action in actions:
            cursor, _ = advance(cursor, Acted(action, cursor.carry), self._engine.step(action))
        return cursor

    def close(self) -> None:
        """Release the environments."""
        self._engine.close()


class Actors:
    """The actor threads of this process. Entering starts them; leaving ends them and closes their environments."""

    def __init__(self, act: Callable[..., Acted], run: Any):
        self._act, self._run, self._args, self._lockstep = act, run, run.args, run.lockstep
        run.act = act
        self._topology = run.args.layout
        self.devices = [device for device in self._topology.actor_devices for _ in range(self._args.num_actor_threads)]
        shards = self._topology.shards_of(run.place.process, self._args.num_shards)
        self.blocks = [block.tolist() for block in np.array_split(shards, len(self.devices))]  # of each thread
        self._threads = [
            threading.Thread(target=self._main, args=(i, device, block), name=f"cleanba-actor-{i}", daemon=True)
            for i, (device, block) in enumerate(zip(self.devices, self.blocks, strict=True))
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
                collector = Collector(self._act, params, self._args, shards, device, Role.ACT, since)
                if since < n:
                    self._replay(collector, shards, n - 1)
            return self._collect(collector, params, shards, n)

        self._lockstep.actor(thread, rollout)
        if collector is not None:
            collector.close()

    def _replay(self, collector: Collector, shards: list[int], last: int) -> None:
        """Bring new environments to where rollout `last` had ended."""
        logs = [self._run.checkpoints.actions.read(shard, collector.since, last) for shard in shards]
        for n, log in enumerate(zip(*logs, strict=True), start=collector.since):
            self._lockstep.check()
            ends = collector.replay(np.stack([actions for actions, _ in log]))
            for shard, end, (_, reached) in zip(shards, ends, log, strict=True):
                if digest(end._replace(carry=())) != reached:
                    raise ReplayError(
                        f"{self._args.env_id} is not deterministic: given the same seeds and actions, shard {shard} "
                        f"saw something else in rollout {n} than before. --resume-envs fresh goes on with new ones"
                    )
            self._run.replayed(n)
        if any(self._run.carries.values()):
            collector.remember([self._run.carries[shard] for shard in shards])

    def _collect(
        self, collector: Collector, params: Any, shards: list[int], n: int
    ) -> dict[int, tuple[Rollout, Episodes, Mark]]:
        try:
            collected = dict(zip(shards, collector.collect(params, n), strict=True))
            return {shard: self._hand_to_learner(shard, *own) for shard, own in collected.items()}
        except Exception as error:
            where = f"shards {shards[0]} to {shards[-1]}" if len(shards) > 1 else f"shard {shards[0]}"
            raise RuntimeError(f"actor failed in {where}, rollout {n}: {error}") from error

    def _hand_to_learner(
        self, shard: int, rollout: Rollout, episodes: Episodes, end: Cursor
    ) -> tuple[Rollout, Episodes, Mark]:
        learner = self._topology.learner_of(shard, self._args.num_shards)
        return to_device(rollout, learner), jax.device_get(episodes), mark(rollout.action, end)

    def publish(self, version: int, params: Any) -> None:
        """Hand the actors a new version of the parameters. A resumed run first hands out the version that the rollout
        under way used."""
        if self._is_first and self._run.acting is not None:
            self._hand_over(version - 1, self._topology.replicate(self._run.acting))
        self._is_first = False
        self._hand_over(version, params)

    def _hand_over(self, version: int, params: Any) -> None:
        with self._lockstep.clock("transfer"):
            copies = {device: to_device(self._topology.local(params), device) for device in set(self.devices)}
        self._lockstep.publish(version, [copies[device] for device in self.devices])

    def collect(self, n: int) -> Collected:
        """Wait for rollout n of every shard."""
        version, parts = self._lockstep.collect(n)
        shards = {shard: item for part in parts for shard, item in part.items()}
        rollouts, episodes, marks = ({shard: item[i] for shard, item in sorted(shards.items())} for i in range(3))
        stacked = Episodes(*(np.stack(x) for x in zip(*episodes.values(), strict=True)))  # [S of this process, T, B]
        steps = np.array([np.asarray(rollout.valid).sum() for rollout in rollouts.values()])
        votes, (stacked, steps) = self._share(self._run.vote(), (stacked, steps))
        returns, lengths = (x[stacked.over].tolist() for x in (stacked.returns, stacked.lengths))
        with self._lockstep.clock("transfer"):
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
