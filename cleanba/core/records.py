"""What a run writes down about its updates: metrics.jsonl, TensorBoard, Weights & Biases. A full disk delays it."""

import contextlib
import json
import os
import shutil
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import masked_crc32c


def warn(message: str) -> None:
    """Say what went wrong without ending the run."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is there as a whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.replace(path)


class Appender:
    """A file that only grows. What the disk refuses is kept and tried again; `add` never waits for the disk."""

    def __init__(self, path: Path, length: int = 0):
        """Go on after the first `length` bytes of the file; it is opened when there is something to write."""
        self._path, self._length = path, length
        self._pending = bytearray()
        self._file: int | None = None
        self._adding, self._flushing = threading.Lock(), threading.Lock()

    def add(self, data: bytes) -> None:
        """Keep data for the next `flush`."""
        with self._adding:
            self._pending += data

    def flush(self, to_disk: bool = False) -> None:
        """Write what is pending; OSError if that cannot be done now. `to_disk`: wait until the disk has it."""
        with self._flushing:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
                os.ftruncate(self._file, self._length)
            with self._adding:
                chunk, self._pending = self._pending, bytearray()
            try:
                while chunk:
                    written = os.pwrite(self._file, chunk, self._length)
                    self._length += written
                    del chunk[:written]
                if to_disk:
                    os.fsync(self._file)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from error
            finally:
                with self._adding:
                    self._pending = chunk + self._pending

    def close(self) -> None:
        """Close the file, with what could be written."""
        with contextlib.suppress(OSError):
            self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Records:
    """The metrics of a run, from its first update on. `done` updates of an earlier session are kept, later ones cut."""

    def __init__(self, folder: Path, done: int, tracker: Any = None):
        metrics, events = folder / "metrics.jsonl", folder / "tensorboard"
        kept = list(_lines(metrics, done))
        if len(kept) < done:
            warn(f"{metrics} ends after update {len(kept)}; those up to {done} are lost, the run itself is not")
        shutil.rmtree(events, ignore_errors=True)  # written again: curves without gaps or doubles, whatever happened
        self._metrics = Appender(metrics, sum(map(len, kept)))
        self._events = Appender(events / f"events.out.tfevents.{time.time():.0f}.cleanba")
        self._events.add(_framed(Event(wall_time=time.time(), file_version="brain.Event:2")))
        for line in kept:
            self._events.add(_event(json.loads(line)))
        self._tracker, self._refused = tracker, False
        self._flush()

    def _flush(self) -> None:
        self._metrics.flush()
        self._events.flush()

    def add(self, record: dict[str, Any]) -> None:
        """Record an update."""
        self._metrics.add((json.dumps(record) + "\n").encode())
        self._events.add(_event(record))
        if self._tracker is not None:
            self._tracker.log(scalars(record) | {"global_step": record["global_step"]}, step=record["global_step"])
        try:
            self._flush()
            self._refused = False
        except OSError as error:
            if not self._refused:
                warn(f"metrics cannot be written and are kept in memory: {error}")
            self._refused = True

    def close(self, failed: bool) -> None:
        """Close files and tracker."""
        self._metrics.close()
        self._events.close()
        if self._tracker is not None:
            self._tracker.finish(exit_code=int(failed))


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record that make a curve."""
    return {k: v for k, v in record.items() if "/" in k} | {"charts/policy_lag": record["policy_lag"]}


def _event(record: dict[str, Any]) -> bytes:
    """A record for TensorBoard."""
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
    return _framed(Event(wall_time=record["stats/time"], step=record["global_step"], summary=Summary(value=values)))


def _framed(event: Event) -> bytes:
    """An event as it stands in TensorBoard's file, TFRecord; tensorboardX would wait for the disk after each."""
    data = event.SerializeToString()
    length = struct.pack("<Q", len(data))
    return b"".join([length, struct.pack("<I", masked_crc32c(length)), data, struct.pack("<I", masked_crc32c(data))])


def _lines(path: Path, last: int) -> Iterator[bytes]:
    """The whole lines of a metrics file, up to the update `last`. ValueError if something else stands there."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for n, line in zip(range(1, last + 1), file, strict=False):
            if not line.endswith(b"\n"):
                return
            try:
                is_whole = json.loads(line)["update"] == n
            except (ValueError, KeyError, TypeError):
                is_whole = False
            if not is_whole:
                raise ValueError(f"{path} is damaged: line {n} is not the record of update {n}")
            yield line
