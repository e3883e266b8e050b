"""TD3 on continuous actions with lockstep actors (Fujimoto et al. 2018, arXiv:1802.09477).

Differs from the paper: bootstraps through truncation; layers of 256; step size 3e-4.
Run:       python cleanba/td3_continuous_action.py --env-id HalfCheetah-v4
Read next: ddpg_continuous_action.py (its predecessor), sac_continuous_action.py (a random policy), core/replay.py
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
    """TD3 on continuous actions."""

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
    policy_noise: float = 0.2
    """deviation of the noise on the target policy's actions, as a part of half their range"""
    noise_clip: float = 0.5
    """the most of that noise"""
    exploration_noise: float = 0.1
    """deviation of the noise on the actor's actions, as a part of half their range"""
    policy_frequency: int = 2
    """gradient steps of the critics for each of the policy and the target networks"""

    def check(self) -> Self:
        """Actions are continuous and have bounds."""
        super().check()
        self.check_that(self.policy_frequency > 0, "--policy-frequency must be at least 1")
        self.check_that(self.tau <= 1, f"--tau {self.tau} must be at most 1")
        self.check_continuous(bounded=True)
        return self


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
    """The value of an action, twice."""

    @nn.compact
    def __call__(self, obs: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Two values [B] of each action from -1 to 1, [B, ...]."""
        inputs = jnp.concatenate([x.reshape(x.shape[0], -1) for x in (obs, action)], axis=-1)

        def mlp() -> jax.Array:
            x = inputs
            for _ in range(2):
                x = nn.relu(nn.Dense(256)(x))
            return nn.Dense(1)(x)[:, 0]

        return mlp(), mlp()


def network(args: Args) -> tuple[Actor, Critic]:
    """The agent's networks."""
    return Actor(args.env_spec.action_space.shape), Critic()


def optimizer(args: Args) -> optax.GradientTransformation:
    """Adam, once for the actor and once for the critics."""
    return optax.adam(args.learning_rate)


def init(key: jax.Array, args: Args) -> State:
    """The first networks, optimizer states and the empty memory of a shard."""
    actor_key, critic_key = jax.random.split(key)
    actor, critic = network(args)
    obs, action = (jnp.zeros((1, *x.shape)) for x in (args.env_spec.observation_space, args.env_spec.action_bounds[0]))
    params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs, action)}
    adam = {name: optimizer(args).init(own) for name, own in params.items()}
    return State(params | {"is_random": jnp.float32(1)}, {"adam": adam, "target": params}, empty(args))


def scaled(action: jax.Array, args: Args) -> jax.Array:
    """An action from -1 to 1 as one between the environment's bounds."""
    low, high = args.env_spec.action_bounds
    return low + (action + 1) / 2 * (high - low)


def unscaled(action: jax.Array, args: Args) -> jax.Array:
    """The inverse of `scaled`."""
    low, high = args.env_spec.action_bounds
    return 2 * (action - low) / (high - low) - 1


def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """The policy's action with noise, or a random one, for each of a shard's B environments."""
    noise_key, random_key = jax.random.split(key)
    action = network(args)[0].apply(params["actor"], step.obs)
    action = jnp.clip(action + args.exploration_noise * jax.random.normal(noise_key, action.shape), -1, 1)
    random = jax.random.uniform(random_key, action.shape, minval=-1, maxval=1)
    return Acted(scaled(jnp.where(params["is_random"] > 0, random, action), args), carry)


def targets(target: Any, batch: Transitions, key: jax.Array, args: Args) -> jax.Array:
    """What each action turned out to be worth, [N], by the lesser critic: a terminated step bootstraps from nothing."""
    actor, critic = network(args)
    action = actor.apply(target["actor"], batch.next_obs)
    noise = args.policy_noise * jax.random.normal(key, action.shape)
    action = jnp.clip(action + jnp.clip(noise, -args.noise_clip, args.noise_clip), -1, 1)
    following = jnp.minimum(*critic.apply(target["critic"], batch.next_obs, action))
    return batch.reward + args.gamma * ~batch.terminated * following


def loss(
    params: Any, target: Any, batch: Transitions, key: jax.Array, args: Args
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of the critics' loss: sums, which add up to means over all shards."""
    values = jnp.stack(network(args)[1].apply(params, batch.obs, unscaled(batch.action, args)))  # [2, N]
    weight = batch.weight / args.batch_size
    qf_loss = jnp.sum(weight * (values - targets(target, batch, key, args)) ** 2)
    return qf_loss, {"losses/qf_loss": qf_loss / 2, "losses/qf_values": jnp.sum(weight * values) / 2}


def actor_loss(params: Any, critic_params: Any, batch: Transitions, args: Args) -> jax.Array:
    """One shard's part of the policy's loss: what its actions are worth, by the first critic."""
    actor, critic = network(args)
    value, _ = critic.apply(critic_params, batch.obs, actor.apply(params, batch.obs))
    return -jnp.sum(batch.weight / args.batch_size * value)


def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, Any]]:
    """Remember the rollouts, then learn from what is remembered."""
    replay = add(state.memory, rollouts, args)

    def step(state: State, time: jax.Array, batch: Transitions, noise_keys: jax.Array) -> tuple[State, dict]:
        params, adam, target = state.params, state.opt_state["adam"], state.opt_state["target"]
        gradient = partial(jax.grad(partial(loss, args=args), has_aux=True), params["critic"], target)
        grads, metrics = total(each_shard(gradient, batch, noise_keys))
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

    drawn = jax.vmap(jax.vmap(jax.random.split))(step_keys(replay, keys, args))  # [G, S / L, 2]
    keys, *others = jnp.moveaxis(drawn, -1, 0)
    state, metrics = gradient_steps(step, state._replace(memory=()), replay, keys, args, *others)
    state.params["is_random"] = jnp.float32(replay.written[0] * args.num_envs <= args.learning_starts)
    return state._replace(memory=replay), metrics


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
