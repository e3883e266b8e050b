"""Categorical DQN (C51) on Atari with lockstep actors (Bellemare et al. 2017, arXiv:1707.06887).

Differs from the paper: bootstraps through truncation.
Run:       python cleanba/c51_atari.py --env-id Pong-v5 --atari-protocol classic
Read next: core/replay.py (the memory)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cleanba.core.actors import Actors
from cleanba.core.args import parse
from cleanba.core.layers import Conv
from cleanba.core.replay import ReplayArgs, Transitions, add, empty, gradient_steps, step_keys
from cleanba.core.rollout import Acted, EnvStep, Rollout
from cleanba.core.run import Run
from cleanba.core.shards import Learner, State, each_shard, total


@dataclass(frozen=True)
class Args(ReplayArgs):
    """C51 on Atari."""

    SIGNED: ClassVar[tuple[str, ...]] = ("v_min", "v_max")

    env_id: str = "Breakout-v5"
    """the environment: one of EnvPool's, or a registered Gymnasium environment (also as module:Name-v0)"""
    total_timesteps: int = 10_000_000
    """environment steps of the run; it is cut to whole updates"""
    num_envs: int = 8
    """environments, over all devices and processes"""
    num_steps: int = 16
    """steps of each environment in a rollout"""
    num_shards: int = 4
    """parts that environments and gradients are computed in; the largest number of learners"""
    buffer_size: int = 1_000_000
    """steps that are kept; it is cut to whole rollouts"""
    batch_size: int = 32
    """transitions of a gradient step"""
    learning_starts: int = 80_000
    """environment steps before the first gradient step"""
    train_frequency: int = 4
    """environment steps for each gradient step"""
    learning_rate: float = 2.5e-4
    """step size of Adam"""
    n_atoms: int = 51
    """returns that the distribution is over"""
    v_min: float = -10.0
    """the smallest of them"""
    v_max: float = 10.0
    """the largest of them"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 1.0
    """how far the target network moves towards the network when it is renewed"""
    target_network_frequency: int = 10_000
    """environment steps between renewals of the target network"""
    start_e: float = 1.0
    """share of random actions at the beginning"""
    end_e: float = 0.01
    """share of random actions at the end"""
    exploration_fraction: float = 0.1
    """part of the run in which that share falls, linearly"""

    @property
    def frames(self) -> int:
        """Of the stack that an observation is: only the newest is kept."""
        return self.env_spec.observation_space.shape[0]

    def check(self) -> Self:
        """Actions are discrete."""
        super().check()
        self.check_that(self.target_network_frequency > 0, "--target-network-frequency must be at least 1")
        self.check_that(0 < self.exploration_fraction <= 1, "--exploration-fraction must be in (0, 1]")
        self.check_that(max(self.start_e, self.end_e, self.tau) <= 1, "--start-e, --end-e and --tau are at most 1")
        self.check_that(self.n_atoms > 1, "--n-atoms must be at least 2")
        self.check_that(self.v_min < self.v_max, f"--v-min {self.v_min} must be less than --v-max {self.v_max}")
        self.check_discrete()
        self.check_frames()
        return self


class Agent(nn.Module):
    """The distribution of the return of each action."""

    num_actions: int
    n_atoms: int

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Logits [B, A, atoms] of stacked frames [B, 4, 84, 84]."""
        x = jnp.moveaxis(obs, 1, -1) / 255.0
        for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            x = nn.relu(Conv(features, size, stride, "VALID")(x))
        x = nn.relu(nn.Dense(512)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_actions * self.n_atoms)(x).reshape(-1, self.num_actions, self.n_atoms)


# same as c51.py
def network(args: Args) -> Agent:
    """The agent's network."""
    return Agent(args.env_spec.num_actions, args.n_atoms)


# same as c51.py
def atoms(args: Args) -> jax.Array:
    """The returns that a distribution is over."""
    return jnp.linspace(args.v_min, args.v_max, args.n_atoms)


# same as c51.py
def values(logits: jax.Array, args: Args) -> jax.Array:
    """The mean of each distribution, [..., atoms] -> [...]."""
    return jnp.sum(jax.nn.softmax(logits) * atoms(args), axis=-1)


# same as c51.py
def optimizer(args: Args) -> optax.GradientTransformation:
    """Adam."""
    return optax.adam(args.learning_rate, eps=0.01 / args.batch_size)


# same as c51.py
def init(key: jax.Array, args: Args) -> State:
    """The first networks, optimizer state and the empty memory of a shard."""
    obs = jnp.zeros((1, *args.env_spec.observation_space.shape), args.env_spec.observation_space.dtype)
    params = network(args).init(key, obs)
    opt_state = {"adam": optimizer(args).init(params), "target": params}
    return State({"network": params, "epsilon": jnp.float32(args.start_e)}, opt_state, empty(args))


# same as c51.py
def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """The best action for each of a shard's B environments, or a random one."""
    explore_key, action_key = jax.random.split(key)
    best = jnp.argmax(values(network(args).apply(params["network"], step.obs), args), axis=-1)
    explores = jax.random.uniform(explore_key, best.shape) < params["epsilon"]
    action = jnp.where(explores, jax.random.randint(action_key, best.shape, 0, args.env_spec.num_actions), best)
    return Acted(action, carry)


# same as c51.py
def project(returns: jax.Array, probs: jax.Array, args: Args) -> jax.Array:
    """The distribution of `probs` over `returns`, both [N, atoms], as one over the atoms: each return's probability
    goes to its two neighbours, the nearer one getting more (algorithm 1)."""
    step = (args.v_max - args.v_min) / (args.n_atoms - 1)
    returns = jnp.clip(returns, args.v_min, args.v_max)
    share = jnp.clip(1 - jnp.abs(returns[:, :, None] - atoms(args)) / step, 0, 1)  # [N, from, to]
    return jnp.sum(probs[:, :, None] * share, axis=1)


# same as c51.py
def targets(target: Any, batch: Transitions, args: Args) -> jax.Array:
    """How each action's return turned out to be distributed, [N, atoms]: a terminated step is worth its reward."""
    logits = network(args).apply(target, batch.next_obs)
    best = jnp.argmax(values(logits, args), axis=-1)
    probs = jax.nn.softmax(jnp.take_along_axis(logits, best[:, None, None], axis=1)[:, 0])
    return project(batch.reward[:, None] + args.gamma * ~batch.terminated[:, None] * atoms(args), probs, args)


# same as c51.py
def loss(params: Any, target: Any, batch: Transitions, args: Args) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of a minibatch's loss: sums, which add up to means over all shards."""
    logits = jnp.take_along_axis(network(args).apply(params, batch.obs), batch.action[:, None, None], axis=1)[:, 0]
    weight = batch.weight / args.batch_size
    cross_entropy = -jnp.sum(targets(target, batch, args) * jax.nn.log_softmax(logits), axis=-1)
    td_loss = jnp.sum(weight * cross_entropy)
    return td_loss, {"losses/loss": td_loss, "losses/q_values": jnp.sum(weight * values(logits, args))}


# same as c51.py
def epsilon(steps: jax.Array, args: Args) -> jax.Array:
    """The share of random actions after so many environment steps."""
    done = jnp.minimum(1.0, steps / (args.exploration_fraction * args.total_timesteps))
    return args.start_e + (args.end_e - args.start_e) * done


# same as c51.py
def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, Any]]:
    """Remember the rollouts, then learn from what is remembered."""
    replay = add(state.memory, rollouts, args)

    def step(state: State, time: jax.Array, batch: Transitions) -> tuple[State, dict]:
        params, target = state.params["network"], state.opt_state["target"]
        gradient = jax.grad(partial(loss, args=args), has_aux=True)
        grads, metrics = total(each_shard(partial(gradient, params, target), batch))
        change, adam = optimizer(args).update(grads, state.opt_state["adam"])
        params = optax.apply_updates(params, change)
        renews = time // args.target_network_frequency > (time - args.train_frequency) // args.target_network_frequency
        target = optax.incremental_update(params, target, renews * args.tau)
        return State(state.params | {"network": params}, {"adam": adam, "target": target}), metrics

    keys = step_keys(replay, keys, args)
    state, metrics = gradient_steps(step, state._replace(memory=()), replay, keys, args)
    state.params["epsilon"] = epsilon(replay.written[0] * args.num_envs, args)
    metrics["charts/epsilon"] = state.params["epsilon"]
    return state._replace(memory=replay), metrics


if __name__ == "__main__":
    args = parse(Args)
    with Run(args) as run, Actors(act, run) as actors:
        learn = Learner(update, run)
        state = learn.init(init)
        actors.publish(run.done + 1, state.params)
        for n in run.updates():
            rollouts = actors.collect(n)
            state, metrics = learn(state, rollouts, n)
            actors.publish(n + 1, state.params)
            run.log(n, metrics, rollouts, state)
        run.finish(act, state.params)
