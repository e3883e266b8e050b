"""PPO on Atari with lockstep actors (Schulman et al. 2017, arXiv:1707.06347; Huang et al. 2024, arXiv:2310.00036).

Differs from the paper: bootstraps through truncation; normalizes advantages over the whole minibatch; one step of lag.
Run:       python cleanba/ppo_atari.py --env-id Breakout-v5
           python cleanba/ppo_atari.py --env-id Pong-v5 --network nature --num-envs 32
Read next: impala_atari.py (off-policy correction)
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Self

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
from cleanba.core.seeding import permutation
from cleanba.core.shards import Learner, State, accumulate, each_shard, total


@dataclass(frozen=True)
class Args(CoreArgs):
    """PPO on Atari."""

    env_id: str = "Breakout-v5"
    """the environment: one of EnvPool's, or a registered Gymnasium environment (also as module:Name-v0)"""
    total_timesteps: int = 50_000_000
    """environment steps of the run; it is cut to whole updates"""
    num_envs: int = 128
    """environments, over all devices and processes"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    network: Literal["impala", "nature"] = "impala"
    """impala: the deep residual network of IMPALA; nature: the convolutional network of DQN"""
    learning_rate: float = 2.5e-4
    """step size of Adam"""
    anneal_lr: bool = True
    """let the step size fall linearly to zero over the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 4
    """minibatches of an epoch"""
    gradient_accumulation_steps: int = 1
    """parts that a minibatch's gradient is added up from, to save memory; the result is the same but for rounding"""
    update_epochs: int = 4
    """times that each rollout is gone through"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.1
    """how far the probability ratio may move"""
    ent_coef: float = 0.01
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of a gradient"""

    def check(self) -> Self:
        """Rows of a shard go evenly into the minibatches and their parts."""
        super().check()
        self.check_that(self.update_epochs > 0, "--update-epochs must be at least 1")
        rows, parts = self.envs_per_shard * self.num_steps, self.num_minibatches * self.gradient_accumulation_steps
        self.check_parts(rows, parts)
        self.check_discrete()
        self.check_frames()
        return self


class ResidualBlock(nn.Module):
    """Two convolutions around a shortcut."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> the same."""
        h = Conv(x.shape[-1], 3)(nn.relu(x))
        return x + Conv(x.shape[-1], 3)(nn.relu(h))


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


def network(args: Args) -> Agent:
    """The agent's network."""
    return Agent(args.env_spec.num_actions, args.network)


# same as ppo.py
def optimizer(args: Args) -> optax.GradientTransformation:
    """Adam, its step size falling after each update, not within one."""

    def learning_rate(step: jax.Array) -> jax.Array:
        done = step // (args.num_minibatches * args.update_epochs) / args.num_updates
        return args.learning_rate * (1.0 - done * args.anneal_lr)

    adam = optax.inject_hyperparams(optax.adam)(learning_rate=learning_rate, eps=1e-5)
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam)


# same as ppo.py
def init(key: jax.Array, args: Args) -> State:
    """The first parameters and optimizer state."""
    obs = jnp.zeros((1, *args.env_spec.observation_space.shape), args.env_spec.observation_space.dtype)
    params = network(args).init(key, obs)
    return State(params, optimizer(args).init(params))


# same as ppo.py
def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """Sample an action for each of a shard's B environments."""
    logits, value = network(args).apply(params, step.obs)
    action = jax.random.categorical(key, logits)  # [B]
    return Acted(action, carry, {"logprob": log_prob(logits, action), "value": value})


# same as ppo.py
def log_prob(logits: jax.Array, action: jax.Array) -> jax.Array:
    """The log-probability of each action, [..., A] and [...] -> [...]."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], axis=-1)[..., 0]


# same as ppo.py
def targets(rollout: Rollout, value: jax.Array, args: Args) -> tuple[jax.Array, jax.Array]:
    """Generalized advantages and value targets [T, B], from values [T + 1, B]; Schulman et al. 2016, eq. 16.

    An end cuts the sum; a terminated step bootstraps from nothing, a truncated one from what followed it.
    """
    ended = rollout.terminated | rollout.truncated
    delta = rollout.reward + args.gamma * ~rollout.terminated * value[1:] - value[:-1]

    def back(following: jax.Array, row: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, ended = row
        advantage = delta + args.gamma * args.gae_lambda * ~ended * following
        return advantage, advantage

    _, advantage = jax.lax.scan(back, jnp.zeros_like(delta[0]), (delta, ended), reverse=True)
    return advantage, advantage + value[:-1]


# same as ppo.py
class Batch(NamedTuple):
    """Rows to learn from, in any order."""

    obs: jax.Array  # [N, ...]
    action: jax.Array
    logprob: jax.Array
    advantage: jax.Array
    target: jax.Array
    weight: jax.Array  # 0 on reset steps; sums to 1 over all shards of a minibatch


# same as ppo.py
def prepare(params: Any, rollout: Rollout, args: Args) -> Batch:
    """One shard's rollout as T * B rows."""
    _, last_value = network(args).apply(params, rollout.obs[-1])
    value = jnp.concatenate([rollout.extras["value"], last_value[None]])  # [T + 1, B]
    advantage, target = targets(rollout, value, args)
    rows = (rollout.obs[:-1], rollout.action, rollout.extras["logprob"], advantage, target, rollout.valid)
    return Batch(*(x.reshape(-1, *x.shape[2:]) for x in rows))


# same as ppo.py
class Moments(NamedTuple):
    """Of a minibatch's valid rows, over all shards."""

    rows: jax.Array  # how many
    mean: jax.Array  # of the advantages
    squares: jax.Array  # the sum of their squared distances from it


# same as ppo.py
def measured(batch: Batch, index: jax.Array) -> Moments:
    """Of each minibatch of an update, [M]. The parameters have no part in them, so two messages bring them all."""
    weight, advantage = each_shard(lambda batch, index: (batch.weight[index], batch.advantage[index]), batch, index)
    each = partial(each_shard, axes=2)  # [S / L, M, ...]
    count, mean = total(each(lambda w, a: (jnp.sum(w, dtype=jnp.float32), jnp.sum(w * a)), weight, advantage))
    count = jnp.maximum(1.0, count)
    means = jnp.broadcast_to(mean / count, weight.shape[:2])
    squares = total(each(lambda w, a, mean: jnp.sum(w * (a - mean) ** 2), weight, advantage, means))
    return Moments(count, means[0], squares)


# same as ppo.py
def normalize(batch: Batch, moments: Moments, args: Args) -> Batch:
    """One shard's rows with weights that sum to 1, and advantages of mean 0 and deviation 1, over all shards."""
    advantage = (batch.advantage - moments.mean) / (jnp.sqrt(moments.squares / moments.rows) + 1e-8)
    advantage = advantage if args.norm_adv else batch.advantage
    return batch._replace(advantage=advantage, weight=batch.weight / moments.rows)


# same as ppo.py
def loss(params: Any, batch: Batch, args: Args) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of a minibatch's loss: weighted sums, which add up to means over all shards."""
    logits, value = network(args).apply(params, batch.obs)
    log_ratio = log_prob(logits, batch.action) - batch.logprob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
    log_probs = jax.nn.log_softmax(logits)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(batch.weight * x)

    policy_loss = mean(-jnp.minimum(ratio * batch.advantage, clipped * batch.advantage))
    value_loss = 0.5 * mean((value - batch.target) ** 2)
    entropy = mean(-jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1))
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": mean((ratio - 1) - log_ratio),
        "losses/clipfrac": mean(jnp.abs(ratio - 1) > args.clip_coef),
    }
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, metrics


# same as ppo.py
def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, jax.Array]]:
    """Several epochs of minibatches, each drawn evenly from every shard."""
    batch = each_shard(partial(prepare, state.params, args=args), rollouts)  # [S / L, N, ...]

    def shuffled(key: jax.Array) -> jax.Array:
        order = partial(permutation, size=batch.weight.shape[1])
        epochs = jax.lax.map(lambda epoch: order(jax.random.fold_in(key, epoch)), jnp.arange(args.update_epochs))
        return epochs.reshape(args.update_epochs * args.num_minibatches, args.gradient_accumulation_steps, -1)

    def minibatch(state: State, drawn: tuple[jax.Array, Moments]) -> tuple[State, dict]:
        index, moments = drawn
        rows = jax.vmap(lambda batch, index: jax.tree.map(lambda x: x[index], batch))(batch, index)
        gradient = partial(jax.grad(partial(loss, args=args), has_aux=True), state.params)
        summed = each_shard(lambda rows: accumulate(gradient, normalize(rows, moments, args)), rows)
        grads, metrics = total(summed)
        step, opt_state = optimizer(args).update(grads, state.opt_state)
        metrics["charts/learning_rate"] = opt_state[1].hyperparams["learning_rate"]
        return State(optax.apply_updates(state.params, step), opt_state), metrics

    index = each_shard(shuffled, keys)  # [S / L, M, ...]
    drawn = (jnp.moveaxis(index, 1, 0), measured(batch, index))
    return jax.lax.scan(minibatch, state, drawn)


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
