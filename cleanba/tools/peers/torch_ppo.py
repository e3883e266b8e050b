"""PPO in plain PyTorch on a workload, one file as CleanRL's are: the yardstick of docs/performance.md."""

import json
import sys

import numpy as np
import torch
from torch import nn
from work import Meter, make_envs

work = json.loads(sys.argv[1])
envs, meter = make_envs(work), Meter(work["steps"])
N, T, gamma, clip = work["num_envs"], work["num_steps"], work["gamma"], work["clip_coef"]
shape, num_actions = envs.observation_space.shape, int(envs.action_space.n)


def layer(module: nn.Linear | nn.Conv2d, scale: float = 2**0.5) -> nn.Module:
    """Orthogonal weights, no bias."""
    nn.init.orthogonal_(module.weight, scale)
    nn.init.zeros_(module.bias)
    return module


class Frames(nn.Module):
    """NatureCNN with two heads."""

    def __init__(self) -> None:
        super().__init__()
        convolutions = [layer(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), layer(nn.Conv2d(32, 64, 4, 2)), nn.ReLU()]
        convolutions += [layer(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten()]
        self.torso = nn.Sequential(*convolutions, layer(nn.Linear(3136, 512)), nn.ReLU())
        self.policy, self.value = layer(nn.Linear(512, num_actions), 0.01), layer(nn.Linear(512, 1), 1.0)

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and values."""
        x = self.torso(obs.float() / 255.0)
        return self.policy(x), self.value(x)[:, 0]


class Vectors(nn.Module):
    """Two networks of two tanh layers."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(
                nn.Flatten(),
                layer(nn.Linear(int(np.prod(shape)), 64)),
                nn.Tanh(),
                layer(nn.Linear(64, 64)),
                nn.Tanh(),
                layer(nn.Linear(64, out), scale),
            )
            for out, scale in ((num_actions, 0.01), (1, 1.0))
        )

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and values."""
        return self.policy(obs), self.value(obs)[:, 0]


agent = Frames() if len(shape) == 3 else Vectors()
adam = torch.optim.Adam(agent.parameters(), lr=work["learning_rate"], eps=1e-5)
kind = torch.uint8 if len(shape) == 3 else torch.float32
obs, action = torch.zeros((T, N, *shape), dtype=kind), torch.zeros((T, N), dtype=torch.long)
log_prob, reward, ended, value = (torch.zeros((T, N)) for _ in range(4))
now = torch.as_tensor(np.asarray(envs.reset()[0])).to(kind)
is_last = False
while not is_last:
    with torch.no_grad():
        for t in range(T):
            logits, value[t] = agent(now)
            policy = torch.distributions.Categorical(logits=logits)
            obs[t], action[t] = now, policy.sample()
            log_prob[t] = policy.log_prob(action[t])
            seen, gained, terminated, truncated, _ = envs.step(action[t].numpy().astype(np.int32))
            now = torch.as_tensor(seen).to(kind)
            reward[t] = torch.as_tensor(np.asarray(gained, np.float32))
            ended[t] = torch.as_tensor((terminated | truncated).astype(np.float32))
        following, advantage, carried = agent(now)[1], torch.zeros((T, N)), torch.zeros(N)
        for t in reversed(range(T)):
            carried = (
                reward[t]
                + gamma * (1 - ended[t]) * following
                - value[t]
                + (gamma * work["gae_lambda"] * (1 - ended[t]) * carried)
            )
            advantage[t], following = carried, value[t]
    rows = [x.reshape(-1, *x.shape[2:]) for x in (obs, action, log_prob, advantage, advantage + value)]
    for _ in range(work["update_epochs"]):
        for index in torch.randperm(N * T).split(N * T // work["num_minibatches"]):
            seen, did, old, gain, target = (x[index] for x in rows)
            logits, guess = agent(seen)
            policy = torch.distributions.Categorical(logits=logits)
            ratio = (policy.log_prob(did) - old).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - clip, 1 + clip)).mean()
            loss = loss - work["ent_coef"] * policy.entropy().mean()
            loss = loss + work["vf_coef"] * 0.5 * ((guess - target) ** 2).mean()
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), work["max_grad_norm"])
            adam.step()
    is_last = meter.updated()
