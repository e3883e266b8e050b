"""IMPALA on Atari with lockstep actors (Espeholt et al. 2018, arXiv:1802.01561; Huang et al. 2024, arXiv:2310.00036).

Differs from the paper: the lag is exactly one version; bootstraps through truncation.
Run:       python cleanba/impala_atari.py --env-id Breakout-v5
Read next: ppo_atari.py (the same network, several epochs)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.initializers import orthogonal

from cleanba.core.actors import Actors
from cleanba.core.args import CoreArgs, parse
from cleanba.core.layers import Conv, max_pool
from cleanba.core.rollout import Acted, EnvStep, Rollout
from cleanba.core.run import Run
from cleanba.core.shards import Learner, State, accumulate, each_shard, total


@dataclass(frozen=True)
class Args(CoreArgs):
    """IMPALA on Atari."""

    env_id: str = "Breakout-v5"
    """the environment: one of EnvPool's, or a registered Gymnasium environment (also as module:Name-v0)"""
    total_timesteps: int = 50_000_000
    """environment steps of the run; it is cut to whole updates"""
    num_envs: int = 128
    """environments, over all devices and processes"""
    num_steps: int = 20
    """steps of each environment in a rollout"""
    network: Literal["impala", "nature"] = "impala"
    """impala: the deep residual network of IMPALA; nature: the convolutional network of DQN"""
    learning_rate: float = 6e-4
    """step size of RMSProp"""
    anneal_lr: bool = True
    """let the step size fall linearly to zero over the run"""
    gamma: float = 0.99
    """discount factor"""
    num_minibatches: int = 4
    """minibatches of an update, each of whole environments"""
    gradient_accumulation_steps: int = 1
    """parts that a minibatch's gradient is added up from, to save memory; the result is the same but for rounding"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 40.0
    """largest norm of a gradient"""

    def check(self) -> Self:
        """Environments of a shard go evenly into the minibatches and their parts."""
        super().check()
        self.check_parts(self.envs_per_shard, self.num_minibatches * self.gradient_accumulation_steps)
        self.check_discrete()
        self.check_frames()
        return self


# same as ppo_atari.py
class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> the same."""
        h = Conv(x.shape[-1], 3)(nn.relu(x))
        return x + Conv(x.shape[-1], 3)(nn.relu(h))


# same as ppo_atari.py
class Agent(nn.Module):
    """IMPALA's ResNet (Espeholt et al. 2018, fig. 3) or DQN's NatureCNN (Mnih et al. 2015), with two heads."""

    num_actions: int
    torso: str

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [B, A] and values [B] of stacked frames [B, 4, 84, 84]."""
        x = jnp.moveaxis(obs, 1, -1) / 255.0
        if self.torso == "impala":
            for channels in (16, 32, 32):
                x = max_pool(Conv(channels, 3)(x), 3, 2)
                x = ResidualBlock()(ResidualBlock()(x))
            x, width = nn.relu(x), 256
        else:
            for features, size, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
                x = nn.relu(Conv(features, size, stride, "VALID", kernel_init=orthogonal(jnp.sqrt(2)))(x))
            width = 512
        x = nn.relu(nn.Dense(width, kernel_init=orthogonal(jnp.sqrt(2)))(x.reshape(x.shape[0], -1)))
        return (
            nn.Dense(self.num_actions, kernel_init=orthogonal(0.01))(x),
            nn.Dense(1, kernel_init=orthogonal(1.0))(x)[:, 0],
        )


# same as ppo_atari.py
def network(args: Args) -> Agent:
    """The agent's network."""
    return Agent(args.env_spec.num_actions, args.network)


def optimizer(args: Args) -> optax.GradientTransformation:
    """RMSProp with eps outside the root, as PyTorch places it; its step size falls after each update."""

    def learning_rate(step: jax.Array) -> jax.Array:
        done = step // args.num_minibatches / args.num_updates
        return args.learning_rate * (1.0 - done * args.anneal_lr)

    rmsprop = optax.inject_hyperparams(optax.rmsprop, static_args="eps_in_sqrt")
    adapt = rmsprop(learning_rate=learning_rate, decay=0.99, eps=0.01, eps_in_sqrt=False)
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adapt)


# same as ppo_atari.py
def init(key: jax.Array, args: Args) -> State:
    """The first parameters and optimizer state."""
    obs = jnp.zeros((1, *args.env_spec.observation_space.shape), args.env_spec.observation_space.dtype)
    params = network(args).init(key, obs)
    return State(params, optimizer(args).init(params))


def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """Sample an action for each of a shard's B environments."""
    logits, _ = network(args).apply(params, step.obs)
    action = jax.random.categorical(key, logits)  # [B]
    return Acted(action, carry, {"logprob": log_prob(logits, action)})


# same as ppo_atari.py
def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    """The log-probability of each action, [..., A] and [...] -> [...]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


def targets(rollout: Rollout, value: jax.Array, log_ratio: jax.Array, args: Args) -> tuple[jax.Array, jax.Array]:
    """Advantages and V-trace value targets [T, B], from values [T + 1, B] and log pi / mu [T, B].

    Espeholt et al. 2018, eq. 1, with rho-bar = c-bar = 1. An end cuts the trace; a terminated step bootstraps from
    nothing, a truncated one from the value of what followed it.
    """
    ended = rollout.terminated | rollout.truncated
    rho = jnp.minimum(1.0, jnp.exp(log_ratio))
    discount = args.gamma * ~rollout.terminated
    delta = rho * (rollout.reward + discount * value[1:] - value[:-1])

    def back(following: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        delta, rho, ended = row
        correction = delta + args.gamma * rho * ~ended * following
        return correction, correction

    _, correction = jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, rho, ended), reverse=True)
    target = value[:-1] + correction
    next_target = jnp.concatenate([target[1:], value[-1:]])
    advantage = rho * (rollout.reward + discount * jnp.where(ended, value[1:], next_target) - value[:-1])
    return advantage, target


def loss(params: Any, rollout: Rollout, args: Args) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of a minibatch's loss: sums over its valid steps."""
    T, B = rollout.reward.shape
    logits, value = network(args).apply(params, rollout.obs.reshape(-1, *rollout.obs.shape[2:]))
    logits, value = logits.reshape(T + 1, B, -1)[:-1], value.reshape(T + 1, B)
    log_ratio = log_prob(logits, rollout.action) - rollout.extras["logprob"]
    advantage, target = jax.lax.stop_gradient(targets(rollout, value, log_ratio, args))
    log_probs = jax.nn.log_softmax(logits)

    def add(x: jax.Array) -> jax.Array:
        return jnp.sum(rollout.valid * x)

    policy_loss = add(-log_prob(logits, rollout.action) * advantage)
    value_loss = 0.5 * add((value[:-1] - target) ** 2)
    entropy = add(-jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": add((jnp.exp(log_ratio) - 1) - log_ratio),
        "steps": add(jnp.ones_like(log_ratio)),
    }
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, metrics


def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, jax.Array]]:
    """One pass over minibatches of whole environments, each drawn evenly from every shard."""
    del keys
    parts = (args.num_minibatches, args.gradient_accumulation_steps, -1)

    def split(rollout: Rollout) -> Rollout:
        """Environments apart: [T, B, ...] -> [M, parts, T, n, ...]."""

        def split_leaf(x: jax.Array) -> jax.Array:
            return jnp.moveaxis(x.reshape(x.shape[0], *parts, *x.shape[2:]), 0, 2)

        return jax.tree.map(split_leaf, rollout)

    def minibatch(state: State, drawn: Rollout) -> tuple[State, dict]:
        gradient = partial(jax.grad(partial(loss, args=args), has_aux=True), state.params)
        grads, metrics = total(each_shard(partial(accumulate, gradient), drawn))
        step, opt_state = optimizer(args).update(grads, state.opt_state)
        steps = jnp.maximum(1.0, metrics.pop("steps"))
        metrics = {name: value / steps for name, value in metrics.items()}
        metrics["charts/learning_rate"] = opt_state[1].hyperparams["learning_rate"]
        return State(optax.apply_updates(state.params, step), opt_state), metrics

    minibatches = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), each_shard(split, rollouts))
    return jax.lax.scan(minibatch, state, minibatches)


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
