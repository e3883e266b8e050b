"""A process that is cut off or stopped: the others miss it, say so and end, and the run goes on on another machine."""

import os
import signal
import time
from pathlib import Path

import pytest
from namespaces import SIZES, Machines, Spread, why_not
from sessions import SOON, assert_same, checkpoints, end, finish, start, wait_for_updates

TIMEOUT = 5
ARGUMENTS = f"{SIZES} --peer-timeout {TIMEOUT} --total-timesteps 32768"  # 64 updates


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was left alone."""
    if reason := why_not():
        pytest.skip(reason)
    run = tmp_path_factory.mktemp("reference") / "run"
    finish(run, ARGUMENTS)
    return run


@pytest.mark.parametrize("fault", ["link", "stop"])
def test_a_lost_process_is_missed_and_the_run_goes_on_elsewhere(fault: str, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    missed = f"has not answered for {TIMEOUT} s (stopped, or its network is down)"
    with Machines(2) as machines, Spread(machines, run, ARGUMENTS) as spread:
        spread.wait_for_checkpoint()
        spread.lose(1, fault)
        before = time.monotonic()
        _, err = end(spread.processes[0], status=1)
        assert time.monotonic() - before < TIMEOUT + 10
        assert err == f"process 0 ends: process 1 {missed}\n"
        if fault == "link":
            _, err = end(spread.processes[1], status=1)
            assert err == f"process 1 ends: process 0 {missed}\n"

        last = checkpoints(run)[-1]
        out, _ = finish(run, f"{ARGUMENTS} --topology a0-l0-d1")
        assert f"going on after update {last}," in out
        assert_same(run, reference)

        if fault == "stop":  # it wakes up after all that
            files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
            spread.processes[1].send_signal(signal.SIGCONT)
            _, err = spread.processes[1].communicate(timeout=SOON)
            assert spread.processes[1].returncode != 0
            assert f"process 1 ends: process 0 ended because process 1 {missed}\n" in err  # JAX may add something
            assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files


def test_a_run_that_is_stopped_as_a_whole_misses_nobody_when_it_wakes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(run, f"{SIZES} --peer-timeout 3 --total-timesteps 100000000 --topology a0-l0-d2")
    wait_for_updates(run, process)
    os.killpg(process.pid, signal.SIGSTOP)  # Ctrl-Z
    time.sleep(5)
    os.killpg(process.pid, signal.SIGCONT)
    wait_for_updates(run, process, 10)
    os.killpg(process.pid, signal.SIGKILL)
    end(process, -signal.SIGKILL)
