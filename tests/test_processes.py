"""Several processes: finding each other, ending together, saying who failed and why; and runs that they share."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sessions import ENV, SMALL, assert_same, checkpoints, end, finish, lines, start, wait_for, wait_for_updates

from cleanba import ppo
from cleanba.core import processes
from cleanba.core.args import parse
from cleanba.core.processes import PeerLost, Peers, Place, find_place

SLURM = {"SLURM_JOB_ID": "4096", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
MPI = {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}


class TestFindPlace:
    @pytest.fixture(autouse=True)
    def nobody_started_us(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(os.environ):
            if name.startswith(("JAX_COORD", "JAX_PROC", "JAX_NUM", "SLURM_", "OMPI_")):
                monkeypatch.delenv(name)

    def test_nobody(self) -> None:
        assert find_place("", None, 2) is None
        assert ppo.Args().place == Place(0, 1, "")

    def test_arguments(self) -> None:
        assert find_place("node1:1234", 1, 2) == Place(1, 2, "node1:1234")
        args = ppo.Args(topology="a0-l0-d4", coordinator_address="node1:1234", process_id=3)
        assert args.place == Place(3, 4, "node1:1234")

    def test_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        variables = {"COORDINATOR_ADDRESS": "10.0.0.1:1234", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
        for name, value in variables.items():
            monkeypatch.setenv(f"JAX_{name}", value)
        assert find_place("", None, 2) == Place(3, 4, "10.0.0.1:1234")

    @pytest.mark.parametrize(
        ("variables", "place"),
        [
            (SLURM | {"SLURM_PROCID": "1"}, Place(1, 2, "localhost:61440")),
            (SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "gpu[07-09]"}, Place(0, 2, "gpu07:61440")),
            (SLURM | {"SLURM_PROCID": "1", "JAX_COORDINATOR_PORT": "99"}, Place(1, 2, "localhost:99")),
            (MPI | {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "5"}, Place(5, 8, "10.96.0.1:62624")),
        ],
    )
    def test_schedulers(self, variables: dict[str, str], place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert find_place("", None, 1) == place

    @pytest.mark.parametrize("process", range(4))
    @pytest.mark.parametrize(
        ("topology", "said"),
        [
            ("a0-l0-d2", "topology a0-l0-d2 names 2 processes, but 4 were started; use -d4 or start 2"),
            ("a0-l0", "topology a0-l0-d1 names 1 process, but 4 were started; use -d4 or start 1"),
        ],
    )
    def test_wrong_counts_are_one_line_on_every_process(
        self, process: int, topology: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys
    ) -> None:
        for name, value in (SLURM | {"SLURM_NTASKS": "4", "SLURM_PROCID": str(process)}).items():
            monkeypatch.setenv(name, value)
        assert refusal(f"--topology {topology}", capsys).endswith(f"{said}\n")

    @pytest.mark.parametrize(
        ("variables", "said"),
        [
            ({"JAX_PROCESS_ID": "2"}, "process 2 is not one of the 2"),
            ({"JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID"),
            ({"JAX_COORDINATOR_ADDRESS": "localhost"}, "host:port"),
        ],
    )
    def test_bad_variables_are_one_line(self, variables: dict, said: str, monkeypatch, capsys) -> None:
        for name, value in ({"JAX_COORDINATOR_ADDRESS": "localhost:1"} | variables).items():
            monkeypatch.setenv(name, value)
        assert said in refusal("--topology a0-l0-d2", capsys)


def refusal(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line that arguments are refused with."""
    with pytest.raises(SystemExit) as caught:
        parse(ppo.Args, line.split())
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("coordinator", "is_loopback"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False)],
)
def test_an_address_tells_whether_all_processes_are_on_this_machine(coordinator: str, is_loopback: bool) -> None:
    assert Place(0, 2, coordinator).is_loopback is is_loopback


class Team:
    """`Peers` of several processes, here in threads, with what each was told in the end."""

    def __init__(
        self,
        count: int,
        timeout: float = 20.0,
        meet: Callable[[int], Any] = lambda port: None,
        host: str = "127.0.0.1",
    ):
        """`meet` is called with the port when process 0 listens and nobody else has connected yet."""
        self.losses: list[list[PeerLost]] = [[] for _ in range(count)]
        self._secrets: list[Any] = [None] * count
        self._all = threading.Barrier(count, action=lambda: meet(int(self._secrets[0][0])))
        self.peers = [
            Peers(Place(i, count, f"[{host}]:1"), timeout, functools.partial(self._gather, i)) for i in range(count)
        ]
        for own, losses in zip(self.peers, self.losses, strict=True):
            own.lost = losses.append
        threads = [threading.Thread(target=own.connect) for own in self.peers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in threads)

    def _gather(self, process: int, x: np.ndarray) -> np.ndarray:
        self._secrets[process] = x
        self._all.wait(timeout=20)
        return np.stack(self._secrets)

    def disconnect(self, process: int) -> None:
        """As the system does when a process is gone."""
        for link in self.peers[process]._links.values():
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def heard(self, process: int, within: float = 10.0) -> tuple[str, int]:
        """What this process was told, and the status that it should end with."""
        wait_until(lambda: self.losses[process], within)
        [loss] = self.losses[process]
        return str(loss), loss.status


def wait_until(condition: Callable[[], Any], within: float) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.01)


class TestPeers:
    @pytest.fixture(autouse=True)
    def exits(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
        """The statuses that processes would have left with, being here but one process."""
        exits: list[int] = []
        monkeypatch.setattr(os, "_exit", exits.append)
        monkeypatch.setattr(processes, "_quiet", contextlib.nullcontext)
        monkeypatch.setattr(processes, "GRACE", 0.5)
        yield exits
        for team in self.teams:
            for process in range(len(team.peers)):
                team.peers[process].end(0)
                team.disconnect(process)

    def team(self, *args: Any, **options: Any) -> Team:
        self.teams.append(Team(*args, **options))
        return self.teams[-1]

    @pytest.fixture(autouse=True)
    def no_teams(self) -> None:
        self.teams: list[Team] = []

    def test_a_good_end_harms_nobody_and_process_0_leaves_last(self, exits: list[int]) -> None:
        team = self.team(3)
        for process in (1, 2):
            team.peers[process].end(0)
        left = threading.Thread(target=team.peers[0].end, args=(0,))
        left.start()
        team.disconnect(1)
        assert left.is_alive()
        team.disconnect(2)
        left.join(timeout=10)
        assert team.losses == [[], [], []]
        assert exits == []

    def test_a_failure_is_told_to_all_with_its_reason_and_status(self, exits: list[int]) -> None:
        team = self.team(3)
        team.peers[2].end(7, "ended: ValueError: the pole fell off")
        assert team.heard(0) == ("process 2 ended: ValueError: the pole fell off", 7)
        assert team.heard(1) == team.heard(0)  # by way of process 0
        assert team.losses[2] == []
        wait_until(lambda: exits == [7, 7], 10)  # who hangs in a collective leaves all the same

    def test_the_failure_of_process_0_is_told_to_all(self) -> None:
        team = self.team(3)
        team.peers[0].end(1, "ended: OSError: disk on fire")
        assert team.heard(1) == team.heard(2) == ("process 0 ended: OSError: disk on fire", 1)

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_death_is_noticed_at_once(self, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
        team = self.team(3)
        monkeypatch.setattr(team.peers[victim], "_send", lambda *words: None)  # the dead say nothing
        team.disconnect(victim)
        for process in {0, 1, 2} - {victim}:
            assert team.heard(process, within=5) == (f"process {victim} died without a last word (killed?)", 1)

    def test_silence_is_noticed_after_the_timeout(self) -> None:
        team = self.team(3, timeout=2.0)
        time.sleep(3)
        assert team.losses == [[], [], []]  # hearts beat
        before = time.monotonic()
        team.peers[1]._over = True
        assert team.heard(0) == ("process 1 has not answered for 2 s (stopped, or its network is down)", 1)
        assert 1 < time.monotonic() - before < 4
        assert team.heard(2) == team.heard(0)

    def test_strangers_are_ignored(self) -> None:
        strangers: list[socket.socket] = []

        def come(port: int) -> None:
            for words in (b"", b"1 1\n", b"\xff\x00\xfe", b"GET / HTTP/1.1\r\n\r\n", b"0" * 10_000):
                strangers.append(socket.create_connection(("127.0.0.1", port)))
                strangers[-1].sendall(words)

        team = self.team(3, timeout=1.0, meet=come)
        assert sorted(team.peers[0]._links) == [1, 2]
        team.peers[1].end(3, "left")
        assert team.heard(2) == ("process 1 left", 3)
        for stranger in strangers:
            stranger.close()

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
    def test_only_this_machine_can_connect(self, host: str) -> None:
        try:
            socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError:
            pytest.skip("no such address here")
        addresses: list[str] = []
        self.team(2, meet=lambda port: addresses.extend(listening(os.getpid())[port]), host=host)
        assert addresses == [host]

    def test_alone_nobody_is_missed(self) -> None:
        alone = Peers(Place(0, 1, ""), 1.0, lambda x: x)
        alone.connect()
        alone.end(0)
        error = ValueError("own")
        assert alone.cause(error) is error


def listening(pid: int) -> dict[int, list[str]]:
    """The ports that a process listens on, with their addresses."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(link))
    found: dict[int, list[str]] = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = row.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in inodes:
                address, port = local.split(":")
                words = [int(address[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(address), 8)]
                found.setdefault(int(port, 16), []).append(socket.inet_ntop(family, b"".join(words)))
    return found


def children(pid: int) -> list[int]:
    """Of a run's first process: those that it started, in their order."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return sorted(map(int, found.split()))


def is_left(process: subprocess.Popen[str]) -> bool:
    """Whether anybody of its process group is."""
    return subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).returncode == 0


def test_two_terminals_with_slurms_variables_give_the_same_bits(reference: Path, tmp_path: Path) -> None:
    """The original's recipe."""
    slurm = ENV | SLURM | {"SLURM_JOB_ID": str(os.getpid())}
    arguments = f"{SMALL} --topology a0-l0-d2"
    other = start(tmp_path / "run", arguments, slurm | {"SLURM_PROCID": "1"})
    out, err = finish(tmp_path / "run", arguments, 0, slurm | {"SLURM_PROCID": "0"})
    assert "fingerprint" in out
    assert err == ""
    assert end(other, 0) == ("", "")
    assert_same(tmp_path / "run", reference)


def test_processes_end_together(tmp_path: Path) -> None:
    """Three sessions of a run: one of two processes is killed, then the one that started both; then Ctrl-C."""
    long = SMALL.replace("7680", "76800")
    run, arguments = tmp_path / "run", f"{long} --topology a0-l0-d2 --checkpoint-every 2"
    process = start(run, arguments)
    wait_for_updates(run, process, 5)
    wait_for(lambda: checkpoints(run), process)
    ports = [port for child in children(process.pid) for port in listening(child).items()]
    assert {address for _, addresses in ports for address in addresses} == {"127.0.0.1", "::ffff:127.0.0.1"}
    before = time.monotonic()
    os.kill(children(process.pid)[1], signal.SIGKILL)
    _, err = end(process, 128 + signal.SIGKILL)
    assert time.monotonic() - before < 15
    assert "process 0 ends: process 1 died without a last word (killed?)\n" in err
    assert "process 1 died: SIGKILL\n" in err
    assert not is_left(process)

    saved, metrics = checkpoints(run)[-1], (run / "metrics.jsonl").read_bytes()
    process = start(run, arguments)
    wait_for(lambda: (run / "metrics.jsonl").read_bytes() != metrics, process)  # it has cut them off
    process.kill()
    process.wait()
    wait_until(lambda: not is_left(process), within=15)
    process.communicate()

    process = start(run, arguments)
    wait_for_updates(run, process)
    os.killpg(process.pid, signal.SIGINT)
    _, err = end(process, 130)
    assert "interrupted after step" in err
    assert "Traceback" not in err
    assert checkpoints(run)[-1] == len(lines(run)) > saved
    assert not is_left(process)
    assert len(json.loads((run / "config.json").read_text())["sessions"]) == 3


def test_a_failing_environment_ends_all_processes_and_is_named(tmp_path: Path) -> None:
    arguments = "--env-id oracle_env:Raises-v0 --num-envs 8 --num-shards 4 --num-steps 8 --topology a0-l0-d2"
    _, err = finish(tmp_path / "run", arguments, status=1)
    assert "ValueError: the pole fell off" in err
    assert "actor failed in shard" in err
    mine = [line for line in err.splitlines() if line.startswith("[process 1] ")]
    assert any("the pole fell off" in line for line in mine)
