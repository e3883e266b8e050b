"""DDPG on continuous actions with lockstep actors (Lillicrap et al. 2016, arXiv:1509.02971).

Differs from the paper: Gaussian noise; bootstraps through truncation; layers of 256 without batch normalization; one
step size, 3e-4; random actions at the start; the policy and the targets move at every second step, as in TD3.
Run:       python cleanba/ddpg_continuous_action.py --env-id HalfCheetah-v4
Read next: td3_continuous_action.py (its successor), core/replay.py (the memory)
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cleanba.core.actors import Actors
from cleanba.core.args import parse
from cleanba.core.replay import ReplayArgs, Transitions, add, empty, gradient_steps, step_keys
from cleanba.core.rollout import Acted, EnvStep, Rollout
from cleanba.core.run import Run
from cleanba.core.shards import Learner, State, each_shard, total


@dataclass(frozen=True)
class Args(ReplayArgs):
    """DDPG on continuous actions."""

    env_id: str = "HalfCheetah-v4"
    """the environment: one of EnvPool's, or a registered Gymnasium environment (also as module:Name-v0)"""
    total_timesteps: int = 1_000_000
    """environment steps of the run; it is cut to whole updates"""
    num_envs: int = 4
    """environments, over all devices and processes"""
    num_steps: int = 16
    """steps of each environment in a rollout"""
    num_shards: int = 2
    """parts that environments and gradients are computed in; the largest number of learners"""
    cpu_threads: int = 4
    """threads of XLA's pool on the CPU, and the most virtual devices: the order of a sum depends on it"""
    buffer_size: int = 1_000_000
    """steps that are kept; it is cut to whole rollouts"""
    batch_size: int = 256
    """transitions of a gradient step"""
    learning_starts: int = 25_000
    """environment steps before the first gradient step, with random actions"""
    train_frequency: int = 1
    """environment steps for each gradient step"""
    learning_rate: float = 3e-4
    """step size of Adam"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """how far the target networks move towards the networks"""
    exploration_noise: float = 0.1
    """deviation of the noise on the actor's actions, as a part of half their range"""
    policy_frequency: int = 2
    """gradient steps of the critic for each of the policy and the target networks"""

    def check(self) -> Self:
        """Actions are continuous and have bounds."""
        super().check()
        self.check_that(self.policy_frequency > 0, "--policy-frequency must be at least 1")
        self.check_that(self.tau <= 1, f"--tau {self.tau} must be at most 1")
        self.check_continuous(bounded=True)
        return self


# same as td3_continuous_action.py
class Actor(nn.Module):
    """The policy."""

    action_shape: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: jax.Array) -> jax.Array:
        """Actions [B, ...] from -1 to 1 for observations [B, ...]."""
        x = obs.reshape(obs.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        return nn.tanh(nn.Dense(math.prod(self.action_shape))(x)).reshape(-1, *self.action_shape)


class Critic(nn.Module):
    """The value of an action."""

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array) -> jax.Array:
        """Values [B] of actions from -1 to 1, [B, ...]."""
        x = jnp.concatenate([x.reshape(x.shape[0], -1) for x in (obs, action)], axis=-1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        return nn.Dense(1)(x)[:, 0]


# same as td3_continuous_action.py
def network(args: Args) -> tuple[Actor, Critic]:
    """The agent's networks."""
    return Actor(args.env_spec.action_space.shape), Critic()


def optimizer(args: Args) -> optax.GradientTransformation:
    """Adam, once for the actor and once for the critic."""
    return optax.adam(args.learning_rate)


# same as td3_continuous_action.py
def init(key: jax.Array, args: Args) -> State:
    """The first networks, optimizer states and the empty memory of a shard."""
    actor_key, critic_key = jax.random.split(key)
    actor, critic = network(args)
    obs, action = (jnp.zeros((1, *x.shape)) for x in (args.env_spec.observation_space, args.env_spec.action_bounds[0]))
    params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs, action)}
    adam = {name: optimizer(args).init(own) for name, own in params.items()}
    return State(params | {"is_random": jnp.float32(1)}, {"adam": adam, "target": params}, empty(args))


# same as td3_continuous_action.py
def scaled(action: jax.Array, args: Args) -> jax.Array:
    """An action from -1 to 1 as one between the environment's bounds."""
    low, high = args.env_spec.action_bounds
    return low + (action + 1) / 2 * (high - low)


# same as td3_continuous_action.py
def unscaled(action: jax.Array, args: Args) -> jax.Array:
    """The inverse of `scaled`."""
    low, high = args.env_spec.action_bounds
    return 2 * (action - low) / (high - low) - 1


# same as td3_continuous_action.py
def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """The policy's action with noise, or a random one, for each of a shard's B environments."""
    noise_key, random_key = jax.random.split(key)
    action = network(args)[0].apply(params["actor"], step.obs)
    action = jnp.clip(action + args.exploration_noise * jax.random.normal(noise_key, action.shape), -1, 1)
    random = jax.random.uniform(random_key, action.shape, minval=-1, maxval=1)
    return Acted(scaled(jnp.where(params["is_random"] > 0, random, action), args), carry)


def targets(target: Any, batch: Transitions, args: Args) -> jax.Array:
    """What each action turned out to be worth, [N]: a terminated step bootstraps from nothing."""
    actor, critic = network(args)
    following = critic.apply(target["critic"], batch.next_obs, actor.apply(target["actor"], batch.next_obs))
    return batch.reward + args.gamma * ~batch.terminated * following


def loss(params: Any, target: Any, batch: Transitions, args: Args) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of the critic's loss: sums, which add up to means over all shards."""
    values = network(args)[1].apply(params, batch.obs, unscaled(batch.action, args))  # [N]
    weight = batch.weight / args.batch_size
    qf_loss = jnp.sum(weight * (values - targets(target, batch, args)) ** 2)
    return qf_loss, {"losses/qf_loss": qf_loss, "losses/qf_values": jnp.sum(weight * values)}


def actor_loss(params: Any, critic_params: Any, batch: Transitions, args: Args) -> jax.Array:
    """One shard's part of the policy's loss: what its actions are worth, by the critic."""
    actor, critic = network(args)
    values = critic.apply(critic_params, batch.obs, actor.apply(params, batch.obs))
    return -jnp.sum(batch.weight / args.batch_size * values)


def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, Any]]:
    """Remember the rollouts, then learn from what is remembered."""
    replay = add(state.memory, rollouts, args)

    def step(state: State, time: jax.Array, batch: Transitions) -> tuple[State, dict]:
        params, adam, target = state.params, state.opt_state["adam"], state.opt_state["target"]
        gradient = partial(jax.grad(partial(loss, args=args), has_aux=True), params["critic"], target)
        grads, metrics = total(each_shard(gradient, batch))
        params, adam = apply(params, adam, "critic", grads, args)

        def policy(learned: tuple) -> tuple[tuple, jax.Array]:
            params, adam, target = learned
            gradient = partial(jax.value_and_grad(partial(actor_loss, args=args)), params["actor"], params["critic"])
            value, grads = total(each_shard(gradient, batch))
            params, adam = apply(params, adam, "actor", grads, args)
            networks = {name: params[name] for name in target}
            return (params, adam, optax.incremental_update(networks, target, args.tau)), value

        is_due = time // args.train_frequency % args.policy_frequency == 0
        learned = (params, adam, target)
        (params, adam, target), value = jax.lax.cond(is_due, policy, lambda learned: (learned, jnp.float32(0)), learned)
        metrics["losses/actor_loss"] = (value, is_due)
        return State(params, {"adam": adam, "target": target}), metrics

    keys = step_keys(replay, keys, args)
    state, metrics = gradient_steps(step, state._replace(memory=()), replay, keys, args)
    state.params["is_random"] = jnp.float32(replay.written[0] * args.num_envs <= args.learning_starts)
    return state._replace(memory=replay), metrics


# same as td3_continuous_action.py
def apply(params: Any, adam: Any, name: str, grads: Any, args: Args) -> tuple[Any, Any]:
    """A gradient step of one of the networks."""
    change, own = optimizer(args).update(grads, adam[name])
    return params | {name: optax.apply_updates(params[name], change)}, adam | {name: own}


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
