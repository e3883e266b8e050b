"""Checkpoints, logs and metrics on the disk: they come back bit for bit, or it is said why not."""

import errno
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from synthetic import bits
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from cleanba import ppo
from cleanba.core.actors import Collector
from cleanba.core.checkpoint import ActionLog, Checkpoints, Damaged, Mark, Snapshot, like, mark, named
from cleanba.core.records import Appender, Records
from cleanba.core.rollout import Acted
from cleanba.core.seeding import Role
from cleanba.core.shards import State

ARGS = ppo.Args(num_envs=4, num_shards=2, num_steps=3)  # logs have records of 3 * 2 + 32 bytes
RECORD = 38


class TestAppender:
    def test_it_goes_on_after_what_is_kept(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_bytes(b"kept, cut off")
        file = Appender(tmp_path / "log", length=5)
        assert (tmp_path / "log").read_bytes() == b"kept, cut off"  # nothing happens before there is something to write
        file.add(b" and")
        file.flush()
        file.add(b" more")
        file.close()
        assert (tmp_path / "log").read_bytes() == b"kept, and more"

    def test_what_the_disk_refuses_comes_later(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file, write, room = Appender(tmp_path / "new" / "log"), os.pwrite, 3

        def small_disk(fd: int, data: bytes, offset: int) -> int:
            if offset >= room:
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(fd, data[: room - offset], offset)

        monkeypatch.setattr(os, "pwrite", small_disk)
        file.add(b"12345")
        for more in (b"678", b"9"):
            with pytest.raises(OSError, match=r"No space left on device: '.*/new/log'"):
                file.flush()
            assert (tmp_path / "new" / "log").read_bytes() == b"123"
            file.add(more)
        room = 100
        file.flush(to_disk=True)
        assert (tmp_path / "new" / "log").read_bytes() == b"123456789"
        file.close()

    def test_a_signal_in_the_middle_of_a_write_loses_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file, write = Appender(tmp_path / "log"), os.pwrite

        def interrupted(fd: int, data: bytes, offset: int) -> int:
            write(fd, data[:2], offset)
            raise KeyboardInterrupt

        file.add(b"12345")
        monkeypatch.setattr(os, "pwrite", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.flush()
        monkeypatch.undo()
        file.close()
        assert (tmp_path / "log").read_bytes() == b"12345"

    def test_a_real_disk_that_is_full(self, small_disk: Callable[[int], Path]) -> None:
        disk = small_disk(64)
        file, data = Appender(disk / "log"), os.urandom(100_000)
        file.add(data)
        with pytest.raises(OSError, match="No space left"):
            file.flush()
        subprocess.run(["mount", "-o", "remount,size=256k", str(disk)], check=True)
        file.flush(to_disk=True)
        assert (disk / "log").read_bytes() == data
        file.close()


def marks(n: int, carry: Any = ()) -> dict[int, Mark]:
    """What both shards leave behind after rollout n."""
    rng = np.random.default_rng(n)
    return {shard: Mark(rng.integers(0, 2, (3, 2)), rng.bytes(16), carry) for shard in range(2)}


class TestActionLog:
    def test_it_is_read_as_it_was_written(self, tmp_path: Path) -> None:
        log = ActionLog(tmp_path, ARGS)
        for n in (1, 2, 3):
            log.add(n, 1, marks(n))
        log.flush()
        for shard in range(2):
            read = list(ActionLog(tmp_path, ARGS).read(shard, since=1, update=3))
            assert [(a.tolist(), d) for a, d in read] == [
                (marks(n)[shard].actions.tolist(), marks(n)[shard].digest) for n in (1, 2, 3)
            ]
            assert log.path(1, shard).stat().st_size == 3 * RECORD

    @pytest.mark.parametrize(
        ("env_id", "stored", "given"),
        [("CartPole-v1", 1, np.int32), ("Pong-v5", 1, np.int32), ("Pendulum-v1", 4, np.float32)],
    )
    def test_few_actions_take_a_byte_each(self, env_id: str, stored: int, given: type, tmp_path: Path) -> None:
        log = ActionLog(tmp_path, ppo.Args(env_id=env_id, num_envs=4, num_shards=2, num_steps=3))
        actions: np.ndarray = np.arange(6).reshape(3, 2, *[1] * (env_id == "Pendulum-v1")).astype(given)
        log.add(1, 1, {0: Mark(actions, bytes(16), ())})
        log.flush()
        assert log.path(1, 0).stat().st_size == 6 * stored + 32
        [(read, _)] = log.read(0, 1, 1)
        assert (read.dtype, read.tobytes()) == (actions.dtype, actions.tobytes())

    def test_a_resumed_log_forgets_what_came_after(self, tmp_path: Path) -> None:
        log = ActionLog(tmp_path, ARGS)
        for n in (1, 2, 3):
            log.add(n, 1, marks(n))
        log.flush()
        log = ActionLog(tmp_path, ARGS)
        log.add(2, 1, marks(20))
        log.flush()
        assert [d for _, d in log.read(1, 1, 2)] == [marks(1)[1].digest, marks(20)[1].digest]
        with pytest.raises(Damaged, match=r"shard_00001.log is damaged or cut off at rollout 3"):
            list(log.read(1, 1, 3))

    @pytest.mark.parametrize("where", [0, 5, 6, 21, 22, RECORD - 1])
    def test_a_flipped_byte_is_found_in_its_rollout(self, where: int, tmp_path: Path) -> None:
        log = ActionLog(tmp_path, ARGS)
        for n in (5, 6, 7):
            log.add(n, 5, marks(n))
        log.flush()
        flip(log.path(5, 0), RECORD + where)
        read = log.read(0, 5, 7)
        assert next(read)[1] == marks(5)[0].digest
        if where < 22:
            with pytest.raises(Damaged, match="at rollout 6"):
                next(read)
        else:  # the digest of the place: replaying finds that out
            assert next(read)[1] != marks(6)[0].digest

    def test_files_of_former_environments_are_closed_and_removed(self, tmp_path: Path) -> None:
        log, open_files = ActionLog(tmp_path, ARGS), len(os.listdir("/proc/self/fd"))
        for n in range(1, 7):
            log.add(n, n, marks(n))
            log.flush()
        assert len(os.listdir("/proc/self/fd")) <= open_files + 2  # those of the last ones
        log.remove_before(5)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["actions_00000005", "actions_00000006"]


def at_random(params: Any, step: Any, carry: Any, key: jax.Array, args: Any) -> Acted:
    return Acted(jax.random.randint(key, step.first.shape, 0, args.env_spec.num_actions), carry, {})


@pytest.mark.parametrize(
    "changes",
    [
        dict(env_id="CartPole-v1"),
        dict(env_id="CartPole-v1", collect="stepwise"),
        dict(env_id="MountainCar-v0", engine="gymnasium"),
        dict(env_id="Pong-v5"),
    ],
    ids=["fused", "stepwise", "gymnasium", "pong"],
)
def test_replayed_actions_lead_to_the_same_place(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where the environment computes with its action, as MountainCar does."""
    args = ppo.Args(**(dict(num_envs=4, num_shards=2, num_steps=40) | changes))

    def collector() -> Collector:
        return Collector(at_random, None, args, [0, 1], jax.local_devices()[0], Role.ACT)

    first, log = collector(), ActionLog(tmp_path, args)
    for n in (1, 2):
        ended = first.collect({}, n)
        log.add(n, 1, {shard: mark(rollout.action, end) for shard, (rollout, _, end) in enumerate(ended)})
    log.flush()
    second = collector()
    for logged in zip(log.read(0, 1, 2), log.read(1, 1, 2), strict=True):
        ends = second.replay(np.stack([actions for actions, _ in logged]))
        for end, (actions, reached) in zip(ends, logged, strict=True):
            assert mark(actions, end).digest == reached
    assert bits(first.collect({}, 3)) == bits(second.collect({}, 3))
    first.close()
    second.close()


def state(seed: int) -> State:
    """Arrays of several types and shapes, an empty one and a scalar among them."""
    rng = np.random.default_rng(seed)
    params = {"params": {"Dense_0": {"kernel": rng.normal(size=(50, 30)).astype(np.float32), "bias": np.float32(seed)}}}
    opt = (np.int32(seed), {"mu": params, "nu": jax.numpy.asarray(rng.normal(size=4), "bfloat16")}, ())
    return State(params, opt)


def snapshot(update: int, carry: bool = True) -> Snapshot:
    carries = {
        shard: (np.full((2, 4), update + shard, np.float32), {"c": np.arange(shard, shard + 2)}) for shard in (0, 1)
    }
    memories = {shard: {"seen": np.arange(9 * update + shard), "written": np.int32(update)} for shard in (0, 1)}
    own = {shard: {"carry": carries[shard], "memory": memories[shard]} if carry else {} for shard in (0, 1)}
    progress = {"global_step": 12 * update, "returns": [0.1 * update]}
    acting = state(update - 1).params
    return Snapshot(update, 1, state(update), acting, own, progress)


def save(checkpoints: Checkpoints, update: int, carry: bool = True) -> bool:
    """What a run does at an update with a checkpoint."""
    whole = snapshot(update, carry)
    checkpoints.actions.add(update, 1, marks(update))
    checkpoints.begin(whole)
    if good := checkpoints.outcome():
        checkpoints.commit(update)
    else:
        checkpoints.discard(update)
    return good


def check(loaded: Snapshot, update: int, shards: tuple[int, ...] = (0, 1)) -> None:
    """It is the snapshot of this update, bit for bit."""
    wanted = snapshot(update)
    assert bits(like(wanted.state, loaded.state)) == bits(wanted.state)
    assert bits(like(wanted.acting, loaded.acting)) == bits(wanted.acting)
    assert loaded.shards.keys() == set(shards)
    for shard in shards:
        for what, own in wanted.shards[shard].items():
            assert bits(like(own, loaded.shards[shard][what])) == bits(own)
    assert (loaded.update, loaded.envs_since, loaded.progress) == (update, 1, wanted.progress)


class TestCheckpoints:
    def test_they_come_back_bit_for_bit(self, tmp_path: Path) -> None:
        checkpoints = Checkpoints(tmp_path, ARGS, process=0)
        assert save(checkpoints, 1)
        assert save(checkpoints, 2)
        again = Checkpoints(tmp_path, ARGS, process=0)
        assert again.newest() == 2
        for update in (1, 2):
            check(again.load(update, [0, 1]), update)
        check(again.load(2, [1]), 2, shards=(1,))

    def test_without_a_memory_and_without_a_lag_nothing_is_missed(self, tmp_path: Path) -> None:
        checkpoints = Checkpoints(tmp_path, ARGS, process=0)
        checkpoints.actions.add(1, 1, marks(1))
        checkpoints.begin(snapshot(1, carry=False)._replace(acting=()))
        assert checkpoints.outcome()
        checkpoints.commit(1)
        loaded = checkpoints.load(1, [0, 1])
        assert not loaded.shards
        assert not loaded.acting
        assert not list(tmp_path.rglob("*.safetensors"))
        assert bits(like(state(1), loaded.state)) == bits(state(1))

    def test_each_process_writes_its_own_part(self, tmp_path: Path) -> None:
        both = [Checkpoints(tmp_path, ARGS, process) for process in (0, 1)]
        whole = snapshot(1)
        for process, own in enumerate(both):
            own.actions.add(1, 1, {process: marks(1)[process]})
            own.begin(whole._replace(shards={process: whole.shards[process]}))
            assert own.outcome()
        assert both[0].all() == []  # not before all have written
        both[0].commit(1)
        check(Checkpoints(tmp_path, ARGS, 0).load(1, [0, 1]), 1)

    def test_another_algorithm_is_refused(self) -> None:
        with pytest.raises(Damaged, match="other arrays"):
            like(state(1), named(state(1).params))
        with pytest.raises(Damaged, match="other arrays"):
            like({"a": np.zeros(3)}, {"a": np.zeros(4)})

    def test_so_many_are_kept(self, tmp_path: Path) -> None:
        checkpoints = Checkpoints(tmp_path, ppo.Args(num_envs=4, num_shards=2, num_steps=3, keep_checkpoints=3), 0)
        for update in range(1, 6):
            save(checkpoints, update)
        assert checkpoints.all() == [5, 4, 3]

    def test_what_was_not_completed_is_removed_and_reported(self, tmp_path, capsys) -> None:
        checkpoints = Checkpoints(tmp_path, ARGS, process=0)
        save(checkpoints, 1)
        checkpoints.actions.add(2, 1, marks(2))
        checkpoints.begin(snapshot(2))
        assert checkpoints.outcome()  # but killed before `commit`
        again = Checkpoints(tmp_path, ARGS, process=0)
        assert again.newest() == 1
        assert "00000002.part was not completed and is removed" in capsys.readouterr().err
        assert not list(tmp_path.rglob("*.part"))

    @pytest.mark.parametrize("keep", [1, 2])
    def test_a_damaged_one_is_replaced_and_never_outlives_a_good_one(self, keep: int, tmp_path, capsys) -> None:
        args = ppo.Args(num_envs=4, num_shards=2, num_steps=3, keep_checkpoints=keep + 1)
        checkpoints = Checkpoints(tmp_path, args, process=0)
        for update in (1, 2, 3):
            save(checkpoints, update)
        shutil.copytree(
            tmp_path / "checkpoints" / "00000003", tmp_path / "checkpoints" / "00000004"
        )  # of a later update
        (tmp_path / "checkpoints" / "00000003" / "checkpoint.json").unlink()
        again = Checkpoints(tmp_path, ppo.Args(num_envs=4, num_shards=2, num_steps=3, keep_checkpoints=keep), process=0)
        assert again.newest() == 2
        capsys.readouterr()
        save(again, 3)
        assert again.all() == [3, 2][:keep]
        assert again.newest() == 3
        assert capsys.readouterr().err == ""
        check(again.load(3, [0, 1]), 3)

    def test_completing_one_twice_does_no_harm(self, tmp_path: Path) -> None:
        """As a signal may make it happen."""
        checkpoints = Checkpoints(tmp_path, ARGS, process=0)
        save(checkpoints, 1)
        checkpoints.commit(1)
        assert checkpoints.newest() == 1

    def test_a_full_disk_leaves_the_last_good_one(self, small_disk: Callable[[int], Path], capsys) -> None:
        disk = small_disk(400)
        checkpoints = Checkpoints(disk, ARGS, process=0)
        assert save(checkpoints, 1)
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        (disk / "other").write_bytes(bytes(free - 8192))
        assert not save(checkpoints, 2)
        said = capsys.readouterr().err
        assert "the checkpoint of update 2 could not be written" in said
        assert "No space left" in said
        assert "the last good one is of update 1" in said
        assert said.count("\n") == 1
        assert checkpoints.newest() == 1
        check(checkpoints.load(1, [0, 1]), 1)
        (disk / "other").unlink()
        assert save(checkpoints, 3)
        check(checkpoints.load(3, [0, 1]), 3)  # rollout 2, which was refused then, is in the logs as well


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "cut": cut,
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "first byte": lambda path: flip(path, 0),
    "middle byte": lambda path: flip(path, path.stat().st_size // 2),
    "last byte": lambda path: flip(path, -1),
    "emptied": lambda path: path.write_bytes(b""),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "deleted": lambda path: path.unlink(),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with checkpoints of updates 1 and 2."""
    run = tmp_path_factory.mktemp("two")
    checkpoints = Checkpoints(run, ARGS, process=0)
    assert save(checkpoints, 1)
    assert save(checkpoints, 2)
    return run


@pytest.mark.parametrize("how", DAMAGES)
def test_whatever_file_is_damaged_no_wrong_number_is_loaded(how: str, two: Path, tmp_path, capsys) -> None:
    files = [path.relative_to(two) for path in two.rglob("*") if path.is_file() and "00000002" in path.parts]
    assert len(files) > 8
    for number, file in enumerate(files):
        run = tmp_path / str(number)
        shutil.copytree(two, run)
        DAMAGES[how](run / file)
        checkpoints = Checkpoints(run, ARGS, process=0)
        newest = checkpoints.newest()
        said = capsys.readouterr().err
        assert newest == 1, file
        check(checkpoints.load(1, [0, 1]), 1)
        assert said.startswith("warning: the checkpoint of update 2 is passed over: "), file
        assert file.name in said
        assert said.count("\n") == 1, said


@pytest.mark.parametrize("how", sorted(DAMAGES.keys() - {"last byte"}))  # which is of the digest that a replay checks
def test_a_damaged_log_of_actions_is_noticed_before_it_is_used(how: str, two: Path, tmp_path: Path, capsys) -> None:
    run = tmp_path / "run"
    shutil.copytree(two, run)
    log = run / "checkpoints" / "actions_00000001" / "shard_00001.log"
    assert log.stat().st_size == 2 * RECORD
    DAMAGES[how](log)
    newest = Checkpoints(run, ARGS, process=0).newest()
    assert newest == {"cut": 1, "halved": 1, "middle byte": 1}.get(how, 0)
    said = capsys.readouterr().err
    assert said.count("shard_00001.log") == 2 - newest
    assert "rollout" in said or "No such file" in said


def record(update: int, **changes: Any) -> dict[str, Any]:
    common = {"update": update, "global_step": 10 * update, "policy_lag": 1, "stats/time": float(update)}
    return common | {"losses/loss": update / 3} | changes


def curve(run: Path, name: str = "losses/loss") -> list[tuple[int, Any]]:
    """(step, value) of everything in the only file of TensorBoard's."""
    [path] = (run / "tensorboard").iterdir()
    events = [Event.FromString(data) for data in tf_records(path.read_bytes())]
    assert events[0].file_version == "brain.Event:2"
    return [(e.step, pytest.approx(v.simple_value)) for e in events for v in e.summary.value if v.tag == name]


def tf_records(rest: bytes) -> Iterator[bytes]:
    """Length, checksum, data, checksum."""
    while rest:
        length, check = struct.unpack("<QI", rest[:12])
        data, rest = rest[12 : 12 + length], rest[12 + length :]
        assert check == masked_crc32c(struct.pack("<Q", length))
        assert struct.unpack("<I", rest[:4])[0] == masked_crc32c(data)
        yield data
        rest = rest[4:]


def updates(run: Path) -> list[int]:
    return [json.loads(line)["update"] for line in (run / "metrics.jsonl").read_text().splitlines()]


class TestRecords:
    def test_a_resumed_run_has_neither_gaps_nor_doubles(self, tmp_path: Path) -> None:
        first = Records(tmp_path, done=0)
        for n in range(1, 6):
            first.add(record(n))
        first.close(failed=False)
        [old] = (tmp_path / "tensorboard").iterdir()
        old.rename(old.with_name("events.out.tfevents.1"))  # of a second ago
        second = Records(tmp_path, done=3)
        assert [step for step, _ in curve(tmp_path)] == [10, 20, 30]
        for n in (4, 5, 6):
            second.add(record(n, **{"losses/loss": -n}))
        second.close(failed=False)
        assert updates(tmp_path) == [1, 2, 3, 4, 5, 6]
        assert curve(tmp_path) == [(10, 1 / 3), (20, 2 / 3), (30, 1.0), (40, -4), (50, -5), (60, -6)]
        assert [step for step, _ in curve(tmp_path, "charts/policy_lag")] == [10, 20, 30, 40, 50, 60]

    def test_a_half_written_line_is_dropped(self, tmp_path: Path) -> None:
        whole = "".join(json.dumps(record(n)) + "\n" for n in (1, 2, 3))
        (tmp_path / "metrics.jsonl").write_text(whole[:-5])
        records = Records(tmp_path, done=2)
        records.add(record(3))
        records.close(failed=False)
        assert (tmp_path / "metrics.jsonl").read_text() == whole
        assert [step for step, _ in curve(tmp_path)] == [10, 20, 30]

    def test_lost_lines_are_reported_and_others_never_cut(self, tmp_path: Path, capsys) -> None:
        whole = "".join(json.dumps(record(n)) + "\n" for n in (1, 2, 3))
        (tmp_path / "metrics.jsonl").write_text(whole)
        records = Records(tmp_path, done=5)
        records.close(failed=False)
        assert "ends after update 3; those up to 5 are lost" in capsys.readouterr().err
        damaged = whole.replace('"update": 2', '"update" 2')
        (tmp_path / "metrics.jsonl").write_text(damaged)
        with pytest.raises(ValueError, match=r"metrics.jsonl is damaged: line 2"):
            Records(tmp_path, done=3)
        assert (tmp_path / "metrics.jsonl").read_text() == damaged

    def test_a_full_disk_delays_them(self, small_disk: Callable[[int], Path], capsys) -> None:
        disk = small_disk(64)
        records = Records(disk, done=0)
        records.add(record(1))
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
        (disk / "other").write_bytes(bytes(free))
        for n in range(2, 200):
            records.add(record(n))
        assert (disk / "metrics.jsonl").read_bytes().count(b"\n") < 100
        (disk / "other").unlink()
        records.add(record(200))
        records.add(record(201))
        records.close(failed=False)
        assert updates(disk) == list(range(1, 202))
        assert [step for step, _ in curve(disk)] == list(range(10, 2011, 10))
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "metrics cannot be written and are kept in memory" in said
