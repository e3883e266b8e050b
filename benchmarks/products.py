"""What one matrix product of a learner costs, by the size of XLA's thread pool, and two learners' at once.

Run:   python benchmarks/products.py
Makes: benchmarks/results/products.md

N rows through a layer of 256 x 256, forward, back to the input and back to the weights, 300 times in a loop as in an
update. Each pool is a process of its own with two devices. "cores" is the processor time over the time that passed.
"""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROWS, POOLS, REPEATS, ROUNDS, WIDTH = (64, 128, 256), (2, 4, 16), 300, 9, 256
RESULT = Path(__file__).parent / "results" / "products.md"


def measure(pool: int) -> None:
    """Print the lines of the table for this pool; JAX starts here."""
    os.environ["NPROC"] = str(pool)
    import jax

    jax.config.update("jax_num_cpu_devices", 2)

    def over(*contracted: int) -> tuple:
        return tuple((axis,) for axis in contracted), ((), ())

    dot, loop = jax.lax.dot_general, jax.lax.fori_loop
    products: dict[str, Callable] = {
        "forward": lambda x, w: loop(0, REPEATS, lambda _, y: dot(y, w, over(1, 0)), x),
        "to the input": lambda x, w: loop(0, REPEATS, lambda _, y: dot(y, w, over(1, 1)), x),
        "to the weights": lambda x, w: loop(0, REPEATS, lambda _, y: 1e-3 * dot(x, x + y[0, 0], over(0, 0)), w),
    }
    for rows in ROWS:
        keys = jax.random.split(jax.random.key(0))
        x, w = jax.random.normal(keys[0], (rows, WIDTH)), jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH**0.5
        inputs = [jax.device_put((x, w), device) for device in jax.devices()]
        for name, product in products.items():
            cells = [cell for n in (1, 2) for cell in timed(jax.jit(product), inputs[:n])]
            print("|", " | ".join(map(str, [pool, rows, name, *cells])), "|", flush=True)


def timed(call: Callable, inputs: list) -> list[str]:
    """Microseconds of a repeat on all inputs at once, the median of the rounds, and how many cores were busy."""
    import jax

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready([call(*own) for own in inputs])
        return time.perf_counter() - start

    once()
    cpu, begin = time.process_time(), time.perf_counter()
    spans = [once() for _ in range(ROUNDS)]
    busy = (time.process_time() - cpu) / (time.perf_counter() - begin)
    return [f"{statistics.median(spans) / REPEATS * 1e6:.0f}", f"{busy:.2f}"]


def main() -> None:
    """One process for each pool, and the same on one core."""
    titles = "| pool | rows | product | one, us | cores | two at once, us | cores |"
    lines = ["Made by `python benchmarks/products.py`.", "", titles, "| --- " * 7 + "|"]
    for pool, prefix in ((1, ["taskset", "-c", "0"]), *((pool, []) for pool in POOLS)):
        command = [*prefix, sys.executable, __file__, str(pool)]
        lines += subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    lines += ["", "A pool of 1 has one core (`taskset`); XLA makes it 2, the number of devices."]
    RESULT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    measure(int(sys.argv[1])) if len(sys.argv) > 1 else main()
