"""SAC and TD3 in plain PyTorch, one environment and one gradient step a step, as CleanRL has them: a yardstick.

Run:   PEERS_PYTHON benchmarks/torch_off_policy.py sac HalfCheetah-v4 1500
Prints one line: steps/s while it learns. `benchmarks/off_policy.py` calls it with the peers' Python.
"""

import copy
import sys
import time

import envpool
import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

WARM_UP, BATCH, GAMMA, TAU, ROWS = 1_000, 256, 0.99, 0.005, 1_000_000


class Mlp(nn.Module):
    """Two layers of 256."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, outputs)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """The head's outputs."""
        return self.head(self.layers(torch.cat(inputs, 1)))


class Agent:
    """Twin critics, their targets and a policy."""

    def __init__(self, num_obs: int, num_actions: int, is_sac: bool):
        self.is_sac, self.num_actions = is_sac, num_actions
        self.actor = Mlp(num_obs, 2 * num_actions if is_sac else num_actions)
        self.critics = nn.ModuleList([Mlp(num_obs + num_actions, 1) for _ in range(2)])
        self.target_actor, self.targets = copy.deepcopy(self.actor), copy.deepcopy(self.critics)
        self.log_alpha = torch.zeros(1, requires_grad=True)
        self.critic_adam = torch.optim.Adam(self.critics.parameters(), lr=1e-3)
        self.actor_adam = torch.optim.Adam(self.actor.parameters(), lr=3e-4)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr=1e-3)

    def draw(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """SAC's action and the logarithm of its density."""
        mean, log_std = self.actor(obs).chunk(2, 1)
        log_std = -5 + 3.5 * (torch.tanh(log_std) + 1)
        normal = torch.distributions.Normal(mean, log_std.exp())
        x = normal.rsample()
        action = torch.tanh(x)
        return action, (normal.log_prob(x) - torch.log(1 - action.pow(2) + 1e-6)).sum(1)

    @torch.no_grad()
    def act(self, obs: torch.Tensor) -> np.ndarray:
        """With exploration."""
        if self.is_sac:
            return self.draw(obs)[0].numpy()
        action = torch.tanh(self.actor(obs))
        return (action + 0.1 * torch.randn_like(action)).clamp(-1, 1).numpy()

    def learn(self, batch: list[torch.Tensor], step: int) -> None:
        """One gradient step; the policy's come in pairs at every second (SAC), or one at every second (TD3)."""
        obs, following, action, reward, terminated = batch
        with torch.no_grad():
            if self.is_sac:
                chosen, log_prob = self.draw(following)
            else:
                noise = (0.2 * torch.randn_like(action)).clamp(-0.5, 0.5)
                chosen = (torch.tanh(self.target_actor(following)) + noise).clamp(-1, 1)
            value = torch.min(*(q(following, chosen) for q in self.targets))[:, 0]
            if self.is_sac:
                value = value - self.log_alpha.exp() * log_prob
            goal = reward + GAMMA * (1 - terminated) * value
        loss = sum(mse_loss(q(obs, action)[:, 0], goal) for q in self.critics)
        self.critic_adam.zero_grad()
        loss.backward()
        self.critic_adam.step()
        if step % 2 == 0:
            for _ in range(2 if self.is_sac else 1):
                self.improve(obs)
            if not self.is_sac:
                self.follow(self.actor, self.target_actor)
        if self.is_sac or step % 2 == 0:
            self.follow(self.critics, self.targets)

    def improve(self, obs: torch.Tensor) -> None:
        """A gradient step of the policy, and of the entropy's weight."""
        if self.is_sac:
            action, log_prob = self.draw(obs)
            loss = (self.log_alpha.exp() * log_prob - torch.min(*(q(obs, action) for q in self.critics))[:, 0]).mean()
        else:
            loss = -self.critics[0](obs, torch.tanh(self.actor(obs))).mean()
        self.actor_adam.zero_grad()
        loss.backward()
        self.actor_adam.step()
        if self.is_sac:
            with torch.no_grad():
                log_prob = self.draw(obs)[1]
            loss = (-self.log_alpha.exp() * (log_prob - self.num_actions)).mean()
            self.alpha_adam.zero_grad()
            loss.backward()
            self.alpha_adam.step()

    @staticmethod
    def follow(network: nn.Module, target: nn.Module) -> None:
        """Move a target network."""
        for own, other in zip(network.parameters(), target.parameters(), strict=True):
            other.data.copy_(TAU * own.data + (1 - TAU) * other.data)


def main(name: str, env_id: str, steps: int) -> None:
    """Learn for that many steps, after as many as fill the first batches."""
    env = envpool.make_gymnasium(env_id, num_envs=1)
    num_obs, num_actions = env.observation_space.shape[0], env.action_space.shape[0]
    agent = Agent(num_obs, num_actions, name == "sac")
    widths = (num_obs, num_obs, num_actions, 1, 1)
    memory = [np.zeros((ROWS, width), np.float32) for width in widths]
    obs = env.reset()[0]
    start = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP + steps // 10:
            start = time.perf_counter()
        seen = torch.as_tensor(obs, dtype=torch.float32)
        action = agent.act(seen) if step >= WARM_UP else np.random.uniform(-1, 1, (1, num_actions))
        following, reward, terminated, truncated, _ = env.step(action.astype(env.action_space.dtype))
        for ring, row in zip(memory, (obs, following, action, reward, terminated), strict=True):
            ring[step] = row
        obs = env.reset()[0] if terminated[0] or truncated[0] else following
        if step >= WARM_UP:
            rows = np.random.randint(0, step + 1, BATCH)
            batch = [torch.as_tensor(ring[rows]) for ring in memory]
            agent.learn([*batch[:3], batch[3][:, 0], batch[4][:, 0]], step)
    print((steps - steps // 10) / (time.perf_counter() - start))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
