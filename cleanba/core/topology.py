"""Where things run: the `a0-l1,2,3-d2` notation, devices, the learners' mesh, and how JAX is started."""

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LEARNER = "learner"  # the mesh axis
MAX_CPU_DEVICES = 128


class TopologyError(Exception):
    """A topology that cannot be had, said in one line."""


@dataclass(frozen=True)
class Topology:
    """Device ids, local to each process, that act and that learn; `str` gives the notation back."""

    actors: tuple[int, ...] = (0,)
    learners: tuple[int, ...] = (0,)
    processes: int = 1

    @classmethod
    def parse(cls, text: str) -> "Topology":
        """Read `a0-l1,2,3-d2`; `-d1` may be left out."""
        ids = r"\d+(?:,\d+)*"
        match = re.fullmatch(rf"a({ids})-l({ids})(?:-d(\d+))?", text)
        if match is None:
            raise TopologyError(f"--topology {text!r} is not of the form a<ids>-l<ids>-d<processes>, like a0-l1,2,3-d1")
        actors, learners = (tuple(map(int, group.split(","))) for group in match.groups()[:2])
        for group in (actors, learners):
            if len(set(group)) < len(group):
                raise TopologyError(f"--topology {text!r} names a device twice")
        if match[3] is not None and int(match[3]) < 1:
            raise TopologyError(f"--topology {text!r} needs at least one process: -d1")
        return cls(actors, learners, int(match[3] or 1))

    def __str__(self) -> str:
        actors, learners = (",".join(map(str, ids)) for ids in (self.actors, self.learners))
        return f"a{actors}-l{learners}-d{self.processes}"

    def start(self, cpu_threads: int) -> None:
        """Start JAX with the devices this topology names; on the CPU as many as needed are made.

        XLA's CPU thread pool splits a reduction by its number of threads, which it takes from the variable NPROC when
        it starts: so the experiment fixes it, not the machine.
        """
        os.environ["NPROC"] = str(cpu_threads)
        needed = max(self.actors + self.learners) + 1
        # Learners that share few cores arrive at a collective minutes apart; XLA's 40 seconds would end the process.
        patience = "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
        for flag in (patience, patience.replace("terminate", "warn_stuck"), "--xla_gpu_deterministic_ops=true"):
            if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
                os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        if needed > MAX_CPU_DEVICES:
            raise TopologyError(f"topology {self} names device {needed - 1}; ids go up to {MAX_CPU_DEVICES - 1}")
        with contextlib.suppress(RuntimeError):  # JAX runs already, as in a notebook: its devices may be enough
            jax.config.update("jax_num_cpu_devices", needed)
        found = jax.local_device_count()
        if found < needed:
            kind = jax.devices()[0].platform
            raise TopologyError(f"topology {self} names device {needed - 1}, but there are only {found} ({kind})")

    @property
    def actor_devices(self) -> list[jax.Device]:
        """The devices that act."""
        return [jax.local_devices()[i] for i in self.actors]

    @property
    def mesh(self) -> Mesh:
        """The devices that learn, of all processes."""
        return Mesh(np.array([jax.local_devices()[i] for i in self.learners]), (LEARNER,))

    def replicate(self, tree: Any) -> Any:
        """A copy on every learner."""
        return jax.device_put(tree, NamedSharding(self.mesh, P()))

    def stack(self, shards: Sequence[Any]) -> Any:
        """Arrays with a leading axis of shards, spread over the learners in order; each is on its device already."""
        per_learner = len(shards) // len(self.learners)
        blocks = [_stack(shards[i : i + per_learner]) for i in range(0, len(shards), per_learner)]
        sharding = NamedSharding(self.mesh, P(LEARNER))

        def join(*pieces: jax.Array) -> jax.Array:
            shape = (len(shards), *pieces[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces))

        return jax.tree.map(join, *blocks)

    def learner_of(self, shard: int, num_shards: int) -> jax.Device:
        """The device that learns from this shard."""
        return self.mesh.devices[shard * len(self.learners) // num_shards]


def to_device(tree: Any, device: jax.Device) -> Any:
    """The tree on this device."""
    return jax.device_put(tree, device)


@jax.jit
def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *trees)
