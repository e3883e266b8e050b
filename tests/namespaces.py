"""Machines made of network namespaces, a run with one process on each, and ways to lose one. Needs root and `ip`.

python tests/namespaces.py --processes 3 link-1 stop-0      # loses processes in these ways, prints rows of a table
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sessions import ENV, SOON, checkpoints, command, finish, result

SIZES = "--env-id CartPole-v1 --num-envs 16 --num-shards 4 --num-steps 32 --checkpoint-every 4"
FAULTS = "link", "silence", "stop", "kill"


class Machines:
    """So many, 10.77.0.1 and on, with a switch between them that nothing else is connected to."""

    def __init__(self, count: int):
        self.names = [f"cleanba-{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"cleanba-{os.getpid()}-switch"

    def __enter__(self) -> "Machines":
        try:
            _ip(f"netns add {self._switch}")
            _ip(f"-n {self._switch} link add switch up type bridge")
            for i, name in enumerate(self.names):
                _ip(f"netns add {name}")
                _ip(f"-n {name} link set lo up")
                _ip(f"-n {name} link add eth0 type veth peer name port{i} netns {self._switch}")
                _ip(f"-n {name} address add 10.77.0.{i + 1}/24 dev eth0")
                _ip(f"-n {name} link set eth0 up")
                _ip(f"-n {self._switch} link set port{i} up master switch")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self.names, self._switch]:
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                _ip(f"netns delete {name}")

    def unplug(self, machine: int) -> None:
        """The machine sees its link go down."""
        _ip(f"-n {self.names[machine]} link set eth0 down")

    def silence(self, machine: int) -> None:
        """The switch drops all packets from and to the machine; its link stays up."""
        _ip(f"-n {self._switch} link set port{machine} nomaster")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


def why_not() -> str:
    """Why there can be no machines here; empty if there can."""
    try:
        with Machines(1):
            return ""
    except FileNotFoundError:
        return "needs the command `ip`"
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces: {error.stderr.decode().strip()}"


class Spread:
    """A run with one process on each machine; leaving kills what is left of it."""

    def __init__(self, machines: Machines, run_dir: Path, arguments: str):
        self._machines, self._run_dir = machines, run_dir
        count = len(machines.names)
        place = {"JAX_COORDINATOR_ADDRESS": "10.77.0.1:7777", "JAX_NUM_PROCESSES": str(count)}
        script = command(run_dir, f"{arguments} --topology a0-l0-d{count}")
        self.processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *script],
                env=ENV | place | {"JAX_PROCESS_ID": str(i)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for i, name in enumerate(machines.names)
        ]

    def __enter__(self) -> "Spread":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait_for_checkpoint(self) -> None:
        deadline = time.monotonic() + SOON
        while not ((self._run_dir / "checkpoints").exists() and checkpoints(self._run_dir)):
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                self.__exit__()
                raise AssertionError("no checkpoint")
            time.sleep(0.02)

    def lose(self, process: int, fault: str) -> None:
        """By one of FAULTS."""
        if fault == "link":
            self._machines.unplug(process)
        elif fault == "silence":
            self._machines.silence(process)
        else:
            self.processes[process].send_signal(signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

    def wait_for_ends(self, since: float, seconds: float, without: int | None = None) -> dict[int, float]:
        """When each process ended, except one that cannot; those that did not in this time are left out."""
        ended: dict[int, float] = {}
        waiting = set(range(len(self.processes))) - {without}
        while waiting - ended.keys() and time.monotonic() < since + seconds:
            for i in waiting - ended.keys():
                if self.processes[i].poll() is not None:
                    ended[i] = time.monotonic() - since
            time.sleep(0.02)
        return ended


def _row(name: str, process: int, spread: Spread, seconds: float | None) -> str:
    if seconds is None:
        return f"| {name} | {process} | does not end | | |"
    _, err = spread.processes[process].communicate()
    own = [line for line in err.splitlines() if line.startswith("process ")]
    other = len(err.splitlines()) - len(own)
    said = "; ".join(own) + f" (and {other} other lines)" * (other > 0)
    return f"| {name} | {process} | {seconds:.1f} s | {spread.processes[process].returncode} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = [f"{fault}-{victim}" for fault in FAULTS for victim in (0, 1)]
    parser.add_argument("faults", nargs="*", default=default, help=f"such as {' '.join(default)} (default: all these)")
    parser.add_argument("--peer-timeout", type=float, default=10.0, help="seconds, as of a run")
    parser.add_argument("--processes", type=int, default=2, help="and machines")
    parser.add_argument("--updates", type=int, default=512, help="of the whole run")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and clean up
    sizes = f"{SIZES} --peer-timeout {args.peer_timeout} --total-timesteps {args.updates * 512}"
    with tempfile.TemporaryDirectory(prefix="cleanba-network-") as folder:
        finish(Path(folder) / "reference", sizes)
        print("| fault | process | ends after | status | says |\n| --- | --- | --- | --- | --- |", flush=True)
        for i, name in enumerate(args.faults):
            run_dir, fault, victim = Path(folder) / f"{i}-{name}", name.split("-")[0], int(name.split("-")[1])
            stopped = victim if fault == "stop" else None
            with Machines(args.processes) as machines, Spread(machines, run_dir, sizes) as spread:
                spread.wait_for_checkpoint()
                spread.lose(victim, fault)
                ended = spread.wait_for_ends(time.monotonic(), args.peer_timeout + SOON, without=stopped)
                for process in set(range(args.processes)) - {stopped}:
                    print(_row(name, process, spread, ended.get(process)), flush=True)
                if stopped is not None:
                    spread.processes[stopped].send_signal(signal.SIGCONT)
                    ended = spread.wait_for_ends(time.monotonic(), SOON)
                    print(_row(f"{name}, continued", stopped, spread, ended.get(stopped)), flush=True)
            last = checkpoints(run_dir)[-1]
            finish(run_dir, f"{sizes} --topology a0-l0-d1")
            equal = result(run_dir) == result(Path(folder) / "reference")
            print(
                f"| {name} | d1, after update {last} | | 0 | {'the same' if equal else 'ANOTHER'} result |", flush=True
            )


if __name__ == "__main__":
    main()
