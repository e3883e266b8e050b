"""Versions, hand-overs, the end and failure, with integers for parameters and plain threads."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cleanba.core.lockstep import Lockstep, Stopped

SOON = 10.0  # seconds after which something hangs
TIMERS: list[threading.Timer] = []


def watched(updates: int, concurrency: bool, threads: int) -> Lockstep:
    """A lockstep that fails rather than hangs."""
    lockstep = Lockstep(updates, concurrency, threads)
    timer = threading.Timer(SOON, lambda: lockstep.fail(TimeoutError("the lockstep hangs")))
    timer.start()
    TIMERS.append(timer)
    return lockstep


class Team:
    """Actor threads around a lockstep; each rollout is (thread, n, version used)."""

    def __init__(self, updates: int, concurrency: bool, threads: int, rollout: Callable[[int, Any], Any] | None = None):
        self.lockstep = watched(updates, concurrency, threads)
        self.collected: list[tuple[int, int]] = []
        self.threads = [threading.Thread(target=self._main, args=(i, rollout)) for i in range(threads)]
        for thread in self.threads:
            thread.start()

    def _main(self, i: int, rollout: Callable[[int, Any], Any] | None) -> None:
        def plain(n: int, params: Any) -> Any:
            self.collected.append((i, n))
            return (i, n, params)

        self.lockstep.actor(i, rollout or plain)

    def join(self) -> None:
        for thread in self.threads:
            thread.join(SOON)
            assert not thread.is_alive(), "an actor thread is left over"


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    while TIMERS:
        TIMERS.pop().cancel()
    deadline = time.monotonic() + SOON
    for thread in set(threading.enumerate()) - before:
        thread.join(max(0.0, deadline - time.monotonic()))
        assert not thread.is_alive()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("concurrency", [True, False])
@pytest.mark.parametrize("updates", [1, 2, 6])
def test_every_rollout_has_its_version_and_none_is_extra(updates: int, concurrency: bool, threads: int) -> None:
    team = Team(updates, concurrency, threads)
    versions = []
    team.lockstep.publish(1, [1] * threads)
    for n in range(1, updates + 1):
        version, items = team.lockstep.collect(n)
        assert items == [(i, n, version) for i in range(threads)]
        assert version == team.lockstep.version_for(n)
        versions.append(version)
        team.lockstep.publish(n + 1, [n + 1] * threads)  # also the last ones, which nobody waits for
    team.join()  # by themselves: nobody stopped them
    assert versions == [max(1, n - 1) if concurrency else n for n in range(1, updates + 1)]
    assert sorted(team.collected) == [(i, n) for i in range(threads) for n in range(1, updates + 1)]


def test_with_concurrency_the_next_rollout_is_collected_during_an_update() -> None:
    started: dict[int, threading.Event] = {n: threading.Event() for n in range(1, 5)}
    team = Team(4, True, 1, lambda n, params: started[n].set())
    team.lockstep.publish(1, [1])
    team.lockstep.collect(1)
    assert started[2].wait(SOON)  # version 2 is not there yet
    assert not started[3].wait(0.05)
    team.lockstep.publish(2, [2])
    team.lockstep.collect(2)
    assert started[3].wait(SOON)
    team.lockstep.stop()
    team.join()


def test_without_concurrency_the_next_rollout_waits_for_the_update() -> None:
    started: dict[int, threading.Event] = {n: threading.Event() for n in range(1, 5)}
    team = Team(4, False, 1, lambda n, params: started[n].set())
    team.lockstep.publish(1, [1])
    team.lockstep.collect(1)
    assert not started[2].wait(0.05)
    team.lockstep.publish(2, [2])
    assert started[2].wait(SOON)
    team.lockstep.stop()
    team.join()


@pytest.mark.parametrize("where", ["collect", "publish", "call"])
def test_an_actors_failure_is_raised_in_the_learner(where: str) -> None:
    cause = ValueError("environment 5 fell over")
    first_is_collected, release = threading.Event(), threading.Event()

    def rollout(n: int, params: Any) -> int:
        if n == 2:
            first_is_collected.wait(SOON)
            raise cause
        return n

    team = Team(5, True, 2, rollout)
    team.lockstep.publish(1, [1, 1])
    team.lockstep.collect(1)
    first_is_collected.set()
    if where == "publish":  # which waits for nobody while the slots are empty
        team.threads[0].join(SOON)
    waits: dict[str, Callable[[], Any]] = {
        "collect": lambda: team.lockstep.collect(2),
        "publish": lambda: team.lockstep.publish(2, [2, 2]),
        "call": lambda: team.lockstep.call(lambda: release.wait(SOON)),
    }
    with pytest.raises(ValueError, match="environment 5") as caught:
        waits[where]()
    release.set()
    assert caught.value is cause
    team.join()


def test_a_failure_during_a_long_call_is_noticed_at_once() -> None:
    go, release = threading.Event(), threading.Event()
    cause = RuntimeError("late")

    def rollout(n: int, params: Any) -> None:
        go.wait(SOON)
        raise cause

    team = Team(5, True, 1, rollout)
    team.lockstep.publish(1, [1])
    started = time.monotonic()

    def long_call() -> None:
        go.set()
        release.wait(SOON)

    with pytest.raises(RuntimeError, match="late") as caught:
        team.lockstep.call(long_call)
    assert time.monotonic() - started < 5
    assert caught.value is cause
    release.set()
    team.join()


def test_the_first_failure_is_the_one_that_is_kept() -> None:
    lockstep = watched(3, True, 1)
    first = ValueError("first")
    lockstep.fail(first)
    lockstep.fail(ValueError("second"))
    assert lockstep.failure is first
    with pytest.raises(ValueError, match="first"):
        lockstep.collect(1)


@pytest.mark.parametrize("how", ["stop", "fail"])
def test_waiting_actors_leave_at_the_end_or_at_a_failure(how: str) -> None:
    lockstep = watched(3, True, 1)
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            lockstep._params[0].get()
        except Stopped as stopped:
            outcome.append(stopped)

    waiter = threading.Thread(target=wait)
    waiter.start()
    if how == "stop":
        lockstep.stop()
    else:
        lockstep.fail(ValueError("elsewhere"))
    waiter.join(SOON)
    assert len(outcome) == 1


def test_actors_between_two_shards_leave_after_a_stop() -> None:
    lockstep = watched(3, True, 1)
    lockstep.check()
    lockstep.stop()
    with pytest.raises(Stopped):
        lockstep.check()


def test_a_stop_ends_actors_that_wait_to_hand_over() -> None:
    team = Team(9, True, 3)
    team.lockstep.publish(1, [1, 1, 1])
    team.lockstep.stop()
    team.join()
    assert team.lockstep.failure is None


def test_call_returns_the_value_and_passes_an_exception_on() -> None:
    lockstep = watched(3, True, 1)
    assert lockstep.call(lambda: 42) == 42
    assert lockstep.call(lambda: None) is None
    cause = FloatingPointError("diverged")

    def diverge() -> None:
        raise cause

    with pytest.raises(FloatingPointError) as caught:
        lockstep.call(diverge)
    assert caught.value is cause


def test_the_learner_notices_rollouts_of_another_number() -> None:
    team = Team(2, True, 1)
    team.lockstep.publish(1, [1])
    with pytest.raises(AssertionError, match="update 2 was given rollouts"):
        team.lockstep.collect(2)
    team.lockstep.stop()
    team.join()
