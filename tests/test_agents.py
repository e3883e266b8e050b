"""Every kind of agent on the same core: any topology, exact resume; their targets and losses by hand."""

import os
import signal
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sessions import assert_same, checkpoints, end, finish, start, wait_for, wait_for_updates
from synthetic import bits, learn_from_the_start, random_rollout

from cleanba import (
    c51,
    ddpg_continuous_action,
    dqn,
    ppo_atari_lstm,
    ppo_continuous_action,
    sac_continuous_action,
    td3_continuous_action,
)
from cleanba.core.actors import Collector
from cleanba.core.replay import Transitions
from cleanba.core.rollout import Rollout
from cleanba.core.seeding import Role, key

REPLAY: dict[str, Any] = dict(
    num_envs=6, num_shards=3, num_steps=4, buffer_size=72, batch_size=12, learning_starts=24, train_frequency=12
)
SEQUENCES: dict[str, Any] = dict(
    num_envs=12, num_shards=3, num_steps=8, num_minibatches=2, update_epochs=1, total_timesteps=960
)
LSTM: dict[str, Any] = dict(env_id="CartPole-v1", network="mlp", observe=(0, 2))
AGENTS: list[tuple[ModuleType, dict[str, Any]]] = [  # OTHERS differ from these in what they compute alone
    (dqn, REPLAY),
    (sac_continuous_action, REPLAY | dict(env_id="Pendulum-v1")),
    # As many shards and minibatches as it takes for XLA to simplify `log_prob` otherwise for one learner, if it may.
    (ppo_continuous_action, SEQUENCES | dict(env_id="Pendulum-v1", num_envs=16, num_shards=8, num_minibatches=4)),
    (ppo_atari_lstm, SEQUENCES | LSTM),
]
OTHERS: list[tuple[ModuleType, dict[str, Any]]] = [
    (c51, REPLAY),
    (ddpg_continuous_action, REPLAY | dict(env_id="Pendulum-v1")),
    (td3_continuous_action, REPLAY | dict(env_id="Pendulum-v1")),
]


def each(agents: list[tuple[ModuleType, dict[str, Any]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("module", "sizes"), agents, ids=[module.__name__ for module, _ in agents])


EACH = each(AGENTS)


def name(module: ModuleType) -> str:
    return module.__name__.split(".")[-1]


def collected(module: ModuleType, args: Any, number: int) -> list[list[Rollout]]:
    """Real rollouts [number][shard] of the first policy."""
    params = jax.device_get(first_state(module, args).params)
    collector = Collector(module.act, params, args, range(args.num_shards), jax.local_devices()[0], Role.ACT)
    rollouts = [[jax.device_get(own[0]) for own in collector.collect(params, n)] for n in range(1, number + 1)]
    collector.close()
    return rollouts


@cache
def first_state(module: ModuleType, args: Any) -> Any:
    return jax.jit(partial(module.init, args=args))(key(args.seed, Role.INIT))


@each(AGENTS + OTHERS)  # what XLA makes of an expression is not known before
def test_an_update_does_not_know_how_many_learners_there_are(module: ModuleType, sizes: dict) -> None:
    rollouts = collected(module, module.Args(**sizes), 3)
    one, other = (
        learn_from_the_start(module, module.Args(**sizes, topology=t), rollouts) for t in ("a0-l0", "a0-l0,1")
    )
    assert bits(one[0]) == bits(other[0])
    assert one[1].keys() == other[1].keys()
    assert all(bits(memory) == bits(other[1][shard]) for shard, memory in one[1].items())
    assert one[2] == other[2]
    assert any(x.startswith("losses/") for x in one[2][-1])
    assert bits(one[0].params) != bits(first_state(module, module.Args(**sizes)).params)


def test_long_messages_between_processes_change_nothing(tmp_path: Path) -> None:
    """The critics' gradients are long enough to be summed in pieces by three learners and more."""
    sizes = "--env-id Pendulum-v1 --num-envs 4 --num-shards 4 --num-steps 4 --batch-size 8 --learning-starts 16"
    arguments, name = f"{sizes} --buffer-size 64 --total-timesteps 64", "td3_continuous_action"
    for topology in ("a0-l0", "a0-l0,1-d2"):
        finish(tmp_path / topology, f"{arguments} --topology {topology}", name=name)
    assert_same(tmp_path / "a0-l0", tmp_path / "a0-l0,1-d2")


@pytest.mark.parametrize(("module", "sizes"), [AGENTS[0], AGENTS[-1]], ids=["replay", "recurrent"])
def test_a_run_with_a_memory_goes_on_as_if_nothing_had_happened(
    module: ModuleType, sizes: dict, tmp_path: Path
) -> None:
    """Killed while it saves, then ended by a signal, then finished, each time on another topology."""
    steps = 30 * sizes["num_envs"] * sizes["num_steps"]
    experiment = sizes | dict(total_timesteps=steps, num_shards=3)
    words = []
    for option, value in experiment.items():
        each = value if isinstance(value, tuple) else (value,)
        words += [f"--{option.replace('_', '-')}", *map(str, each)]
    arguments, reference, run = " ".join(words), tmp_path / "reference", tmp_path / "run"
    said, _ = finish(reference, arguments, name=name(module))
    assert ("MiB, in 3 shards on their learners" in said) == (module is dqn)
    process = start(run, f"{arguments} --checkpoint-every 2 --topology a0-l0,1", name=name(module))
    wait_for(lambda: checkpoints(run), process)
    os.killpg(process.pid, signal.SIGKILL)
    end(process, -signal.SIGKILL)
    process = start(run, f"{arguments} --checkpoint-every 0 --topology a0,1-l0,1,2", name=name(module))
    wait_for_updates(run, process)
    process.send_signal(signal.SIGTERM)
    end(process, 128 + signal.SIGTERM)
    assert len(checkpoints(run)) > 1
    finish(run, arguments, name=name(module))
    assert_same(run, reference)


def batch_of(args: Any, rng: np.random.Generator, N: int = 4) -> Any:
    spec = args.env_spec
    shape = (N, *spec.observation_space.shape)
    obs, next_obs = (rng.normal(size=shape).astype(np.float32) for _ in range(2))
    if spec.action_space.shape:
        low, high = spec.action_bounds
        action: np.ndarray = rng.uniform(low, high, (N, *low.shape)).astype(np.float32)
    else:
        action = rng.integers(0, spec.num_actions, N).astype(np.int32)
    terminated, weight = np.arange(N) % 3 == 1, (np.arange(N) != 2).astype(np.float32)
    return Transitions(obs, action, rng.normal(size=N).astype(np.float32), terminated, next_obs, weight)  # type: ignore[arg-type]


def dense(params: Any, x: np.ndarray, first: int = 0, number: int = 3) -> np.ndarray:
    """Layers `first` and so on, in 64 bits."""
    for i in range(first, first + number):
        layer = params["params"][f"Dense_{i}"]
        x = x @ np.float64(layer["kernel"]) + np.float64(layer["bias"])
        x = np.maximum(0, x) if i < first + number - 1 else x
    return x


def test_the_loss_of_dqn() -> None:
    args = dqn.Args(**REPLAY)
    params, target = (jax.device_get(first_state(dqn, dqn.Args(**REPLAY, seed=s)).params["network"]) for s in (1, 2))
    batch = batch_of(args, np.random.default_rng(0))
    wanted = 0.0
    for i in range(4):
        following = 0.0 if batch.terminated[i] else dense(target, batch.next_obs[i]).max()
        error = dense(params, batch.obs[i])[batch.action[i]] - (batch.reward[i] + args.gamma * following)
        wanted += batch.weight[i] * error**2 / args.batch_size
    assert dqn.loss(params, target, batch, args)[0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("sharpness", [1, 100])
def test_the_loss_of_c51(sharpness: int) -> None:
    sizes = REPLAY | dict(n_atoms=11, v_min=-5.0, v_max=5.0)
    args = c51.Args(**sizes)
    params, target = (jax.device_get(first_state(c51, c51.Args(**sizes, seed=s)).params["network"]) for s in (1, 2))
    params = jax.tree.map(lambda x: x * np.float32(sharpness ** (1 / 3)), params)  # of three layers
    batch = batch_of(args, np.random.default_rng(0))

    def distribution(params: Any, obs: np.ndarray) -> np.ndarray:
        logits = dense(params, obs).reshape(2, 11)
        return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    wanted, is_sharp = 0.0, False
    for i in range(4):
        probs = distribution(target, batch.next_obs[i])
        best = probs[np.argmax(probs @ np.arange(-5, 6))]
        projected = np.zeros(11)
        for p, atom in zip(best, range(-5, 6), strict=True):
            place = np.clip(batch.reward[i] + args.gamma * (not batch.terminated[i]) * atom, -5, 5) + 5
            low = int(np.floor(place))
            projected[low] += p * (low + 1 - place)
            if place > low:
                projected[low + 1] += p * (place - low)
        predicted = distribution(params, batch.obs[i])[batch.action[i]]
        is_sharp |= predicted.min() < 1e-5
        wanted -= batch.weight[i] * projected @ np.log(predicted) / args.batch_size
    assert is_sharp == (sharpness > 1)
    assert c51.loss(params, target, batch, args)[0] == pytest.approx(wanted, rel=1e-4)


def continuous(module: ModuleType) -> tuple[Any, dict, dict, Any]:
    args = module.Args(**REPLAY, env_id="Pendulum-v1")
    params, target = (
        jax.device_get(first_state(module, module.Args(**REPLAY, env_id="Pendulum-v1", seed=seed)).params)
        for seed in (1, 2)
    )
    return args, params, target, batch_of(args, np.random.default_rng(0))


def test_the_loss_of_ddpg() -> None:
    args, params, target, batch = continuous(ddpg_continuous_action)

    def value(params: Any, obs: np.ndarray, action: np.ndarray) -> float:
        return dense(params["critic"], np.concatenate([obs, action])).item()

    wanted, worth = 0.0, 0.0
    for i in range(4):
        following = value(target, batch.next_obs[i], np.tanh(dense(target["actor"], batch.next_obs[i])))
        aim = batch.reward[i] + args.gamma * (not batch.terminated[i]) * following
        error = value(params, batch.obs[i], batch.action[i] / 2) - aim  # Pendulum's actions go from -2 to 2
        wanted += batch.weight[i] * error**2 / args.batch_size
        action = np.tanh(dense(params["actor"], batch.obs[i]))
        worth += batch.weight[i] * value(params, batch.obs[i], action) / args.batch_size
    assert ddpg_continuous_action.loss(params["critic"], target, batch, args)[0] == pytest.approx(wanted, rel=1e-4)
    actor_loss = ddpg_continuous_action.actor_loss(params["actor"], params["critic"], batch, args)
    assert actor_loss == pytest.approx(-worth, rel=1e-4)


def twin(params: Any, obs: np.ndarray, action: np.ndarray) -> np.ndarray:
    return np.array([dense(params["critic"], np.concatenate([obs, action]), first).item() for first in (0, 3)])


def test_the_loss_of_td3() -> None:
    args, params, target, batch = continuous(td3_continuous_action)
    noise = np.asarray(jax.random.normal(jax.random.key(7), (4, 1))) * args.policy_noise
    wanted, worth = 0.0, 0.0
    for i in range(4):
        action = np.tanh(dense(target["actor"], batch.next_obs[i])) + np.clip(
            noise[i], -args.noise_clip, args.noise_clip
        )
        following = twin(target, batch.next_obs[i], np.clip(action, -1, 1)).min()
        aim = batch.reward[i] + args.gamma * (not batch.terminated[i]) * following
        errors = twin(params, batch.obs[i], batch.action[i] / 2) - aim
        wanted += batch.weight[i] * (errors**2).sum() / args.batch_size
        action = np.tanh(dense(params["actor"], batch.obs[i]))
        worth += batch.weight[i] * twin(params, batch.obs[i], action)[0] / args.batch_size
    loss, _ = td3_continuous_action.loss(params["critic"], target, batch, jax.random.key(7), args)
    assert loss == pytest.approx(wanted, rel=1e-4)
    actor_loss = td3_continuous_action.actor_loss(params["actor"], params["critic"], batch, args)
    assert actor_loss == pytest.approx(-worth, rel=1e-4)


def test_the_losses_of_sac() -> None:
    args, params, target, batch = continuous(sac_continuous_action)
    params["log_alpha"] = np.float32(-0.7)
    alpha = np.exp(-0.7)

    def draw(obs: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, float]:
        actor = params["actor"]
        hidden = np.maximum(0, dense(actor, np.maximum(0, dense(actor, obs, 0, 1)), 1, 1))
        mean, raw = (dense(actor, hidden, i, 1) for i in (2, 3))
        deviation = np.exp(-5 + 3.5 * (np.tanh(raw) + 1))
        x = mean + deviation * noise
        density = np.exp(-(((x - mean) / deviation) ** 2) / 2) / (deviation * np.sqrt(2 * np.pi))
        return np.tanh(x), float(np.log(density / (1 - np.tanh(x) ** 2)).sum())

    noise = np.asarray(jax.random.normal(jax.random.key(7), (4, 1)))
    wanted, policy = 0.0, 0.0
    for i in range(4):
        action, log_prob = draw(batch.next_obs[i], noise[i])
        following = twin(target, batch.next_obs[i], action).min() - alpha * log_prob
        aim = batch.reward[i] + args.gamma * (not batch.terminated[i]) * following
        errors = twin(params, batch.obs[i], batch.action[i] / 2) - aim
        wanted += batch.weight[i] * (errors**2).sum() / args.batch_size
        action, log_prob = draw(batch.obs[i], noise[i])
        policy += batch.weight[i] * (alpha * log_prob - twin(params, batch.obs[i], action).min()) / args.batch_size
    key = jax.random.key(7)
    loss, _ = sac_continuous_action.loss(params["critic"], params, target["critic"], batch, key, args)
    assert loss == pytest.approx(wanted, rel=1e-3)
    actor_loss, _ = sac_continuous_action.actor_loss(params["actor"], params, batch, key, args)
    assert actor_loss == pytest.approx(policy, rel=1e-3)


class TestContinuousPpo:
    args = ppo_continuous_action.Args(**SEQUENCES, env_id="Pendulum-v1")

    def test_the_density_of_an_action(self) -> None:
        rng = np.random.default_rng(0)
        mean, drawn, log_std = rng.normal(size=(5, 3)), rng.normal(size=(5, 3)), np.array([-1.0, 0.0, 0.5])
        density = np.exp(-(((drawn - mean) / np.exp(log_std)) ** 2) / 2) / (np.exp(log_std) * np.sqrt(2 * np.pi))
        found = ppo_continuous_action.log_prob(jnp.array(mean), jnp.array(log_std), jnp.array(drawn))
        np.testing.assert_allclose(found, np.log(density).sum(axis=1), rtol=1e-4)

    def test_running_statistics_are_those_of_everything_seen(self) -> None:
        rollouts = collected(ppo_continuous_action, self.args, 3)
        state, _, _ = learn_from_the_start(ppo_continuous_action, self.args, rollouts)
        seen = np.concatenate([own.obs[:-1].reshape(-1, 3) for shards in rollouts for own in shards])
        stats = state.params["seen"]
        np.testing.assert_allclose(stats["mean"], seen.mean(axis=0), atol=1e-4)
        np.testing.assert_allclose(stats["var"], seen.var(axis=0), rtol=1e-3)
        assert stats["count"] == pytest.approx(len(seen), rel=1e-6)

    def test_rewards_are_scaled_by_the_deviation_of_discounted_returns(self) -> None:
        rng = np.random.default_rng(0)
        rollouts = [random_rollout(rng, 8, 4, D=3) for _ in range(3)]
        so_far, returns = np.zeros(4), []
        for rollout in rollouts:
            found, after = ppo_continuous_action.discounted(jnp.float32(so_far), rollout, self.args)
            for t in range(8):
                so_far = self.args.gamma * so_far + rollout.reward[t]
                np.testing.assert_allclose(found[t], so_far, rtol=1e-4, atol=1e-5)
                returns.append(so_far)
                so_far = np.where(rollout.terminated[t] | rollout.truncated[t], 0, so_far)
            np.testing.assert_allclose(after, so_far, rtol=1e-4, atol=1e-5)


class TestMemory:
    args = ppo_atari_lstm.Args(**SEQUENCES, **LSTM)

    def test_a_sequence_gives_what_its_steps_gave(self) -> None:
        """The memory passes from step to step and from rollout to rollout, and is empty when an episode begins."""
        params = first_state(ppo_atari_lstm, self.args).params
        rollouts = collected(ppo_atari_lstm, self.args, 4)
        assert any(own.first[1:].any() for shards in rollouts for own in shards)
        for before, after in pairwise(rollouts):
            for own, following in zip(before, after, strict=True):
                network = ppo_atari_lstm.network(self.args)
                carry, _, value = network.apply(params, own.carry, own.obs[:-1], own.first[:-1])
                np.testing.assert_allclose(value, own.extras["value"], rtol=1e-4, atol=1e-5)
                for a, b in zip(carry, following.carry, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)

    def test_what_is_not_observed_does_not_matter(self) -> None:
        params = first_state(ppo_atari_lstm, self.args).params
        obs = np.random.default_rng(0).normal(size=(1, 2, 4)).astype(np.float32)
        hidden = obs.copy()
        hidden[..., [1, 3]] += 1
        run = partial(ppo_atari_lstm.network(self.args).apply, params, ppo_atari_lstm.no_memory(2))
        first = np.ones((1, 2), bool)
        assert bits(run(obs, first)) == bits(run(hidden, first))
