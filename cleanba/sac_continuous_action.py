"""SAC on continuous actions with lockstep actors (Haarnoja et al. 2018, arXiv:1812.05905).

Differs from the paper: bootstraps through truncation; the critics learn faster than the policy.
Run:       python cleanba/sac_continuous_action.py --env-id HalfCheetah-v4
Read next: td3_continuous_action.py (a policy without chance), core/replay.py (the memory)
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

LOG_STD_MIN, LOG_STD_MAX = -5, 2


@dataclass(frozen=True)
class Args(ReplayArgs):
    """SAC on continuous actions."""

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
    learning_starts: int = 5_000
    """environment steps before the first gradient step, with random actions"""
    train_frequency: int = 1
    """environment steps for each gradient step"""
    policy_lr: float = 3e-4
    """step size of the policy's Adam"""
    q_lr: float = 1e-3
    """step size of Adam of the critics and of the entropy's weight"""
    gamma: float = 0.99
    """discount factor"""
    tau: float = 0.005
    """how far the target networks move towards the networks"""
    autotune: bool = True
    """learn the weight of the entropy"""
    alpha: float = 0.2
    """that weight, if it is not learned"""

    def check(self) -> Self:
        """Actions are continuous and have bounds."""
        super().check()
        self.check_that(self.alpha > 0, "--alpha must be more than 0")
        self.check_that(self.tau <= 1, f"--tau {self.tau} must be at most 1")
        self.check_continuous(bounded=True)
        return self


class Actor(nn.Module):
    """The policy."""

    action_shape: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Means and logarithms of deviations [B, ...] of a Gaussian, whose tanh is the action, for observations."""
        x = obs.reshape(obs.shape[0], -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(256)(x))
        mean, log_std = (nn.Dense(math.prod(self.action_shape))(x).reshape(-1, *self.action_shape) for _ in range(2))
        return mean, LOG_STD_MIN + (LOG_STD_MAX - LOG_STD_MIN) / 2 * (nn.tanh(log_std) + 1)


# same as td3_continuous_action.py
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


# same as td3_continuous_action.py
def network(args: Args) -> tuple[Actor, Critic]:
    """The agent's networks."""
    return Actor(args.env_spec.action_space.shape), Critic()


def optimizer(args: Args, name: str = "actor") -> optax.GradientTransformation:
    """Adam, with a step size for each part."""
    return optax.adam(args.policy_lr if name == "actor" else args.q_lr)


def init(key: jax.Array, args: Args) -> State:
    """The first networks, optimizer states and the empty memory of a shard."""
    actor_key, critic_key = jax.random.split(key)
    actor, critic = network(args)
    obs, action = (jnp.zeros((1, *x.shape)) for x in (args.env_spec.observation_space, args.env_spec.action_bounds[0]))
    params = {"actor": actor.init(actor_key, obs), "critic": critic.init(critic_key, obs, action)}
    params["log_alpha"] = jnp.float32(0.0 if args.autotune else math.log(args.alpha))
    adam = {name: optimizer(args, name).init(own) for name, own in params.items()}
    return State(params | {"is_random": jnp.float32(1)}, {"adam": adam, "target": params["critic"]}, empty(args))


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


def draw(params: Any, obs: jax.Array, key: jax.Array, args: Args) -> tuple[jax.Array, jax.Array]:
    """An action from -1 to 1 for each of B observations, and the logarithm of its density, [B]."""
    mean, log_std = network(args)[0].apply(params, obs)
    noise = jax.random.normal(key, mean.shape)
    x = mean + jnp.exp(log_std) * noise
    # log(1 - tanh(x)^2), which does not run into zero for a large x.
    squeezed = 2 * (math.log(2) - x - jax.nn.softplus(-2 * x))
    log_prob = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - squeezed
    return jnp.tanh(x), jnp.sum(log_prob.reshape(len(log_prob), -1), axis=-1)


def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """An action drawn from the policy, or a random one, for each of a shard's B environments."""
    draw_key, random_key = jax.random.split(key)
    action, _ = draw(params["actor"], step.obs, draw_key, args)
    random = jax.random.uniform(random_key, action.shape, minval=-1, maxval=1)
    return Acted(scaled(jnp.where(params["is_random"] > 0, random, action), args), carry)


def targets(params: Any, target: Any, batch: Transitions, key: jax.Array, args: Args) -> jax.Array:
    """What each action turned out to be worth, [N], by the lesser critic and with what chance is worth: a terminated
    step bootstraps from nothing."""
    action, log_prob = draw(params["actor"], batch.next_obs, key, args)
    following = jnp.minimum(*network(args)[1].apply(target, batch.next_obs, action))
    following -= jnp.exp(params["log_alpha"]) * log_prob
    return batch.reward + args.gamma * ~batch.terminated * following


def loss(
    critic: Any, params: Any, target: Any, batch: Transitions, key: jax.Array, args: Args
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of the critics' loss: sums, which add up to means over all shards."""
    values = jnp.stack(network(args)[1].apply(critic, batch.obs, unscaled(batch.action, args)))  # [2, N]
    weight = batch.weight / args.batch_size
    qf_loss = jnp.sum(weight * (values - targets(params, target, batch, key, args)) ** 2)
    return qf_loss, {"losses/qf_loss": qf_loss / 2, "losses/qf_values": jnp.sum(weight * values) / 2}


def actor_loss(
    actor: Any, params: Any, batch: Transitions, key: jax.Array, args: Args
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of the policy's loss: what its actions are worth, by the lesser critic, and their chance."""
    action, log_prob = draw(actor, batch.obs, key, args)
    values = jnp.minimum(*network(args)[1].apply(params["critic"], batch.obs, action))
    weight = batch.weight / args.batch_size
    value = jnp.sum(weight * (jnp.exp(params["log_alpha"]) * log_prob - values))
    return value, {"losses/actor_loss": value, "losses/entropy": -jnp.sum(weight * log_prob)}


def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, Any]]:
    """Remember the rollouts, then learn from what is remembered."""
    replay = add(state.memory, rollouts, args)
    target_entropy = -float(math.prod(args.env_spec.action_bounds[0].shape))

    def step(
        state: State, time: jax.Array, batch: Transitions, target_keys: jax.Array, policy_keys: jax.Array
    ) -> tuple[State, dict]:
        params, adam, target = state.params, state.opt_state["adam"], state.opt_state["target"]
        gradient = partial(jax.grad(partial(loss, args=args), has_aux=True), params["critic"], params, target)
        grads, metrics = total(each_shard(gradient, batch, target_keys))
        params, adam = apply(params, adam, "critic", grads, args)
        gradient = partial(jax.grad(partial(actor_loss, args=args), has_aux=True), params["actor"], params)
        grads, policy_metrics = total(each_shard(gradient, batch, policy_keys))
        params, adam = apply(params, adam, "actor", grads, args)
        surplus = policy_metrics["losses/entropy"] - target_entropy
        grads = args.autotune * jnp.exp(params["log_alpha"]) * surplus
        params, adam = apply(params, adam, "log_alpha", grads, args)
        target = optax.incremental_update(params["critic"], target, args.tau)
        metrics |= policy_metrics | {"losses/alpha": jnp.exp(params["log_alpha"])}
        return State(params, {"adam": adam, "target": target}), metrics

    drawn = jax.vmap(jax.vmap(partial(jax.random.split, num=3)))(step_keys(replay, keys, args))  # [G, S / L, 3]
    keys, *others = jnp.moveaxis(drawn, -1, 0)
    state, metrics = gradient_steps(step, state._replace(memory=()), replay, keys, args, *others)
    state.params["is_random"] = jnp.float32(replay.written[0] * args.num_envs <= args.learning_starts)
    return state._replace(memory=replay), metrics


def apply(params: Any, adam: Any, name: str, grads: Any, args: Args) -> tuple[Any, Any]:
    """A gradient step of one of the parts."""
    change, own = optimizer(args, name).update(grads, adam[name])
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
