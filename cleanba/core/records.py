"""What a run writes down about its updates: metrics.jsonl, TensorBoard, Weights & Biases. A full disk delays it."""

import contextlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary


def warn(message: str) -> None:
    """Say what went wrong without ending the run."""
    print(f"warning: {message}", file=sys.stderr, flush=True)


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
        self._path, self._events, self._tracker = folder / "metrics.jsonl", folder / "tensorboard", tracker
        kept = b"".join(_lines(self._path, done))
        self._metrics = Appender(self._path, len(kept))
        self._refused = False
        self._write_events_again()

    def add(self, record: dict[str, Any]) -> None:
        """Record an update."""
        self._metrics.add((json.dumps(record) + "\n").encode())
        if self._tracker is not None:
            self._tracker.log(scalars(record) | {"global_step": record["global_step"]}, step=record["global_step"])
        try:
            self._metrics.flush()
            if self._refused:
                self._write_events_again()
                self._refused = False
            else:
                self._write_event(record)
        except OSError as error:
            if not self._refused:
                warn(f"metrics cannot be written and are kept in memory: {error}")
            self._refused = True

    def _write_event(self, record: dict[str, Any]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()]
        event = Event(wall_time=record["stats/time"], step=record["global_step"], summary=Summary(value=values))
        self._writer.write_event(event)
        self._writer.flush()

    def _write_events_again(self) -> None:
        """TensorBoard's file from the metrics: curves without gaps or doubles, whatever happened before."""
        shutil.rmtree(self._events, ignore_errors=True)
        self._events.mkdir()
        self._writer = EventsWriter(str(self._events / "events"))
        for line in _lines(self._path):
            self._write_event(json.loads(line))

    def close(self, failed: bool) -> None:
        """Close files and tracker."""
        self._metrics.close()
        with contextlib.suppress(OSError):
            self._writer.close()
        if self._tracker is not None:
            self._tracker.finish(exit_code=int(failed))


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record that make a curve."""
    return {k: v for k, v in record.items() if "/" in k} | {"charts/policy_lag": record["policy_lag"]}


def _lines(path: Path, last: int | None = None) -> Iterator[bytes]:
    """The whole lines of a metrics file, up to the update `last`."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or (last is not None and json.loads(line)["update"] > last):
                return
            yield line
