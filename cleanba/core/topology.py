"""Where things run: the `a0-l1,2,3-d2` notation, devices, the learners' mesh, and how JAX is started."""

import contextlib
import functools
import hashlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from cleanba.core import processes
from cleanba.core.processes import Place

LEARNER = "learner"  # the mesh axis
CACHE_BYTES = 2**30  # of compiled programs; what was not used for longest goes first
FLAGS = (
    # Learners that share few cores arrive at a collective minutes apart; XLA's 40 seconds would end the process.
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=3600",
    "--xla_gpu_deterministic_ops=true",
    # A program for several learners has equal expressions merged before it is simplified, one for a single learner only
    # afterwards. What is simplified then differs (x / exp(y) or x * exp(-y)), and so does its rounding.
    "--xla_disable_hlo_passes=cse",
)


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

    @property
    def devices_needed(self) -> int:
        """By each process."""
        return max(self.actors + self.learners) + 1

    def start(self, cpu_threads: int, place: Place | None = None, peer_timeout: float = 60.0) -> None:
        """Start JAX with the devices this topology names; on the CPU as many as needed are made.

        XLA's CPU thread pool splits a sum by its number of threads: the larger of the variable NPROC and the number of
        devices, when JAX starts. So the experiment fixes that number, not the machine, and the devices stay within it.
        """
        os.environ["NPROC"] = str(cpu_threads)
        # LAPACK, which orthogonal initializers call, splits its sums by the number of cores; it reads this when loaded.
        os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
        needed = self.devices_needed
        set_flags()
        _keep_compiled_programs()
        with contextlib.suppress(RuntimeError):  # JAX runs already, as in a notebook: its devices may be enough
            jax.config.update("jax_num_cpu_devices", min(needed, cpu_threads))
        if place is not None and place.processes > 1:
            processes.join(place, peer_timeout)
        found = jax.local_device_count()
        if found < needed:
            more = f"; --cpu-threads {needed} makes more" if jax.default_backend() == "cpu" else ""
            raise TopologyError(f"topology {self} names device {needed - 1}, but ids go up to {found - 1} here{more}")

    @property
    def actor_devices(self) -> list[jax.Device]:
        """The devices that act."""
        return [jax.local_devices()[i] for i in self.actors]

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices that learn, of all processes: neighbouring shards on neighbouring devices."""
        devices = [[d for d in jax.devices() if d.process_index == p] for p in range(self.processes)]
        return Mesh(np.array([own[i] for own in devices for i in self.learners]), (LEARNER,))

    def replicate(self, tree: Any) -> Any:
        """A copy on every learner of what every process holds alike."""
        put = functools.partial(jax.make_array_from_callback, sharding=NamedSharding(self.mesh, P()))
        return jax.tree.map(lambda x: put(x.shape, data_callback=lambda index: x[index]), jax.device_get(tree))

    def local(self, tree: Any) -> Any:
        """This process's copy of what `replicate`, or an update, put on every learner; of one type, whichever it was,
        since a shard remembers its mesh, and who gets both would be compiled twice."""

        def own(x: jax.Array) -> jax.Array:
            shard = x.addressable_shards[0]
            return jax.make_array_from_single_device_arrays(x.shape, SingleDeviceSharding(shard.device), [shard.data])

        return jax.tree.map(own, tree)

    def gather(self, tree: Any) -> Any:
        """Every process's arrays, of equal shapes, stacked in host memory: [processes, ...].

        All that processes send goes through the learners, and one thing after another: gloo tells two messages between
        the same devices apart by their order alone. So not by `multihost_utils`, which does not wait for every device.
        """
        if self.processes == 1:
            return jax.tree.map(lambda x: np.asarray(x)[None], tree)
        sharding, own = NamedSharding(self.mesh, P(LEARNER)), len(self.learners)

        def rows(x: Any) -> jax.Array:
            x = np.asarray(x)[None]
            shape = (own * self.processes, *x.shape[1:])
            return jax.make_array_from_callback(shape, sharding, lambda index: x)

        gathered = jax.block_until_ready(self._all_gather(jax.tree.map(rows, tree)))
        return jax.tree.map(lambda x: np.asarray(x)[::own], gathered)

    @functools.cached_property
    def _all_gather(self) -> Any:
        everything = functools.partial(jax.lax.all_gather, axis_name=LEARNER, tiled=True)
        specs: dict[str, Any] = dict(in_specs=P(LEARNER), out_specs=P(), check_vma=False)
        return jax.jit(jax.shard_map(lambda tree: jax.tree.map(everything, tree), mesh=self.mesh, **specs))

    def shares(self, num_shards: int) -> np.ndarray:
        """The shards of each learner of all processes, [L, S / L]: neighbours together. Where S / L is not whole, some
        learners repeat their last shard, so that all have equal shapes; `total` leaves the repetitions out."""
        blocks = np.array_split(np.arange(num_shards), len(self.learners) * self.processes)
        return np.stack([np.pad(block, (0, len(blocks[0]) - len(block)), mode="edge") for block in blocks])

    def shards_of(self, process: int, num_shards: int) -> list[int]:
        """The shards that live in a process, whose data never leave it."""
        return np.unique(np.split(self.shares(num_shards), self.processes)[process]).tolist()

    def spread(self, rows: np.ndarray) -> jax.Array:
        """Rows that every process knows, one for each place of `shares`, shared out to the learners."""
        sharding = NamedSharding(self.mesh, P(LEARNER))
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    def stack(self, shards: Mapping[int, Any], num_shards: int) -> Any:
        """Arrays with a leading axis of shards, spread over the learners; each shard is on its learner's device."""
        shares = self.shares(num_shards)
        own = [share for share in shares if share[0] in shards]
        blocks = [_stack([shards[i] for i in share]) for share in own]
        sharding = NamedSharding(self.mesh, P(LEARNER))

        def join(*pieces: jax.Array) -> jax.Array:
            shape = (shares.size, *pieces[0].shape[1:])
            return jax.make_array_from_single_device_arrays(shape, sharding, list(pieces))

        return jax.tree.map(join, *blocks)

    def unstack(self, tree: Any, num_shards: int) -> dict[int, Any]:
        """What `stack` put together, of each shard of this process, copied to host memory."""
        places = self.shares(num_shards).ravel()

        def rows(x: jax.Array) -> dict[int, np.ndarray]:
            pieces = [(piece.index[0].start or 0, np.array(piece.data)) for piece in x.addressable_shards]
            return {int(places[start + i]): row for start, data in pieces for i, row in enumerate(data)}

        leaves, structure = jax.tree.flatten(tree)
        found = [rows(x) for x in leaves]
        return {
            shard: jax.tree.unflatten(structure, [own[shard] for own in found]) for shard in (found[0] if found else ())
        }

    def learner_of(self, shard: int, num_shards: int) -> jax.Device:
        """The device that learns from this shard."""
        return self.mesh.devices[np.nonzero(self.shares(num_shards) == shard)[0][0]]


def set_flags() -> None:
    """Add what the user did not set to XLA_FLAGS, which is read when JAX starts."""
    for flag in FLAGS:
        if flag.split("=")[0] not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()


def user_cache() -> Path:
    """What can be made again, kept from run to run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleanba"


def _keep_compiled_programs() -> None:
    """Across runs, in the user's cache: half of a short run is compiling. A folder for each kind of CPU, since machines
    that differ may share a home; JAX's own variables go before this."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kind = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
        name = hashlib.sha256("\n".join([platform.machine(), *kind]).encode()).hexdigest()[:16]
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / f"xla-{name}"))
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def to_device(tree: Any, device: jax.Device) -> Any:
    """The tree on this device."""
    return jax.device_put(tree, device)


@jax.jit
def _stack(trees: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jax.numpy.stack(leaves), *trees)
