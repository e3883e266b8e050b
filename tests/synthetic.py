"""Made-up rollouts with every kind of end in them, a linear network, and a learner without a run around it."""

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cleanba.core.actors import Collected
from cleanba.core.lockstep import Lockstep
from cleanba.core.processes import Place
from cleanba.core.rollout import Rollout
from cleanba.core.shards import Learner, State
from cleanba.core.topology import Topology, to_device

A, D = 3, 5  # actions, numbers in an observation


class TinyNetwork:
    """Logits and a value, linear in the observation."""

    @staticmethod
    def apply(params: Any, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return obs @ params["logits"], obs @ params["value"]

    @staticmethod
    def params(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {
            "logits": rng.normal(size=(D, A)).astype(np.float32),
            "value": rng.normal(size=D).astype(np.float32),
        }


def tiny_network(args: Any) -> type[TinyNetwork]:
    return TinyNetwork


def random_rollout(rng: np.random.Generator, T: int, B: int, end: float = 0.3, D: int = D, A: int = A) -> Rollout:
    """Ends and cuts at random; the row after an end is a reset row, as an engine would make it."""
    terminated, truncated, valid = (np.zeros((T, B), bool) for _ in range(3))
    ended = rng.random(B) < end  # the rollout before may have ended an episode in its last row
    for t in range(T):
        valid[t] = ~ended
        terminated[t] = valid[t] & (rng.random(B) < end)
        truncated[t] = valid[t] & ~terminated[t] & (rng.random(B) < end)
        ended = terminated[t] | truncated[t]
    return Rollout(
        obs=rng.normal(size=(T + 1, B, D)).astype(np.float32),
        first=np.zeros((T + 1, B), bool),
        action=rng.integers(0, A, (T, B)).astype(np.int32),
        reward=(rng.normal(size=(T, B)) * valid).astype(np.float32),
        terminated=terminated,
        truncated=truncated,
        valid=valid,
        extras={
            "logprob": np.log(rng.uniform(0.1, 1.0, (T, B))).astype(np.float32),
            "value": rng.normal(size=(T, B)).astype(np.float32),
        },
        carry=(),
    )


def random_rollouts(seed: int, args: Any, **sizes: int) -> list[Rollout]:
    """One for each shard."""
    rng = np.random.default_rng(seed)
    return [random_rollout(rng, args.num_steps, args.envs_per_shard, **sizes) for _ in range(args.num_shards)]


def stack(rollouts: list[Rollout]) -> Rollout:
    return jax.tree.map(lambda *x: np.stack(x), *rollouts)


def learn(module: Any, args: Any, params: Any, rollouts: list[Rollout], updates: int = 1) -> tuple[State, dict]:
    """`updates` updates on these rollouts by the learners of args.topology, as a run does them."""
    layout: Topology = args.layout
    learner = _learner(module.update, module.network, args)
    params = jax.tree.map(jnp.asarray, params)
    state = layout.replicate(State(params, module.optimizer(args).init(params)))
    metrics: dict[str, float] = {}
    for n in range(1, updates + 1):
        placed = {i: to_device(r, layout.learner_of(i, args.num_shards)) for i, r in enumerate(rollouts)}
        together = layout.stack(placed, args.num_shards)
        state, metrics = learner(state, Collected(together, n, 0, [], [], {}, np.zeros((1, 3))), n)
    return jax.device_get(state), metrics


def learn_from_the_start(module: Any, args: Any, rollouts: list[list[Rollout]]) -> tuple[State, dict, list[dict]]:
    """Updates on rollouts [update][shard] from the algorithm's own first state: the state without its memory, the
    memories by shard, and the metrics of each update."""
    layout, learner, metrics = args.layout, _learner(module.update, module.network, args), []
    state = learner.init(module.init)
    for n, own in enumerate(rollouts, start=1):
        placed = {i: to_device(r, layout.learner_of(i, args.num_shards)) for i, r in enumerate(own)}
        together = layout.stack(placed, args.num_shards)
        state, logged = learner(state, Collected(together, n, 0, [], [], {}, np.zeros((1, 3))), n)
        metrics.append(logged)
    return jax.device_get(state._replace(memory=())), layout.unstack(state.memory, args.num_shards), metrics


@functools.cache
def _learner(update: Any, network: Any, args: Any) -> Learner:
    """Compiled once for each network that a test puts in."""
    del network
    run = SimpleNamespace(args=args, lockstep=Lockstep(1000, False, 1), place=Place(0, 1, ""))
    run.restored, run.hold_signals = lambda first: (first, {}), lambda: None
    return Learner(update, run)


def params_of(module: Any, args: Any, seed: int = 0) -> Any:
    """Random numbers in the shapes of the algorithm's own network; its initializers take seconds to compile."""
    shapes = jax.eval_shape(functools.partial(module.init, args=args), jax.random.key(0)).params
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(x.dtype), shapes)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(jax.device_get(tree))]
