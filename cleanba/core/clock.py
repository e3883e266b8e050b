"""Where the time of an update goes: seconds by name. No JAX in here."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """`with clock("rollout"):` in any thread; `lap` then tells what was spent since the lap before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spent: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time a block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._spent[name][threading.get_ident()] += time.perf_counter() - start

    def lap(self) -> dict[str, float]:
        """Seconds by name, the mean over the threads that spent them."""
        with self._lock:
            spent = {name: sum(threads.values()) / len(threads) for name, threads in sorted(self._spent.items())}
            self._spent.clear()
        return spent
