"""Gradients of the Atari networks: the layers of core/layers.py, XLA's own convolution, and PyTorch, in turns.

Run:   python benchmarks/layers.py [--rounds 5]
Makes: benchmarks/results/layers-<cores>.md
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from cleanba import ppo_atari
from cleanba.tools.peers import install

ROOT = Path(__file__).parent.parent
LOOPS = 4  # gradients of one compiled call: a loop, as in an update
BATCHES = {"nature": 128, "impala": 32}


def native_conv(features: int, size: int, stride: int = 1, padding: str = "SAME", **options: Any) -> nn.Module:
    """XLA's own."""
    return nn.Conv(features, (size, size), (stride, stride), padding, **options)


def native_pool(x: jax.Array, size: int, stride: int) -> jax.Array:
    """XLA's own."""
    return nn.max_pool(x, (size, size), (stride, stride), "SAME")


def gradients(network: str, batch: int) -> Callable[[], float]:
    """A function that measures samples per second once; it is compiled here."""
    agent = ppo_atari.Agent(18, network)
    obs = jnp.asarray(np.random.default_rng(0).integers(0, 255, (LOOPS, batch, 4, 84, 84), np.uint8))
    params = agent.init(jax.random.key(0), obs[0, :1])

    def loss(params: Any, obs: jax.Array) -> jax.Array:
        logits, value = agent.apply(params, obs)
        return (logits**2).mean() + (value**2).mean()

    @jax.jit
    def some(params: Any, obs: jax.Array) -> Any:
        def one(params: Any, obs: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(lambda p, g: p - 1e-6 * g, params, jax.grad(loss)(params, obs)), None

        return jax.lax.scan(one, params, obs)[0]

    jax.block_until_ready(some(params, obs))

    def measure() -> float:
        start, calls = time.perf_counter(), 0
        while time.perf_counter() - start < 4.0:
            jax.block_until_ready(some(params, obs))
            calls += 1
        return calls * LOOPS * batch / (time.perf_counter() - start)

    return measure


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    os.environ["NPROC"] = str(cores)
    python = install()
    lines = [
        f"Made by `python benchmarks/layers.py {' '.join(sys.argv[1:])}` on {cores} cores; samples/s of forward and"
    ]
    lines += [f"backward, batches of {BATCHES}: median (smallest to largest); ratios are of one round.", ""]
    lines += ["| network | core/layers.py | XLA's own | PyTorch | of PyTorch | of XLA's own |", "| --- " * 6 + "|"]
    for network, batch in BATCHES.items():
        ours = gradients(network, batch)
        kept = ppo_atari.Conv, ppo_atari.max_pool
        ppo_atari.Conv, ppo_atari.max_pool = native_conv, native_pool  # type: ignore[misc, assignment]
        native = gradients(network, batch)
        ppo_atari.Conv, ppo_atari.max_pool = kept  # type: ignore[misc]
        command = [
            str(python),
            str(Path(__file__).with_name("torch_gradients.py")),
            network,
            str(batch),
            str(cores),
        ]

        def torch(command: list[str] = command) -> float:
            return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

        rounds = [(ours(), native(), torch()) for _ in range(options.rounds)]
        columns = [list(x) for x in zip(*rounds, strict=True)]
        columns += [[a / c for a, _, c in rounds], [a / b for a, b, _ in rounds]]
        cells = [
            f"{statistics.median(x):,.{digits}f} ({min(x):,.{digits}f} to {max(x):,.{digits}f})"
            for x, digits in zip(columns, (0, 0, 0, 2, 1), strict=True)
        ]
        lines.append(f"| {network} | {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    (ROOT / "benchmarks" / "results" / f"layers-{cores}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
