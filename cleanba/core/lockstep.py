"""Who may go on when: parameter versions, size-1 hand-overs between actors and learner, and failure. No JAX in here.

    actor thread   rollout 1 (v1)   rollout 2 (v1)   rollout 3 (v2)   ...
    learner                         update 1 -> v2   update 2 -> v3   ...

Each actor thread and the learner share two slots: parameters one way, rollouts the other. All slots share one
condition variable, so whoever waits is woken by what it waits for, by a failure or by the end; nobody polls.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cleanba.core.clock import Clock

EMPTY = object()


class Stopped(Exception):
    """Raised inside a waiting actor when the run has ended or failed: the thread leaves quietly."""


class HandOver:
    """One slot: `put` waits until it is empty, `get` until it is full."""

    def __init__(self, lockstep: "Lockstep"):
        self._until = lockstep.until
        self._item: Any = EMPTY

    def put(self, item: Any) -> None:
        """Leave an item, once the one before was taken."""
        with self._until(lambda: self._item is EMPTY):
            self._item = item

    def get(self) -> Any:
        """Take the item."""
        with self._until(lambda: self._item is not EMPTY):
            item, self._item = self._item, EMPTY
        return item


class Lockstep:
    """The lag rule for `num_updates` updates and the slots of `num_threads` actor threads."""

    def __init__(self, num_updates: int, concurrency: bool, num_threads: int):
        self.num_updates, self.lag = num_updates, int(concurrency)
        self.done = 0  # updates of an earlier session, which a resumed run goes on after
        self.failure: BaseException | None = None
        self.clock = Clock()
        self._stopped = False
        self._changed = threading.Condition()
        self._learner = threading.get_ident()
        self._params = [HandOver(self) for _ in range(num_threads)]
        self._rollouts = [HandOver(self) for _ in range(num_threads)]

    def version_for(self, n: int) -> int:
        """The version that rollout n (from 1) is collected with."""
        return max(1, n - self.lag)

    def publish(self, version: int, params: list[Any]) -> None:
        """Learner: hand each thread its parameters, unless no rollout is left that would use this version."""
        if version <= self.version_for(self.num_updates):
            for slot, own in zip(self._params, params, strict=True):
                slot.put((version, own))

    def collect(self, n: int) -> tuple[int, list[Any]]:
        """Learner: every thread's rollout n, and the version that all of them were collected with."""
        with self.clock("rollout_queue_get"):
            numbers, versions, items = zip(*(slot.get() for slot in self._rollouts), strict=True)
        if set(numbers) != {n} or len(set(versions)) != 1:
            raise AssertionError(f"update {n} was given rollouts {numbers} of versions {versions}")
        return versions[0], list(items)

    def actor(self, thread: int, rollout: Callable[[int, Any], Any]) -> None:
        """Actor: collect every rollout that is left by calling `rollout(n, params)`; a failure becomes the run's."""
        try:
            version, params = 0, None
            for n in range(self.done + 1, self.num_updates + 1):
                with self.clock("params_queue_get"):
                    while version < self.version_for(n):
                        version, params = self._params[thread].get()
                with self.clock("rollout"):
                    item = (n, version, rollout(n, params))
                self._rollouts[thread].put(item)
        except Stopped:
            pass
        except BaseException as error:
            self.fail(error)

    def call(self, function: Callable[[], Any]) -> Any:
        """Learner: run a long call beside the main thread, so that Ctrl-C and a failing actor are noticed at once."""
        result: list[Any] = []

        def work() -> None:
            try:
                value = function()
            except BaseException as error:
                self.fail(error)
                return
            with self._changed:
                result.append(value)
                self._changed.notify_all()

        threading.Thread(target=work, name="cleanba-learner", daemon=True).start()
        with self.until(lambda: bool(result)):
            return result[0]

    @contextmanager
    def until(self, ready: Callable[[], bool]) -> Iterator[None]:
        """Wait for `ready`, then hold the lock. The learner raises a failure; an actor leaves quietly."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None or self._stopped or ready())
            if self.failure is not None and threading.get_ident() == self._learner:
                raise self.failure
            if self.failure is not None or self._stopped:
                raise Stopped
            yield
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Record the first failure and wake everybody."""
        with self._changed:
            self.failure = self.failure or error
            self._changed.notify_all()

    def stop(self) -> None:
        """The run is over, in whichever way: wake everybody who still waits."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """Actor, between two shards: leave if the run has ended or failed."""
        with self.until(lambda: True):
            pass
