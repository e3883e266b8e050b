"""Samples per second of the gradient of NatureCNN or IMPALA's ResNet by PyTorch. Runs in the peers' environment.

Run:  python benchmarks/torch_gradients.py nature 128 2         (network, batch, threads)
"""

import sys
import time

import torch
from torch import nn


class Residual(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape."""
        return x + self.body(x)


def network(name: str) -> nn.Sequential:
    """The network, with 18 actions."""
    if name == "nature":
        layers = [
            nn.Conv2d(4, 32, 8, 4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
        ]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 19))
    layers, last = [], 4
    for channels in (16, 32, 32):
        layers += [
            nn.Conv2d(last, channels, 3, padding=1),
            nn.MaxPool2d(3, 2, 1),
            Residual(channels),
            Residual(channels),
        ]
        last = channels
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(3872, 256), nn.ReLU(), nn.Linear(256, 19))


def main() -> None:
    """Print the speed of some seconds."""
    name, batch, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    net, obs = network(name), torch.randint(0, 255, (batch, 4, 84, 84), dtype=torch.uint8)
    done, start = -2, 0.0
    while done < 1 or time.perf_counter() - start < 4.0:
        if done == 0:
            start = time.perf_counter()
        net.zero_grad()
        net(obs.float() / 255.0).square().mean().backward()
        done += 1
    print(done * batch / (time.perf_counter() - start))


if __name__ == "__main__":
    main()
