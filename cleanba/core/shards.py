"""Computing over shards so that the result cannot tell how many learners there are.

An `update` runs once on every learner, on that learner's S / L shards. `each_shard` computes shard by shard at one
fixed shape; `total` sums over all shards of all learners along one fixed tree. Nothing else may cross shards.
"""

import math
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P

from cleanba.core.seeding import Role, key
from cleanba.core.topology import LEARNER, Topology, to_device

NEVER_REACHED = 1 << 20  # rounds of a loop that has one or two
LONG = 1 << 16  # numbers of a message that is worth a second one

# While an update is traced: the places of the shards among all learners' places, or None where nothing is repeated.
_once: ContextVar[np.ndarray | None] = ContextVar("once", default=None)


class State(NamedTuple):
    """What an update carries on. All but `memory` is the same on every learner."""

    params: Any  # published to the actors
    opt_state: Any
    memory: Any = ()  # of each shard, on its learner: [S / L, ...]; `init` makes one shard's


def each_shard(function: Callable[..., Any], *trees: Any, axes: int = 1) -> Any:
    """`function` of each shard's slice of `trees`, [S / L, ...], one after another; of each slice along several `axes`,
    if there are more."""
    lead = jax.tree.leaves(trees)[0].shape[:axes]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[axes:]), trees)
    results = jax.lax.map(lambda slices: fenced(function)(*slices), flat)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), results)


def fenced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, compiled by itself: what stands around it cannot change its rounding.

    It is the body of a loop whose number of rounds, one, the compiler cannot see, and whose arguments seem to change in
    each round. So it is neither inlined nor hoisted out of the loop, and nothing is merged across its border.
    Otherwise a learner with one shard, whose loop over shards is inlined, would round otherwise than one with several.
    (`optimization_barrier` does not help: XLA's CPU compiler drops it before it merges.) A NaN or a zero key in the
    first place adds a round, which computes the same.
    """

    def inside(*args: Any) -> Any:
        args = jax.tree.map(jnp.asarray, args)
        results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))

        def one_round(i: jax.Array, _: Any) -> Any:
            def seemingly_changed(x: jax.Array) -> jax.Array:
                is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
                return x if is_key else jnp.where(i < NEVER_REACHED, x, jnp.zeros_like(x))

            return function(*jax.tree.map(seemingly_changed, args))

        return jax.lax.fori_loop(0, 1 + _unseen_zero(args), one_round, results)

    return inside


def _unseen_zero(trees: Any) -> jax.Array:
    """Zero, all but surely, by a computation that the compiler cannot foresee."""
    leaves = sorted(jax.tree.leaves(trees), key=lambda x: not jnp.issubdtype(x.dtype, jnp.floating))
    leaf = jax.random.key_data(leaves[0]) if jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key) else leaves[0]
    value = leaf.ravel()[0]
    return (value != value if jnp.issubdtype(leaf.dtype, jnp.floating) else value == 0).astype(jnp.int32)


def accumulate(function: Callable[..., Any], tree: Any) -> Any:
    """The sum of `function` over the slices of a leading axis, with the memory of one slice at a time."""
    first, rest = jax.tree.map(lambda x: x[0], tree), jax.tree.map(lambda x: x[1:], tree)
    add = partial(jax.tree.map, jnp.add)
    return jax.lax.scan(lambda so_far, part: (add(so_far, function(part)), None), function(first), rest)[0]


def total(tree: Any) -> Any:
    """The sum over all shards, [S / L, ...] -> [...], on every learner.

    The tree adds neighbours, then neighbouring sums, and so on. Where every learner holds the same power of two of
    shards, it sums its own subtree before it sends it; the additions are the same ones. All of it is sent in one
    message, because between processes a message costs more than its content. A long one among more than two learners
    goes out in two: each learner sums one piece of it and hands that on. Then a learner receives less than twice as
    much as it holds, instead of all that the others hold.
    """
    once, num_learners = _once.get(), jax.lax.axis_size(LEARNER)
    count = jax.tree.leaves(tree)[0].shape[0]
    if once is None and (num_learners == 1 or count & (count - 1) == 0):
        tree = jax.tree.map(lambda x: fenced(_tree_sum)(x)[None], tree)
    one = jax.tree.map(lambda x: x[0], tree)
    if num_learners == 1:
        return one
    flat, unravel = ravel_pytree(one)
    rows = jax.vmap(lambda one: ravel_pytree(one)[0])(tree)

    def summed(rows: jax.Array) -> jax.Array:
        return _tree_sum(rows if once is None else rows[once])

    # The last fence hides from what uses the sums that they came together.
    if num_learners == 2 or flat.size < LONG:
        return fenced(lambda rows: unravel(summed(rows)))(jax.lax.all_gather(rows, LEARNER, tiled=True))
    even = jnp.pad(rows, ((0, 0), (0, -flat.size % num_learners)))
    piece = fenced(summed)(jax.lax.all_to_all(even, LEARNER, split_axis=1, concat_axis=0, tiled=True))
    return fenced(lambda sums: unravel(sums[: flat.size]))(jax.lax.all_gather(piece, LEARNER, tiled=True))


def _tree_sum(x: jax.Array) -> jax.Array:
    while x.shape[0] > 1:
        pairs, rest = x[: x.shape[0] // 2 * 2], x[x.shape[0] // 2 * 2 :]
        x = jnp.concatenate([pairs[::2] + pairs[1::2], rest])
    return x[0]


class Learner:
    """An algorithm's `update`, compiled for the learners of the run's topology."""

    def __init__(self, update: Callable[..., tuple[State, dict]], run: Any):
        self._run, self._args, self._lockstep = run, run.args, run.lockstep
        self._topology: Topology = run.args.layout
        self._shares = self._topology.shares(self._args.num_shards).ravel()
        self._places = self._topology.spread(self._shares)
        inputs, outputs = (P(), P(LEARNER), P(LEARNER), P(LEARNER), P()), (P(), P(LEARNER), P(), P())
        specs: dict[str, Any] = dict(in_specs=inputs, out_specs=outputs, check_vma=False)
        step = jax.shard_map(partial(self._step, update), mesh=self._topology.mesh, **specs)
        self._update = jax.jit(step, donate_argnums=1)  # a memory is changed where it is

    def init(self, init: Callable[..., State]) -> State:
        """The first state, or that of the run's last checkpoint, on all learners."""
        first = jax.jit(partial(init, args=self._args))(key(self._args.seed, Role.INIT))
        state, memories = self._run.restored(first)
        own = self._topology.shards_of(self._run.place.process, self._args.num_shards)
        learners = {shard: self._topology.learner_of(shard, self._args.num_shards) for shard in own}
        placed = {shard: to_device(memories.get(shard, first.memory), device) for shard, device in learners.items()}
        memory = self._topology.stack(placed, self._args.num_shards)
        return self._topology.replicate(state._replace(memory=()))._replace(memory=memory)

    def _step(
        self, update: Callable, state: State, memory: Any, rollouts: Any, shards: jax.Array, n: jax.Array
    ) -> tuple:
        keys = jax.vmap(lambda shard: key(self._args.seed, Role.LEARN, shard, n))(shards)
        places = np.unique(self._shares, return_index=True)[1]
        before = _once.set(places if len(places) < self._shares.size else None)
        try:
            state, metrics = update(state._replace(memory=memory), rollouts, keys, self._args)
        finally:
            _once.reset(before)
        finite = jnp.array([jnp.isfinite(x).all() for x in jax.tree.leaves(state.params)]).all()
        return state._replace(memory=()), state.memory, metrics, finite

    def __call__(self, state: State, collected: Any, n: int) -> tuple[State, dict[str, float]]:
        """Update n. Raises FloatingPointError rather than return parameters that are not finite."""
        if collected.version != self._lockstep.version_for(n):
            raise AssertionError(f"update {n} was given a rollout of version {collected.version}")
        before = state
        if jax.tree.leaves(state.memory):
            self._run.hold_signals()  # broken off, there would be neither the old memory nor the new one
        rest = state._replace(memory=())
        compute = partial(self._update, rest, state.memory, collected.rollouts, self._places, np.uint32(n))
        with self._lockstep.clock("update"):
            state, memory, metrics, finite = self._lockstep.call(lambda: jax.block_until_ready(compute()))
        state, metrics = state._replace(memory=memory), _means(metrics)
        if not finite or not all(map(math.isfinite, metrics.values())):
            terms = ", ".join(f"{name} = {value:.4g}" for name, value in metrics.items())
            raise FloatingPointError(
                f"update {n} diverged, its parameters were not published: {terms}. "
                "Try a smaller --learning-rate, and look for infinite or NaN rewards and observations."
            )
        self._run.acting = before.params if self._lockstep.lag else ()
        return state, metrics


def _means(metrics: dict[str, Any]) -> dict[str, float]:
    """Of each metric's values, or of those that counted; a metric of which none did is left out.

    They are taken here: compiled, their rounding would depend on what stands around them.
    """
    pairs = {name: value if isinstance(value, tuple) else (value, True) for name, value in metrics.items()}
    counted = {name: np.asarray(x)[np.broadcast_to(np.asarray(c), np.shape(x))] for name, (x, c) in pairs.items()}
    return {name: float(np.mean(x, dtype=np.float64)) for name, x in counted.items() if x.size}
