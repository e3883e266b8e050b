"""Checkpoints: all that a run needs to go on as if nothing had happened, on any topology.

    checkpoints/
      00000050/                      after update 50; complete, because it gets its name by one last rename
        state/                       Orbax: the learner's state, and the parameters that the rollout under way uses
        shard_00003.safetensors      what belongs to a shard, if anything does: the policy's recurrent state, the
                                     learner's memory of what it saw
        checkpoint.json              progress, and digests of all this
      actions_00000001/              of the environments that were made for rollout 1
        shard_00003.log              a record for each rollout: actions, and a digest of where they led

Engines cannot save an environment, but environments are deterministic: made anew with the same seeds and given the same
actions, they arrive at the same place. The digests prove it, rollout by rollout.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import load_file, save_file

from cleanba.core.records import Appender, warn
from cleanba.core.rollout import Cursor

DIGEST = 16  # bytes
OVERHEAD = 2**17  # bytes that Orbax writes besides the arrays, at most
logging.getLogger("absl").setLevel(logging.CRITICAL)  # what Orbax logs as an error, it also raises


class Mark(NamedTuple):
    """What a shard leaves behind at the end of a rollout, in host memory."""

    actions: np.ndarray  # [T, B, ...]
    digest: bytes  # of the place that they led to
    carry: Any  # recurrent state there


class Snapshot(NamedTuple):
    """A run after update n, of which this process holds some shards."""

    update: int
    envs_since: int  # the rollout that the environments were made for
    state: Any
    acting: Any  # the parameters of the rollout under way
    shards: dict[int, dict[str, Any]]  # what belongs to each: its `carry` and its `memory`
    progress: dict[str, Any]  # whatever else the run wants to know again; JSON


class Damaged(Exception):
    """A checkpoint that cannot be used, and why."""


def digest(tree: Any) -> bytes:
    """Of types, shapes and bits of all arrays."""
    state = hashlib.blake2b(digest_size=DIGEST)
    for x in jax.tree.leaves(jax.device_get(tree)):
        x = np.asarray(x)
        state.update(f"{x.dtype} {x.shape}\n".encode() + np.ascontiguousarray(x).tobytes())
    return state.digest()


def mark(actions: Any, end: Cursor) -> Mark:
    """The end of a rollout; the digest leaves the carry out, which a replay does not compute."""
    return Mark(np.asarray(actions), digest(end._replace(carry=())), jax.device_get(end.carry))


def named(tree: Any) -> dict[str, np.ndarray]:
    """Arrays by their path."""
    paths = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(x) for path, x in paths}


def like(template: Any, arrays: dict[str, np.ndarray]) -> Any:
    """The inverse of `named`, for a tree of this structure."""
    wanted = named(template)
    if wanted.keys() != arrays.keys() or any(wanted[k].shape != arrays[k].shape for k in wanted):
        raise Damaged("it holds other arrays than this version of the algorithm")
    return jax.tree.unflatten(jax.tree.structure(template), [arrays[name] for name in wanted])


class ActionLog:
    """Actions of some shards since their environments were made; fixed-size records, a file for each shard."""

    def __init__(self, folder: Path, args: Any):
        self._folder = folder
        self._type, self._stored = map(np.dtype, args.env_spec.action_types)
        self._shape = (args.num_steps, args.envs_per_shard, *args.env_spec.action_space.shape)
        self._size = int(np.prod(self._shape)) * self._stored.itemsize + 2 * DIGEST
        self._files: dict[Path, Appender] = {}

    def path(self, since: int, shard: int) -> Path:
        """The file of a shard whose environments were made for rollout `since`."""
        return self._folder / f"actions_{since:08d}" / f"shard_{shard:05d}.log"

    def add(self, update: int, since: int, marks: dict[int, Mark]) -> None:
        """Rollout `update` of all shards, in memory until `flush`; what a file held from there on is cut off."""
        for shard, (actions, reached, _) in marks.items():
            path = self.path(since, shard)
            if path not in self._files:
                self._files[path] = Appender(path, (update - since) * self._size)
            data = actions.astype(self._stored).tobytes()
            self._files[path].add(data + _short(data) + reached)

    def flush(self) -> None:
        """Bring everything to the disk; the files of environments that were renewed are then done with."""
        files = list(self._files.items())  # the run may add more meanwhile
        for path, file in files:
            file.flush(to_disk=True)
            if path.parent != max(files)[0].parent:
                self._files.pop(path).close()

    def read(self, shard: int, since: int, update: int) -> Iterator[tuple[np.ndarray, bytes]]:
        """Actions and digest of each rollout from `since` to `update`."""
        path = self.path(since, shard)
        try:
            with path.open("rb") as file:
                for n in range(since, update + 1):
                    data, check, reached = (file.read(k) for k in (self._size - 2 * DIGEST, DIGEST, DIGEST))
                    if _short(data) != check or len(reached) < DIGEST:
                        raise Damaged(f"{path.name} is damaged or cut off at rollout {n}")
                    actions = np.frombuffer(data, self._stored).astype(self._type)
                    yield actions.reshape(self._shape), reached
        except OSError as error:
            raise Damaged(f"{path.name}: {error.strerror}") from error

    def remove_before(self, since: int) -> None:
        """Forget environments older than those made for rollout `since`."""
        for folder in self._folder.glob("actions_*"):
            if int(folder.name.split("_")[1]) < since:
                for path in [path for path in self._files if path.parent == folder]:
                    self._files.pop(path).close()
                shutil.rmtree(folder, ignore_errors=True)


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


class Checkpoints:
    """The checkpoints of a run directory. Process 0 writes the state, each process its shards.

    `begin` copies a snapshot to host memory and returns; a thread writes it. `outcome` tells how that went. When all
    processes have written their part, process 0 calls `commit`.
    """

    def __init__(self, run_dir: Path, args: Any, process: int):
        self._folder, self._args, self._process = run_dir / "checkpoints", args, process
        self.actions = ActionLog(self._folder, args)
        self._writer: threading.Thread | None = None
        self._error: Exception | None = None

    def _part(self, update: int) -> Path:
        return self._folder / f"{update:08d}.part"

    def all(self) -> list[int]:
        """The updates that there are complete checkpoints of, the newest first."""
        return sorted((int(p.name) for p in self._folder.glob("*") if p.name.isdigit()), reverse=True)

    def begin(self, snapshot: Snapshot) -> None:
        """Copy to host memory, and write from there in a thread."""
        host = snapshot._replace(state=named(snapshot.state), acting=named(snapshot.acting))
        self._error = None
        self._writer = threading.Thread(target=self._write, args=(host,), name="cleanba-checkpoint", daemon=True)
        self._writer.start()

    @property
    def is_writing(self) -> bool:
        """The last `begin` has not come to its end."""
        return self._writer is not None and self._writer.is_alive()

    def outcome(self) -> bool:
        """Wait for the writer: is all of this process's part on the disk?"""
        if self._writer is not None:
            self._writer.join()
        return self._error is None

    def _write(self, snapshot: Snapshot) -> None:
        part = self._part(snapshot.update)
        try:
            self.actions.flush()
            part.mkdir(parents=True, exist_ok=True)
            for shard, own in snapshot.shards.items():
                if arrays := named(own):
                    _leave_room(part, arrays)
                    save_file(arrays | {"digest": np.frombuffer(digest(arrays), np.uint8)}, part / _shard_name(shard))
            if self._process == 0:
                self._write_state(part, snapshot)
        except Exception as error:
            self._error = error
            kept = self.all()
            last = f"the last good one is of update {kept[0]}" if kept else "there is none yet"
            reason = " ".join(str(error).split())[:300]
            warn(f"the checkpoint of update {snapshot.update} could not be written ({reason}); {last}")

    def _write_state(self, part: Path, snapshot: Snapshot) -> None:
        arrays = {"state": snapshot.state, "acting": snapshot.acting}
        shutil.rmtree(part / "state", ignore_errors=True)
        _leave_room(part, arrays)
        with _orbax() as orbax:
            orbax.save(part.absolute() / "state", _without_empty(arrays))
        content = {
            "update": snapshot.update,
            "envs_since": snapshot.envs_since,
            "files": _file_digests(part / "state"),
            "state": digest(arrays).hex(),
            "has_shards": any(map(jax.tree.leaves, snapshot.shards.values())),
            "progress": snapshot.progress,
        }
        content["digest"] = _short(json.dumps(content).encode()).hex()
        with (part / "checkpoint.json").open("w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())

    def commit(self, update: int) -> None:
        """Give the parts that all processes have written their name, and remove what is too old."""
        target = self._folder / f"{update:08d}"
        try:
            if self._part(update).exists():
                shutil.rmtree(target, ignore_errors=True)  # a damaged one, which was trained past again
                self._part(update).rename(target)
            kept = [n for n in self.all() if n <= update][: self._args.keep_checkpoints]  # later ones are damaged too
            for other in set(self.all()) - set(kept):
                shutil.rmtree(self._folder / f"{other:08d}", ignore_errors=True)
            self.actions.remove_before(min(self._read(n)["envs_since"] for n in self.all()))
            folder = os.open(self._folder, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except (OSError, Damaged) as error:
            warn(f"after the checkpoint of update {update}: {error}")

    def discard(self, update: int) -> None:
        """Remove the parts of a checkpoint that somebody could not write."""
        shutil.rmtree(self._part(update), ignore_errors=True)

    def newest(self) -> int:
        """The last update that a usable checkpoint was made of; 0 if there is none. Says why it passes others over."""
        for part in self._folder.glob("*.part"):
            warn(f"{part} was not completed and is removed")
            shutil.rmtree(part, ignore_errors=True)
        for update in self.all():
            try:
                self.load(update, range(self._args.num_shards))
                return update
            except Damaged as error:
                warn(f"the checkpoint of update {update} is passed over: {error}")
        return 0

    def _read(self, update: int) -> dict[str, Any]:
        try:
            content = json.loads((self._folder / f"{update:08d}" / "checkpoint.json").read_bytes())
            said = content.pop("digest")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"checkpoint.json: {error}") from error
        if _short(json.dumps(content).encode()).hex() != said or content["update"] != update:
            raise Damaged("checkpoint.json was changed")
        return content

    def load(self, update: int, shards: Sequence[int]) -> Snapshot:
        """The checkpoint of an update, with what belongs to these shards, if its digests agree. Raises Damaged."""
        folder, content = self._folder / f"{update:08d}", self._read(update)
        try:
            found = _file_digests(folder / "state")  # first, because Orbax is not quiet about damage
            if changed := [name for name, said in content["files"].items() if found.get(name) != said]:
                raise Damaged(f"{changed[0]} was changed or is missing")
            with _orbax() as orbax:
                arrays = orbax.restore(folder.absolute() / "state")
            arrays = {name: arrays.get(name, {}) for name in ("state", "acting")}
        except Damaged:
            raise
        except Exception as error:  # whatever Orbax and TensorStore raise
            raise Damaged(f"its state cannot be read: {' '.join(str(error).split())[:200]}") from error
        if digest(arrays).hex() != content["state"]:
            raise Damaged("its state was changed")
        for shard in shards:
            for _ in self.actions.read(shard, content["envs_since"], update):
                pass
        own = {shard: self._load_shard(folder, shard) for shard in shards} if content["has_shards"] else {}
        return Snapshot(update, content["envs_since"], arrays["state"], arrays["acting"], own, content["progress"])

    def _load_shard(self, folder: Path, shard: int) -> dict[str, dict[str, np.ndarray]]:
        try:
            arrays = load_file(folder / _shard_name(shard))
        except Exception as error:
            raise Damaged(f"{_shard_name(shard)}: {error}") from error
        if arrays.pop("digest", np.empty(0)).tobytes() != digest(arrays):
            raise Damaged(f"{_shard_name(shard)} was changed")
        parts = [(*name.partition(".")[::2], x) for name, x in arrays.items()]
        return {what: {rest: x for part, rest, x in parts if part == what} for what in ("carry", "memory")}


def _leave_room(folder: Path, arrays: Any) -> None:
    """OSError if they do not fit on the disk: asked first, because Orbax fills pages when it meets a full one."""
    free, needed = shutil.disk_usage(folder).free, sum(x.nbytes for x in jax.tree.leaves(arrays)) + OVERHEAD
    if free < needed:
        raise OSError(errno.ENOSPC, f"No space left: {needed:,} bytes needed, {free:,} free", str(folder))


def _file_digests(folder: Path) -> dict[str, str]:
    """Of all files below a folder, by their names from its parent on."""
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            state = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=DIGEST))
        found[str(path.relative_to(folder.parent))] = state.hexdigest()
    return found


def _shard_name(shard: int) -> str:
    return f"shard_{shard:05d}.safetensors"


def _without_empty(tree: Any) -> Any:
    """Orbax takes no empty groups."""
    return {name: part for name, part in tree.items() if part}


def _orbax() -> ocp.Checkpointer:
    """For one process alone, however many there are: it holds the whole of what it writes."""
    own = ocp.options.MultiprocessingOptions(primary_host=jax.process_index(), active_processes={jax.process_index()})
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(multiprocessing_options=own), multiprocessing_options=own)
