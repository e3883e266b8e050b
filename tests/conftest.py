"""Eight CPU devices and a fixed thread pool for all tests; JAX starts here, before any test can ask for other sizes."""

import importlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["NPROC"] = "16"  # --cpu-threads, as a run sets it

import jax
import pytest

from cleanba.core.topology import set_flags

set_flags()
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
assert jax.local_device_count() == 8  # this starts JAX


def pytest_configure(config: pytest.Config) -> None:
    # EnvPool describes spaces in 64 bits, Gymnasium keeps them in 32 and says so.
    config.addinivalue_line("filterwarnings", "ignore:.*precision lowered by casting:UserWarning")


@pytest.fixture(params=["ppo", "impala_atari"])
def tiny(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An algorithm file with a linear network in place of its own: `module`, and `args(**changes)` of small sizes."""
    return tiny_algorithm(request.param, monkeypatch)


@pytest.fixture
def tiny_ppo(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return tiny_algorithm("ppo", monkeypatch)


@pytest.fixture
def tiny_impala(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    return tiny_algorithm("impala_atari", monkeypatch)


def tiny_algorithm(name: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    from synthetic import tiny_network  # not before JAX has started

    module = importlib.import_module(f"cleanba.{name}")
    monkeypatch.setattr(module, "network", tiny_network)
    sizes = dict(num_envs=16, num_shards=2, num_steps=12, total_timesteps=10 * 16 * 12, num_minibatches=2, gamma=0.9)

    def args(**changes: Any) -> Any:
        return module.Args(**(sizes | changes))

    return SimpleNamespace(name=name, module=module, args=args)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of sessions.SMALL that was left alone; others may look at it, or copy it."""
    from sessions import OFTEN, SMALL, finish, lines

    run = tmp_path_factory.mktemp("reference") / "run"
    out, err = finish(run, f"{SMALL} {OFTEN}")
    assert "fingerprint" in out
    assert err == ""
    assert len(lines(run)) == 60
    return run


@pytest.fixture(autouse=True)
def no_run_is_left() -> Iterator[None]:
    yield
    from sessions import kill_what_is_left

    kill_what_is_left()


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Path]]:
    """Mount disks of so many kB."""
    mounted = []

    def mount(size: int) -> Path:
        disk = tmp_path_factory.mktemp("disk")
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}k", "none", str(disk)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("may not mount a disk here")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
