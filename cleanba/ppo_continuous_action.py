"""PPO on continuous actions with lockstep actors (Schulman et al. 2017, arXiv:1707.06347).

Differs from the paper: bootstraps through truncation; normalizes advantages over the whole minibatch, observations and
rewards by running statistics.
Run:       python cleanba/ppo_continuous_action.py --env-id HalfCheetah-v4
Read next: sac_continuous_action.py (off-policy), core/shards.py (why the numbers cannot move)
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.linen.initializers import constant, orthogonal

from cleanba.core.actors import Actors
from cleanba.core.args import CoreArgs, parse
from cleanba.core.rollout import Acted, EnvStep, Rollout
from cleanba.core.run import Run
from cleanba.core.seeding import permutation
from cleanba.core.shards import Learner, State, accumulate, each_shard, total


@dataclass(frozen=True)
class Args(CoreArgs):
    """PPO on continuous actions."""

    env_id: str = "HalfCheetah-v4"
    """the environment: one of EnvPool's, or a registered Gymnasium environment (also as module:Name-v0)"""
    total_timesteps: int = 1_000_000
    """environment steps of the run; it is cut to whole updates"""
    num_envs: int = 8
    """environments, over all devices and processes"""
    num_steps: int = 256
    """steps of each environment in a rollout"""
    num_shards: int = 4
    """parts that environments and gradients are computed in; the largest number of learners"""
    concurrency: bool = False
    """collect rollout n with version n-1 while update n-1 runs; without: wait for version n, which learns more here"""
    learning_rate: float = 3e-4
    """step size of Adam"""
    anneal_lr: bool = True
    """let the step size fall linearly to zero over the run"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches of an epoch"""
    gradient_accumulation_steps: int = 1
    """parts that a minibatch's gradient is added up from, to save memory; the result is the same but for rounding"""
    update_epochs: int = 10
    """times that each rollout is gone through"""
    norm_adv: bool = True
    """normalize the advantages of each minibatch"""
    clip_coef: float = 0.2
    """how far the probability ratio may move"""
    ent_coef: float = 0.0
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
        self.check_continuous()
        return self


class Agent(nn.Module):
    """Two separate networks of two layers each."""

    action_shape: tuple[int, ...]

    @nn.compact
    def __call__(self, obs: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Means [B, ...], logarithms of deviations [...] and values [B] for observations [B, ...]."""
        x = obs.reshape(obs.shape[0], -1)

        def mlp(out: int, scale: float) -> jax.Array:
            h = x
            for _ in range(2):
                h = nn.tanh(nn.Dense(64, kernel_init=orthogonal(jnp.sqrt(2)), bias_init=constant(0))(h))
            return nn.Dense(out, kernel_init=orthogonal(scale), bias_init=constant(0))(h)

        mean = mlp(math.prod(self.action_shape), 0.01).reshape(-1, *self.action_shape)
        return mean, self.param("log_std", constant(0), self.action_shape), mlp(1, 1.0)[:, 0]


def network(args: Args) -> Agent:
    """The agent's network."""
    return Agent(args.env_spec.action_space.shape)


# same as ppo.py
def optimizer(args: Args) -> optax.GradientTransformation:
    """Adam, its step size falling after each update, not within one."""

    def learning_rate(step: jax.Array) -> jax.Array:
        done = step // (args.num_minibatches * args.update_epochs) / args.num_updates
        return args.learning_rate * (1.0 - done * args.anneal_lr)

    adam = optax.inject_hyperparams(optax.adam)(learning_rate=learning_rate, eps=1e-5)
    return optax.chain(optax.clip_by_global_norm(args.max_grad_norm), adam)


def init(key: jax.Array, args: Args) -> State:
    """The first parameters, optimizer state and statistics; a shard remembers the discounted returns so far."""
    shape = args.env_spec.observation_space.shape
    params = network(args).init(key, jnp.zeros((1, *shape)))
    opt_state = {"adam": optimizer(args).init(params), "returns": nothing_seen(())}
    return State({"network": params, "seen": nothing_seen(shape)}, opt_state, jnp.zeros(args.envs_per_shard))


def nothing_seen(shape: tuple[int, ...]) -> dict[str, jax.Array]:
    """Running statistics of nothing yet."""
    return {"mean": jnp.zeros(shape), "var": jnp.ones(shape), "count": jnp.float32(1e-4)}


def seen(stats: dict[str, jax.Array], x: jax.Array, weight: jax.Array) -> dict[str, jax.Array]:
    """Running statistics that have also seen x [S / L, T, B, ...] of all shards where weight is 1, [S / L, T, B]
    (Chan et al. 1979, Updating formulae and a pairwise algorithm for computing sample variances)."""

    def added(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.sum(x * weight.reshape(*weight.shape, *[1] * (x.ndim - 2)), axis=(0, 1))

    count = total(each_shard(lambda weight: jnp.sum(weight, dtype=jnp.float32), weight))
    mean = total(each_shard(added, x, weight)) / jnp.maximum(1.0, count)
    spread = total(each_shard(lambda x, weight: added((x - mean) ** 2, weight), x, weight))
    both, shift = stats["count"] + count, mean - stats["mean"]
    spread += stats["var"] * stats["count"] + shift**2 * stats["count"] * count / both
    return {"mean": stats["mean"] + shift * count / both, "var": spread / both, "count": both}


def normalized(obs: jax.Array, stats: dict[str, jax.Array]) -> jax.Array:
    """Observations of mean 0 and deviation 1, at most 10."""
    return jnp.clip((obs - stats["mean"]) / jnp.sqrt(stats["var"] + 1e-8), -10, 10)


def act(params: Any, step: EnvStep, carry: Any, key: jax.Array, args: Args) -> Acted:
    """Sample an action for each of a shard's B environments."""
    mean, log_std, value = network(args).apply(params["network"], normalized(step.obs, params["seen"]))
    drawn = mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape)  # [B, ...]
    extras = {"drawn": drawn, "logprob": log_prob(mean, log_std, drawn), "value": value}
    return Acted(jnp.clip(drawn, *args.env_spec.action_bounds), carry, extras)


def log_prob(mean: jax.Array, log_std: jax.Array, drawn: jax.Array) -> jax.Array:
    """The logarithm of the density of what was drawn, before it was cut to the bounds: [B, ...] -> [B]."""
    each = -0.5 * ((drawn - mean) / jnp.exp(log_std)) ** 2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
    return jnp.sum(each.reshape(len(each), -1), axis=-1)


def discounted(so_far: jax.Array, rollout: Rollout, args: Args) -> tuple[jax.Array, jax.Array]:
    """The discounted sum of an episode's rewards up to each step, [T, B], and what the next rollout goes on from."""

    def step(so_far: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
        reward, ended = row
        so_far = args.gamma * so_far + reward
        return so_far * ~ended, so_far

    so_far *= ~rollout.first[0]  # environments may have been made anew
    after, returns = jax.lax.scan(step, so_far, (rollout.reward, rollout.terminated | rollout.truncated))
    return returns, after


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


def prepare(params: Any, scale: jax.Array, rollout: Rollout, args: Args) -> Batch:
    """One shard's rollout as T * B rows, its rewards divided by `scale`."""
    rollout = rollout._replace(reward=jnp.clip(rollout.reward / scale, -10, 10))
    obs = normalized(rollout.obs, params["seen"])
    *_, last_value = network(args).apply(params["network"], obs[-1])
    value = jnp.concatenate([rollout.extras["value"], last_value[None]])  # [T + 1, B]
    advantage, target = targets(rollout, value, args)
    rows = (obs[:-1], rollout.extras["drawn"], rollout.extras["logprob"], advantage, target, rollout.valid)
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


def loss(params: Any, batch: Batch, args: Args) -> tuple[jax.Array, dict[str, jax.Array]]:
    """One shard's part of a minibatch's loss: weighted sums, which add up to means over all shards."""
    mean_action, log_std, value = network(args).apply(params, batch.obs)
    log_ratio = log_prob(mean_action, log_std, batch.action) - batch.logprob
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)

    def mean(x: jax.Array) -> jax.Array:
        return jnp.sum(batch.weight * x)

    policy_loss = mean(-jnp.minimum(ratio * batch.advantage, clipped * batch.advantage))
    value_loss = 0.5 * mean((value - batch.target) ** 2)
    entropy = mean(jnp.sum(log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)))
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": mean((ratio - 1) - log_ratio),
        "losses/clipfrac": mean(jnp.abs(ratio - 1) > args.clip_coef),
    }
    return policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss, metrics


def update(state: State, rollouts: Rollout, keys: jax.Array, args: Args) -> tuple[State, dict[str, jax.Array]]:
    """Several epochs of minibatches, each drawn evenly from every shard."""
    returns, memory = each_shard(partial(discounted, args=args), state.memory, rollouts)
    returns_seen = seen(state.opt_state["returns"], returns, rollouts.valid)
    scale = jnp.sqrt(returns_seen["var"] + 1e-8)
    batch = each_shard(partial(prepare, state.params, scale, args=args), rollouts)  # [S / L, N, ...]
    obs_seen = seen(state.params["seen"], rollouts.obs[:, :-1], jnp.ones_like(rollouts.reward))

    def shuffled(key: jax.Array) -> jax.Array:
        order = partial(permutation, size=batch.weight.shape[1])
        epochs = jax.lax.map(lambda epoch: order(jax.random.fold_in(key, epoch)), jnp.arange(args.update_epochs))
        return epochs.reshape(args.update_epochs * args.num_minibatches, args.gradient_accumulation_steps, -1)

    def minibatch(learned: tuple, drawn: tuple[jax.Array, Moments]) -> tuple[tuple, dict]:
        params, adam = learned
        index, moments = drawn
        rows = jax.vmap(lambda batch, index: jax.tree.map(lambda x: x[index], batch))(batch, index)
        gradient = partial(jax.grad(partial(loss, args=args), has_aux=True), params)
        summed = each_shard(lambda rows: accumulate(gradient, normalize(rows, moments, args)), rows)
        grads, metrics = total(summed)
        step, adam = optimizer(args).update(grads, adam)
        metrics["charts/learning_rate"] = adam[1].hyperparams["learning_rate"]
        return (optax.apply_updates(params, step), adam), metrics

    index = each_shard(shuffled, keys)  # [S / L, M, ...]
    drawn = (jnp.moveaxis(index, 1, 0), measured(batch, index))
    learned = (state.params["network"], state.opt_state["adam"])
    (params, adam), metrics = jax.lax.scan(minibatch, learned, drawn)
    # The statistics change with the version: an update learns with those that its parameters were learned with.
    return State({"network": params, "seen": obs_seen}, {"adam": adam, "returns": returns_seen}, memory), metrics


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
