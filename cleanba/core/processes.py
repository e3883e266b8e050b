"""The processes of one run: starting them on this machine, joining a scheduler's, missing one that is gone.

Three things cross processes: gradients (shards.py), small records (`gather`), and the heartbeats and
last words of `Peers`. JAX notices a lost process only by a hanging or breaking collective, and cannot say which or why.
"""

import contextlib
import ipaddress
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax._src.clusters import ClusterEnv  # JAX offers its detection of schedulers only together with joining them
from jax._src.lib import _jax

SUPERVISED = "CLEANBA_SUPERVISED"  # the variable that marks processes which `supervise` started
PATIENCE = 300.0  # seconds for all processes of a run to be started
PARTS = 8  # of the time after which a silent process counts as lost; a stop of this process makes up one at most
GRACE = 5.0  # seconds for a process to end by itself once it knows that the run has failed


class Place(NamedTuple):
    """Which process this is, of how many, and where they meet."""

    process: int
    processes: int
    coordinator: str  # host:port

    @property
    def is_loopback(self) -> bool:
        """All processes are on this machine, by the coordinator's address."""
        host = self.coordinator.rsplit(":", 1)[0].strip("[]")
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(host).is_loopback
        return host == "localhost"


def find_place(coordinator: str, process: int | None, processes: int) -> Place | None:
    """From arguments, from JAX_... variables, or from the scheduler as JAX detects it; None if nobody started us."""
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS", "")
    if coordinator:
        number = process if process is not None else int(os.environ.get("JAX_PROCESS_ID", "0"))
        return Place(number, int(os.environ.get("JAX_NUM_PROCESSES", processes)), coordinator)
    found = (env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present())
    for env in found:
        address = env.get_coordinator_address(
            timeout_secs=int(PATIENCE), override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT")
        )
        return Place(env.get_process_id(), env.get_process_count(), address)
    return None


def join(place: Place, peer_timeout: float) -> None:
    """Make this process one of several; before JAX starts. A silent peer is noticed by `Peers`, earlier than by JAX."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = _own_address(place)
    if address is not None:  # by itself gloo listens where the host name leads
        _jax.make_gloo_tcp_collectives = partial(_jax.make_gloo_tcp_collectives, hostname=address)
    waits = f"process {place.process} of {place.processes} waits at {place.coordinator}, up to {PATIENCE:.0f} s"
    notice = threading.Timer(10.0, print, args=(f"{waits}, until all have come",), kwargs=dict(file=sys.stderr))
    notice.daemon = True
    notice.start()
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        cluster_detection_method="deactivate",
        initialization_timeout=int(PATIENCE),
        coordinator_bind_address=place.coordinator if place.is_loopback else None,
        heartbeat_timeout_seconds=int(peer_timeout + 30),
    )
    notice.cancel()


def _own_address(place: Place) -> str | None:
    """The address that this machine reaches the coordinator from; None where only the host name can tell."""
    host, port = place.coordinator.rsplit(":", 1)
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            family, kind, *_, target = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            break
        except socket.gaierror as error:  # a pod's name is known only after the pod has started
            if time.monotonic() > deadline:
                raise RuntimeError(f"the coordinator's address {place.coordinator} is not known: {error}") from error
            time.sleep(1)
    with socket.socket(family, kind) as probe:
        probe.connect(target)
        address = probe.getsockname()[0]
    return address if place.is_loopback or not ipaddress.ip_address(address).is_loopback else None


class PeerLost(RuntimeError):
    """Another process ended or fell silent; this one cannot go on."""

    def __init__(self, message: str, status: int = 1):
        super().__init__(message)
        self.status = status


class Peers:
    """A star of connections with process 0 in the middle, for heartbeats and last words. Alone: does nothing.

    `lost` is called once, with a PeerLost, when another process has failed, died or fallen silent.
    """

    def __init__(self, place: Place, timeout: float, gather: Callable[[np.ndarray], np.ndarray]):
        """`gather` stacks the arrays of all processes."""
        self.place, self._timeout, self._gather = place, timeout, gather
        self.lost: Callable[[PeerLost], None] = self._leave
        self._links: dict[int, socket.socket] = {}
        self._gone: set[int] = set()
        self._over = False
        self._loss: PeerLost | None = None
        self._changed = threading.Condition()

    def connect(self) -> None:
        """Meet the others, and begin to listen to them."""
        if self.place.processes > 1:
            self._meet()
            for peer in self._links:
                threading.Thread(target=self._listen, args=(peer,), name=f"peer-{peer}", daemon=True).start()
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _meet(self) -> None:
        """Process 0 waits; the others learn its port, and a token that only they know, through JAX."""
        host = self.place.coordinator.rsplit(":", 1)[0].strip("[]")
        listener, secret = None, np.zeros(2, np.uint32)
        if self.place.process == 0:
            both = not self.place.is_loopback and socket.has_dualstack_ipv6()  # versions of the Internet Protocol
            family = socket.AF_INET6 if both or ":" in host else socket.AF_INET
            address = (host if self.place.is_loopback else "", 0)
            listener = socket.create_server(address, family=family, dualstack_ipv6=both)
            secret = np.array([listener.getsockname()[1], secrets.randbits(32)], np.uint32)
        with _quiet():
            port, token = self._gather(secret)[0].tolist()
        if listener is None:
            link = socket.create_connection((host, port), timeout=self._timeout)
            link.sendall(f"{token} {self.place.process}\n".encode())
            self._links[0] = link
            return
        with listener:
            self._welcome(listener, str(token).encode())

    def _welcome(self, listener: socket.socket, token: bytes) -> None:
        """Until all have come who know the token. A stranger, even a silent one, keeps nobody waiting."""
        nameless: list[socket.socket] = []
        while len(self._links) < self.place.processes - 1:
            ready = select.select([listener, *nameless], [], [], self._timeout)[0]
            if not ready:
                raise TimeoutError(f"only {len(self._links) + 1} of {self.place.processes} processes have come")
            for one in ready:
                if one is listener:
                    nameless.append(listener.accept()[0])
                    continue
                nameless.remove(one)
                said = []
                with contextlib.suppress(OSError):
                    greeting = one.recv(100, socket.MSG_PEEK).partition(b"\n")[0]
                    said = one.recv(len(greeting) + 1).split()  # not what may follow it
                if len(said) == 2 and said[0] == token:
                    self._links[int(said[1])] = one
                else:
                    one.close()
        for stranger in nameless:
            stranger.close()

    def _beat(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._over, timeout=min(1.0, self._timeout / 4)):
                    return
            self._send(list(self._links), "")

    def _send(self, peers: list[int], line: str) -> None:
        for peer in peers:
            with contextlib.suppress(OSError):
                self._links[peer].sendall(f"{line}\n".encode())

    def _listen(self, peer: int) -> None:
        """Until the peer's connection ends or falls silent; its last word comes before that."""
        said, reason = False, "died without a last word (killed?)"
        try:
            for line in self._lines(self._links[peer]):
                if line:
                    said = True
                    self._heard(peer, **json.loads(line))
        except TimeoutError:
            reason = f"has not answered for {self._timeout:.0f} s (stopped, or its network is down)"
        except OSError:
            pass  # reset by the peer's death
        with self._changed:
            self._gone.add(peer)
            self._changed.notify_all()
        if not said:
            self._heard(peer, peer, 1, reason)

    def _lines(self, link: socket.socket) -> Iterator[bytes]:
        """What a peer says. TimeoutError when it is silent for too long, while this process itself is not stopped."""
        silent, text = 0, b""
        link.settimeout(self._timeout / PARTS)
        while True:
            try:
                heard = link.recv(4096)
            except TimeoutError:
                silent += 1
                if silent == PARTS:
                    raise
                continue
            if not heard:
                return
            silent = 0
            *lines, text = (text + heard).split(b"\n")
            yield from lines

    def _heard(self, peer: int, process: int, status: int, reason: str) -> None:
        """A last word, of this peer or handed on by it. A good end has no reason; anything else ends this process."""
        if not reason:
            return
        word = json.dumps({"process": process, "status": status, "reason": reason})
        self._send([other for other in self._links if other not in {peer, process}], word)
        loss = PeerLost(f"process {process} {reason}", status)
        with self._changed:
            first, self._over = not self._over, True
            if first and status:  # before all else: the main thread may hang in a collective, or JAX abort this process
                print(f"process {self.place.process} ends: {loss}", file=sys.stderr, flush=True)
            self._loss = self._loss or loss
            self._changed.notify_all()
        if first:
            hang = threading.Timer(GRACE, os._exit, args=(status,))  # in a collective that waits for the lost one
            hang.daemon = True
            hang.start()
            self.lost(loss)

    def cause(self, error: BaseException) -> BaseException:
        """Why this process really fails: a broken collective is soon followed by the news of who broke it."""
        with self._changed:
            # A ValueError is what JAX makes of gloo's.
            is_effect = self._links and isinstance(error, jax.errors.JaxRuntimeError | ValueError)
            if is_effect and self._changed.wait_for(lambda: self._loss is not None, timeout=GRACE):
                return self._loss or error
        return error

    def _leave(self, loss: PeerLost) -> NoReturn:
        """What `lost` does before a run has begun, and in a process that has nothing to close."""
        self.end(loss.status, f"ended because {loss}")
        os._exit(loss.status)

    def end(self, status: int, reason: str = "") -> None:
        """A last word to the others. Process 0, without whom JAX would abort them, waits until they are gone."""
        with self._changed:
            self._over = True
        self._send(list(self._links), json.dumps({"process": self.place.process, "status": status, "reason": reason}))
        if self.place.process == 0:
            with self._changed:
                self._changed.wait_for(lambda: len(self._gone) == len(self._links), timeout=GRACE)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what gloo prints when processes connect."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def supervise(processes: int, devices: int) -> int:
    """Run this program as so many processes on this machine, with `devices` GPUs each; the first failure's status.

    Process 0 has the terminal; what the others say is shown with their number. They share this process group, so a
    signal to the group reaches all; should this process vanish, their standard input ends and they end too.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    place = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gpus = visible.split(",") if visible else [str(i) for i in range(processes * devices)]
    children = []
    for i in range(processes):
        own = {"JAX_PROCESS_ID": str(i), "CUDA_VISIBLE_DEVICES": ",".join(gpus[i * devices : (i + 1) * devices])}
        output = None if i == 0 else subprocess.PIPE
        children.append(
            subprocess.Popen(
                [sys.executable, *sys.orig_argv[1:]],
                env=os.environ | place | own | {SUPERVISED: "1"},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT if i else None,
            )
        )

    def pass_on(signum: int, _: Any) -> None:
        for child in children:
            child.send_signal(signum)

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, pass_on)
    return _wait_for(children)


def end_with_supervisor() -> None:
    """Leave when the process that started this one has vanished."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    if os.environ.get(SUPERVISED):
        threading.Thread(target=watch, name="supervisor", daemon=True).start()


def _wait_for(children: list[subprocess.Popen]) -> int:
    """The first failure's status; the other processes know by themselves, and get a little time to say so."""
    ended: list[tuple[int, int]] = []
    changed = threading.Condition()

    def watch(i: int, child: subprocess.Popen) -> None:
        for line in child.stdout or ():
            print(f"[process {i}] {line.decode(errors='replace')}", end="", file=sys.stderr, flush=True)
        status = child.wait()
        with changed:
            ended.append((i, status))
            changed.notify_all()

    for i, child in enumerate(children):
        threading.Thread(target=watch, args=(i, child), daemon=True).start()
    with changed:
        changed.wait_for(lambda: len(ended) == len(children) or any(status for _, status in ended))
        first, status = next(((i, status) for i, status in ended if status), (0, 0))
        if status < 0:
            print(f"process {first} died: {signal.Signals(-status).name}", file=sys.stderr, flush=True)
        if not changed.wait_for(lambda: len(ended) == len(children), timeout=2 * GRACE if status else None):
            for child in children:
                child.kill()
    return status if status >= 0 else 128 - status
