"""Targets, losses, optimizers and whole updates of the algorithm files, against plain NumPy and an oracle."""

import functools
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle_env import GAMMA
from synthetic import A, TinyNetwork, bits, learn, random_rollout, random_rollouts, stack, tiny_network

from cleanba import impala_atari, ppo, ppo_atari
from cleanba.core.actors import Collector
from cleanba.core.rollout import Acted, Rollout
from cleanba.core.seeding import Role
from cleanba.core.topology import LEARNER

PPO = [ppo, ppo_atari]
impala_targets: Any = impala_atari.targets  # takes NumPy arrays as well


def segment(rollout: Rollout, s: int, b: int) -> list[int]:
    """The rows from s to the end of its episode or of the rollout."""
    rows = []
    for t in range(s, len(rollout.reward)):
        rows.append(t)
        if rollout.terminated[t, b] or rollout.truncated[t, b]:
            break
    return rows


def temporal_difference(rollout: Rollout, value: np.ndarray, t: int, b: int, gamma: float) -> float:
    following = 0.0 if rollout.terminated[t, b] else float(value[t + 1, b])
    return float(rollout.reward[t, b]) + gamma * following - float(value[t, b])


def plain_gae(rollout: Rollout, value: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Schulman et al. 2016, eq. 16: a discounted sum of temporal differences. NaN on invalid rows."""
    result = np.full(rollout.reward.shape, np.nan)
    for s, b in np.argwhere(rollout.valid):
        deltas = [temporal_difference(rollout, value, t, b, gamma) for t in segment(rollout, s, b)]
        result[s, b] = sum((gamma * lam) ** i * delta for i, delta in enumerate(deltas))
    return result


def plain_vtrace(
    rollout: Rollout, value: np.ndarray, log_ratio: np.ndarray, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Espeholt et al. 2018, eq. 1 and section 4.2. NaN on invalid rows."""
    rho = np.minimum(1.0, np.exp(log_ratio.astype(np.float64)))
    target, advantage = np.full((2, *rollout.reward.shape), np.nan)
    for s, b in np.argwhere(rollout.valid):
        total, trace = 0.0, 1.0
        for i, t in enumerate(segment(rollout, s, b)):
            total += gamma**i * trace * rho[t, b] * temporal_difference(rollout, value, t, b, gamma)
            trace *= rho[t, b]
        target[s, b] = value[s, b] + total
    for s, b in np.argwhere(rollout.valid):
        if rollout.terminated[s, b]:
            following = 0.0
        elif rollout.truncated[s, b] or s + 1 == len(target):
            following = float(value[s + 1, b])
        else:
            following = target[s + 1, b]
        advantage[s, b] = rho[s, b] * (rollout.reward[s, b] + gamma * following - value[s, b])
    return advantage, target


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return x - np.log(np.sum(np.exp(x), -1, keepdims=True))


def assert_close(actual: Any, expected: Any, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=atol)


def assert_close_where(valid: np.ndarray, actual: Any, expected: np.ndarray) -> None:
    actual = np.asarray(actual)
    assert actual.shape == expected.shape
    assert_close(actual[valid], expected[valid])


@pytest.mark.parametrize("module", PPO)
@pytest.mark.parametrize("seed", range(3))
def test_gae_equals_the_plain_sum(module: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rollout, value = random_rollout(rng, 20, 50), rng.normal(size=(21, 50)).astype(np.float32)
    assert (~rollout.valid).any()
    assert rollout.terminated.any()
    assert rollout.truncated.any()
    args = module.Args(gamma=0.93, gae_lambda=0.8)
    advantage, target = module.targets(rollout, value, args)
    expected = plain_gae(rollout, value, 0.93, 0.8)
    assert_close_where(rollout.valid, advantage, expected)
    assert_close_where(rollout.valid, target, expected + value[:-1])


@pytest.mark.parametrize("seed", range(3))
def test_vtrace_equals_the_plain_sum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rollout, value = random_rollout(rng, 20, 50), rng.normal(size=(21, 50)).astype(np.float32)
    log_ratio = rng.normal(size=(20, 50)).astype(np.float32)
    advantage, target = impala_targets(rollout, value, log_ratio, impala_atari.Args(gamma=0.93))
    expected_advantage, expected_target = plain_vtrace(rollout, value, log_ratio, 0.93)
    assert_close_where(rollout.valid, target, expected_target)
    assert_close_where(rollout.valid, advantage, expected_advantage)


def oracle_act(params: Any, step: Any, carry: Any, key: jax.Array, args: Any) -> Acted:
    action = jax.random.randint(key, step.first.shape, 0, 2)
    logprob = jax.random.normal(jax.random.fold_in(key, 1), step.first.shape)
    return Acted(action, carry, {"value": step.obs[:, 0], "logprob": logprob})


class OracleNetwork:
    """The value is what the observation says."""

    @staticmethod
    def apply(params: Any, obs: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((obs.shape[0], 2)), obs[:, 0]


def test_the_oracle_leaves_no_error_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real rollouts, real preparation, real loss: with a perfect value nothing is left to correct on any valid row."""
    for module in (ppo, ppo_atari, impala_atari):
        monkeypatch.setattr(module, "network", lambda args: OracleNetwork)
    sizes = dict(env_id="oracle_env:Oracle-v0", num_envs=12, num_shards=2, num_steps=7, gamma=GAMMA)
    args = ppo.Args(**sizes)  # type: ignore[arg-type]
    impala_args = impala_atari.Args(**sizes)  # type: ignore[arg-type]
    collector = Collector(oracle_act, None, args, [0, 1], jax.local_devices()[0], Role.ACT)
    seen: dict[str, int] = {}
    prepare = [jax.jit(partial(module.prepare, {}, args=args)) for module in PPO]
    vtrace = jax.jit(partial(impala_atari.targets, args=impala_args))
    impala_loss = jax.jit(partial(impala_atari.loss, {}, args=impala_args))
    for n in range(1, 13):
        for rollout, *_ in collector.collect({}, n):
            value = rollout.obs[..., 0]
            for prepared in prepare:
                batch = prepared(rollout)
                keep = rollout.valid.reshape(-1)
                assert np.array_equal(batch.weight, keep)
                assert_close(np.asarray(batch.advantage)[keep], 0, atol=1e-5)
                assert_close(np.asarray(batch.target)[keep], value[:-1].reshape(-1)[keep], atol=1e-5)
            log_ratio = -rollout.extras["logprob"] - np.log(2)
            advantage, target = vtrace(rollout, value, log_ratio)
            assert_close(np.asarray(advantage)[rollout.valid], 0, atol=1e-5)
            assert_close(np.asarray(target)[rollout.valid], value[:-1][rollout.valid], atol=1e-5)
            _, metrics = impala_loss(rollout)
            assert metrics["losses/value_loss"] < 1e-8
            assert abs(metrics["losses/policy_loss"]) < 1e-4
            ended = rollout.terminated | rollout.truncated
            for name, rows in {
                "terminated": rollout.terminated,
                "truncated": rollout.truncated,
                "terminated in the last row": rollout.terminated[-1],
                "truncated in the last row": rollout.truncated[-1],
                "going on over the border": rollout.valid[-1] & ~ended[-1],
                "reset in the first row": ~rollout.valid[0],
                "reset": ~rollout.valid,
            }.items():
                seen[name] = seen.get(name, 0) + int(rows.sum())
    collector.close()
    assert all(count >= 5 for count in seen.values()), seen


def tiny_batch(rng: np.random.Generator, module: Any, args: Any, params: Any) -> Any:
    rollout = random_rollout(rng, args.num_steps, args.envs_per_shard)
    batch = module.prepare(params, rollout, args)
    weight = rollout.valid.reshape(-1) / rollout.valid.sum()
    return batch._replace(weight=weight.astype(np.float32))


@pytest.mark.parametrize("module", PPO)
def test_ppo_loss_and_gradient_equal_numpy(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "network", tiny_network)
    args = module.Args(num_envs=16, num_shards=1, num_steps=12, clip_coef=0.3, ent_coef=0.05, vf_coef=0.7)
    rng = np.random.default_rng(5)
    params = TinyNetwork.params(rng)
    batch = tiny_batch(rng, module, args, params)
    gradient, (value, metrics) = value_and_grad(module, params, batch, args)

    logp, v = log_softmax(batch.obs @ params["logits"]), batch.obs @ params["value"]
    onehot = np.eye(A)[batch.action]
    ratio = np.exp((logp * onehot).sum(1) - batch.logprob)
    adv, w = np.asarray(batch.advantage), batch.weight
    surrogate, clipped = ratio * adv, np.clip(ratio, 0.7, 1.3) * adv
    entropy = -(np.exp(logp) * logp).sum(1)
    policy_loss = -(w * np.minimum(surrogate, clipped)).sum()
    value_loss = 0.5 * (w * (v - batch.target) ** 2).sum()
    assert ((surrogate > clipped) & (w > 0)).any()
    assert_close(metrics["losses/policy_loss"], policy_loss)
    assert_close(metrics["losses/value_loss"], value_loss)
    assert_close(metrics["losses/entropy"], (w * entropy).sum())
    assert_close(metrics["losses/approx_kl"], (w * (ratio - 1 - np.log(ratio))).sum())
    assert_close(metrics["losses/clipfrac"], (w * (np.abs(ratio - 1) > 0.3)).sum())
    assert_close(value, policy_loss - 0.05 * (w * entropy).sum() + 0.7 * value_loss)

    through_policy = -adv * ratio * (surrogate <= clipped)
    of_logits = w[:, None] * (through_policy[:, None] * (onehot - np.exp(logp)) + 0.05 * entropy_slope(logp))
    of_value = w * 0.7 * (v - batch.target)
    assert_close(gradient["logits"], batch.obs.T @ of_logits)
    assert_close(gradient["value"], batch.obs.T @ of_value)


def entropy_slope(logp: np.ndarray) -> np.ndarray:
    """The gradient of minus the entropy by the logits."""
    entropy = -(np.exp(logp) * logp).sum(-1, keepdims=True)
    return np.exp(logp) * (logp + entropy)


def value_and_grad(module: Any, params: Any, batch: Any, args: Any) -> tuple[Any, tuple]:
    outcome, gradient = _value_and_grad(module.loss, module.network, args)(params, batch)
    return gradient, outcome


@functools.cache
def _value_and_grad(loss: Any, network: Any, args: Any) -> Any:
    """Compiled once for each network that a test puts in."""
    del network
    return jax.jit(jax.value_and_grad(partial(loss, args=args), has_aux=True))


def test_impala_loss_and_gradient_equal_numpy(tiny_impala: SimpleNamespace) -> None:
    args = tiny_impala.args(ent_coef=0.05, vf_coef=0.7, gamma=0.9)
    rng = np.random.default_rng(6)
    params, rollout = TinyNetwork.params(rng), random_rollout(rng, 12, 16)
    gradient, (value, metrics) = value_and_grad(tiny_impala.module, params, rollout, args)

    logp, v = log_softmax(rollout.obs[:-1] @ params["logits"]), rollout.obs @ params["value"]
    onehot = np.eye(A)[rollout.action]
    taken = (logp * onehot).sum(-1)
    log_ratio = taken - rollout.extras["logprob"]
    advantage, target = plain_vtrace(rollout, v, log_ratio, 0.9)
    adv, error = np.nan_to_num(advantage), np.where(rollout.valid, v[:-1] - target, 0)
    entropy = -(np.exp(logp) * logp).sum(-1) * rollout.valid
    policy_loss, value_loss = -(taken * adv).sum(), 0.5 * (error**2).sum()
    assert_close(metrics["losses/policy_loss"], policy_loss, rtol=1e-4, atol=1e-3)
    assert_close(metrics["losses/value_loss"], value_loss, rtol=1e-4, atol=1e-3)
    assert_close(metrics["losses/entropy"], entropy.sum(), rtol=1e-4, atol=1e-3)
    assert_close(metrics["steps"], rollout.valid.sum())
    assert_close(value, policy_loss - 0.05 * entropy.sum() + 0.7 * value_loss, rtol=1e-4, atol=1e-3)
    # Advantages and targets are constants here: no gradient goes through them.
    of_logits = -adv[..., None] * (onehot - np.exp(logp)) + 0.05 * entropy_slope(logp) * rollout.valid[..., None]
    assert_close(gradient["logits"], np.einsum("tbd,tba->da", rollout.obs[:-1], of_logits), rtol=1e-4, atol=1e-3)
    assert_close(gradient["value"], np.einsum("tbd,tb->d", rollout.obs[:-1], 0.7 * error), rtol=1e-4, atol=1e-3)


def on_one_learner(function: Any, *args: Any) -> Any:
    """Call it as an update would: with the learners' axis in scope."""
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()[:1]), (LEARNER,))
    spec = jax.sharding.PartitionSpec()
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(*args)


@pytest.mark.parametrize("module", PPO)
@pytest.mark.parametrize("norm_adv", [True, False])
def test_normalize_uses_the_valid_rows_of_all_shards(module: Any, norm_adv: bool) -> None:
    rng = np.random.default_rng(7)
    advantage = rng.normal(3, 5, (4, 36)).astype(np.float32)  # shards, rows
    valid = rng.random(advantage.shape) < 0.7
    advantage[~valid] = 1e6
    index = np.stack([rng.permutation(36).reshape(2, 2, 9) for _ in advantage])  # shards, minibatches, parts, rows
    args = module.Args(norm_adv=norm_adv)

    def normalized(batch: Any) -> list[Any]:
        moments = module.measured(batch, jnp.array(index))
        each = [(index[:, m], jax.tree.map(lambda x, m=m: x[m], moments)) for m in range(2)]
        rows = [jax.tree.map(lambda x, own=own: jnp.take_along_axis(x[:, None], own, 2), batch) for own, _ in each]
        return [module.normalize(own, moments, args) for own, (_, moments) in zip(rows, each, strict=True)]

    results = on_one_learner(normalized, module.Batch(*[advantage] * 5, weight=valid)._replace(advantage=advantage))
    for m, result in enumerate(results):
        raw, kept = (np.take_along_axis(x[:, None], index[:, m], 2) for x in (advantage, valid))
        values = raw[kept].astype(np.float64)
        expected = (values - values.mean()) / (values.std() + 1e-8) if norm_adv else values
        assert_close(np.asarray(result.advantage)[kept], expected, rtol=1e-4, atol=1e-4)
        assert_close(np.asarray(result.weight), kept / kept.sum(), rtol=1e-6)
        assert np.array_equal(result.target, raw)


def spoil_reset_rows(rollout: Rollout, rng: np.random.Generator) -> Rollout:
    """Everything that belongs to an invalid row alone is changed: its action and what was noted about it."""
    gone, noise = ~rollout.valid, rng.normal(size=(2, *rollout.valid.shape)).astype(np.float32)
    # After a cut, the value in the reset row is the one that the cut episode is bootstrapped from.
    unused = gone & ~np.pad(rollout.truncated, ((1, 0), (0, 0)))[:-1]
    logprob = np.where(gone, noise[0], rollout.extras["logprob"])
    value = np.where(unused, noise[1], rollout.extras["value"])
    action = np.where(gone, (rollout.action + 1) % A, rollout.action)
    return rollout._replace(action=action, extras={"logprob": logprob, "value": value})


def test_reset_rows_have_no_influence_on_an_update(tiny: SimpleNamespace) -> None:
    args = tiny.args()
    params = TinyNetwork.params(np.random.default_rng(8))
    rollouts = random_rollouts(9, args)
    # What follows a termination is seen in a reset row only; after a cut it is what the value is bootstrapped from.
    dark = [np.pad(r.terminated, ((1, 0), (0, 0)))[..., None] for r in rollouts]
    hidden = [r._replace(obs=np.where(d, np.float32(3), r.obs)) for r, d in zip(rollouts, dark, strict=True)]
    spoilt = [spoil_reset_rows(r, np.random.default_rng(10)) for r in hidden]
    assert any(d[:-1].any() for d in dark)
    plain, _ = learn(tiny.module, args, params, rollouts)
    other, _ = learn(tiny.module, args, params, spoilt)
    assert bits(plain.params) != bits(params)
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(other.params), strict=True):
        assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_gradient_accumulation_changes_nothing_but_rounding(tiny: SimpleNamespace) -> None:
    params = TinyNetwork.params(np.random.default_rng(11))
    rollouts = random_rollouts(12, tiny.args())
    once, metrics = learn(tiny.module, tiny.args(), params, rollouts)
    twice, twice_metrics = learn(tiny.module, tiny.args(gradient_accumulation_steps=2), params, rollouts)
    for a, b in zip(jax.tree.leaves(once.params), jax.tree.leaves(twice.params), strict=True):
        assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert metrics.keys() == twice_metrics.keys()
    for name, value in metrics.items():
        assert twice_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_ppo_update_equals_numpy(tiny_ppo: SimpleNamespace) -> None:
    """One epoch of one minibatch, without a limit on the norm: Adam's first step on the gradient of the mean loss."""
    args = tiny_ppo.args(num_minibatches=1, update_epochs=1, max_grad_norm=1e9, learning_rate=0.01)
    params = TinyNetwork.params(np.random.default_rng(13))
    rollouts = random_rollouts(14, args)
    state, metrics = learn(ppo, args, params, rollouts)
    batches = [ppo.prepare(params, rollout, args) for rollout in rollouts]
    batch: Any = jax.tree.map(lambda *x: np.concatenate(x), *batches)
    count = batch.weight.sum()
    mean, std = batch.advantage[batch.weight].mean(), batch.advantage[batch.weight].std()
    batch = batch._replace(weight=batch.weight / count, advantage=(batch.advantage - mean) / (std + 1e-8))
    gradient, (_, expected) = value_and_grad(ppo, params, batch, args)
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-4, abs=1e-6)
    for name, g in gradient.items():  # Adam's first step: the gradient by its size
        assert_close(state.params[name], params[name] - 0.01 * g / (abs(g) + 1e-5), rtol=1e-4, atol=1e-5)


def test_impala_sums_over_shards(tiny_impala: SimpleNamespace) -> None:
    """The gradient of a minibatch is the sum over all valid rows of all shards; minibatches are whole environments."""
    args = tiny_impala.args(max_grad_norm=1e9, anneal_lr=False, learning_rate=0.01)
    params: Any = TinyNetwork.params(np.random.default_rng(15))
    rollouts = random_rollouts(16, args)
    state, _ = learn(impala_atari, args, params, rollouts)
    square = {name: np.zeros_like(x) for name, x in params.items()}
    whole = stack(rollouts)
    for part in (slice(0, 4), slice(4, 8)):  # of each shard's eight environments
        halves = [jax.tree.map(lambda x, s=s: x[s][:, part], whole) for s in range(2)]  # noqa: B023
        gradients = [value_and_grad(impala_atari, params, half, args)[0] for half in halves]
        gradient = {name: np.asarray(gradients[0][name] + gradients[1][name]) for name in params}
        params, square = pytorch_rmsprop(params, gradient, square, 0.01)
    for name, x in params.items():
        assert_close(state.params[name], x, rtol=1e-4, atol=1e-5)


def pytorch_rmsprop(params: dict, gradient: dict, square: dict, lr: float) -> tuple[dict, dict]:
    """torch.optim.RMSprop(alpha=0.99, eps=0.01): eps is added to the root."""
    square = {k: 0.99 * square[k] + 0.01 * gradient[k] ** 2 for k in params}
    return {k: params[k] - lr * gradient[k] / (np.sqrt(square[k]) + 0.01) for k in params}, square


def test_rmsprop_is_pytorchs_and_anneals_after_each_update() -> None:
    args = impala_atari.Args(total_timesteps=4 * 128 * 20, num_minibatches=2, max_grad_norm=40.0)
    assert args.num_updates == 4
    rng = np.random.default_rng(17)
    params = {"w": rng.normal(size=7)}
    square = {"w": np.zeros(7)}
    optimizer = impala_atari.optimizer(args)
    mine: Any = {"w": jnp.asarray(params["w"], jnp.float32)}
    state = optimizer.init(mine)
    for step in range(8):
        gradient = {"w": rng.normal(size=7) * (100 if step == 3 else 1)}  # one of them is clipped
        norm = float(np.linalg.norm(gradient["w"]))
        clipped = {"w": gradient["w"] * min(1.0, 40.0 / norm)}
        params, square = pytorch_rmsprop(params, clipped, square, 6e-4 * (1 - step // 2 / 4))
        move, state = optimizer.update({"w": jnp.asarray(gradient["w"], jnp.float32)}, state)
        mine = jax.tree.map(jnp.add, mine, move)
        assert_close(mine["w"], params["w"], rtol=1e-5, atol=1e-6)


def test_the_learning_rate_falls_after_each_update(tiny: SimpleNamespace) -> None:
    args = tiny.args()
    params = TinyNetwork.params(np.random.default_rng(18))
    for updates in (1, 3):
        _, metrics = learn(tiny.module, args, params, random_rollouts(19, args), updates)
        assert metrics["charts/learning_rate"] == pytest.approx(args.learning_rate * (1 - (updates - 1) / 10))


def test_the_learning_rate_stays_without_annealing(tiny: SimpleNamespace) -> None:
    args = tiny.args(anneal_lr=False, num_minibatches=1)
    optimizer = tiny.module.optimizer(args)
    params = {"w": jnp.ones(2)}
    state = optimizer.init(params)
    for _ in range(10):
        _, state = optimizer.update(params, state)
    assert state[1].hyperparams["learning_rate"] == pytest.approx(args.learning_rate)
