"""How fast a workload trains, and how fast it could: its parts measured beside the whole, in one process.

Run:  cleanba bench cleanba/ppo_atari.py -- --env-id Breakout-v5 --network nature --num-envs 32
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from cleanba.core.actors import Actors, Collected, Collector
from cleanba.core.args import parse
from cleanba.core.evaluate import algorithm
from cleanba.core.records import warn
from cleanba.core.rollout import Acted, EnvStep, Rollout
from cleanba.core.run import Run
from cleanba.core.seeding import Role, key
from cleanba.core.shards import Learner, each_shard
from cleanba.core.topology import to_device
from cleanba.core.usage import read, usage_error
from cleanba.tools.peers import Peer, PeerError, peers_for

PARTS = ("environments", "acting", "learning", "training")
WARM_UP = 3  # updates before anything is timed: the last programs are compiled in the second
WAITS = ("rollout_queue_get", "params_queue_get", "transfer", "log")


def random_action(params: Any, step: EnvStep, carry: Any, k: jax.Array, args: Any) -> Acted:
    """Any action."""
    space, B = args.env_spec.action_space, len(step.first)
    if not space.shape:
        return Acted(jax.random.randint(k, (B,), 0, args.env_spec.num_actions), carry)
    low, high = np.maximum(space.low, -1.0), np.minimum(space.high, 1.0)
    return Acted(jax.random.uniform(k, (B, *space.shape), minval=low, maxval=high), carry)


class Workload:
    """One training that can be held at the end of an update, so that its parts are timed alone in between."""

    def __init__(self, module: ModuleType, run: Run, actors: Actors):
        self._module, self._run, self._actors, self.args = module, run, actors, run.args
        self._learn = Learner(module.update, run)
        self._state = self._learn.init(module.init)
        self._actors.publish(1, self._state.params)
        self._n = 1
        self._ahead: Collected | None = None  # collected already, while the training was held
        self._unpublished: tuple[int, dict, Collected] | None = None
        self._blocks = [
            (device, shards, Collector(random_action, None, self.args, shards, device, Role.EVALUATE))
            for device, shards in zip(actors.devices, actors.blocks, strict=True)
        ]
        drawn = [[own for own, *_ in collector.collect({}, 1)] for *_, collector in self._blocks]
        self._actions = [np.stack([np.asarray(own.action) for own in block]) for block in drawn]  # [s, T, B, ...]
        self._threads = ThreadPoolExecutor(len(self._blocks))
        self._forward = jax.jit(self._act_on)

    def _act_on(self, params: Any, rollouts: Rollout, keys: jax.Array) -> jax.Array:
        """Step after step, and in each one shard after another, as a collector does; rollouts [s, T, B, ...]."""

        def one(carry: Any, row: tuple) -> tuple[Any, jax.Array]:
            step, keys = row
            acted = each_shard(partial(self._module.act, params, args=self.args), step, carry, keys)
            return acted.carry, acted.action

        steps = EnvStep(rollouts.obs[:, :-1], rollouts.reward, rollouts.first[:, :-1])
        rows = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), steps)
        return jax.lax.scan(one, rollouts.carry, (rows, keys))[1]

    def training(self, updates: int, hold: bool = False) -> None:
        """Some updates, as an algorithm's own loop makes them.

        With `hold` the last version is not published until the next call: the actors collect what they may without it,
        and then nothing runs.
        """
        for i in range(updates):
            self._release()
            collected = self._ahead or self._actors.collect(self._n)
            self._ahead = None
            self._state, metrics = self._learn(self._state, collected, self._n)
            self._unpublished = (self._n, metrics, collected)
            self._last = (self._n, collected)
            self._n += 1
            if not (hold and i == updates - 1):
                self._release()
            elif self.args.concurrency:
                self._ahead = self._actors.collect(self._n)
        if hold:
            self._seen = [self._seen_by(device, shards) for device, shards, _ in self._blocks]

    def _seen_by(self, device: jax.Device, shards: Sequence[int]) -> tuple[Rollout, jax.Array]:
        """The last rollouts of some shards, and keys to act with, on the device that acts there."""
        rollouts = jax.tree.map(lambda x: jnp.stack([x[shard] for shard in shards]), self._last[1].rollouts)
        keys = jax.random.split(key(self.args.seed, Role.EVALUATE), (self.args.num_steps, len(shards)))
        return to_device(rollouts, device), to_device(keys, device)

    def _release(self) -> None:
        if self._unpublished is not None:
            (n, metrics, collected), self._unpublished = self._unpublished, None
            self._actors.publish(n + 1, self._state.params)
            self._run.log(n, metrics, collected, self._state)

    def environments(self, rounds: int) -> None:
        """The same environments, with actions that are there already."""

        def work(block: tuple, actions: np.ndarray) -> None:
            for _ in range(rounds):
                block[2].replay(actions)

        list(self._threads.map(work, self._blocks, self._actions))

    def acting(self, rounds: int) -> None:
        """The policy on observations that are there already."""

        def work(block: tuple, seen: tuple) -> None:
            params = to_device(self.args.layout.local(self._state.params), block[0])
            for _ in range(rounds):
                jax.block_until_ready(self._forward(params, *seen))

        list(self._threads.map(work, self._blocks, self._seen))

    def learning(self, rounds: int) -> None:
        """The update on a rollout that is there already."""
        for _ in range(rounds):
            n, collected = self._last
            again, _ = self._learn(self._state, collected, n)
            self._state = self._state._replace(memory=again.memory)

    def close(self) -> None:
        """Release the environments."""
        for _, _, collector in self._blocks:
            collector.close()
        self._threads.shutdown()


@dataclass(frozen=True)
class Bench:
    """Measure environments, acting and learning alone, and the whole training, in turns, and compare them."""

    script: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")]
    """the algorithm's file"""
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- ARGUMENTS")] = ()
    """its arguments, after --"""
    rounds: int = 5
    """turns; the median and the extremes are shown"""
    updates: int = 2
    """updates of each part in a turn"""
    peers: bool = False
    """run PPO in plain PyTorch, of CleanRL, SB3 and SBX on the same work, in a virtual environment of their own"""
    without: tuple[str, ...] = ()
    """peers to leave out, such as sbx_ppo, which takes minutes for an update of a convolutional network on the CPU"""
    out: Path | None = None
    """write the figures to this file, as JSON"""

    def main(self) -> None:
        """Measure and print."""
        if min(self.rounds, self.updates) < 1:
            usage_error("--rounds and --updates must be at least 1")
        if self.out is not None and not self.out.resolve().parent.is_dir():
            usage_error(f"--out {self.out}: there is no such directory")
        module = algorithm("", str(self.script))
        with tempfile.TemporaryDirectory() as folder:
            arguments = [*self.arguments, "--run-dir", str(Path(folder) / "run"), "--checkpoint-every", "0"]
            first = read(module.Args, arguments).check()
            if first.layout.processes > 1:
                usage_error(f"topology {first.layout}: one process is measured; use -d1")
            updates = WARM_UP + self.rounds * (self.updates + 2) + 1  # the last rollout is only collected
            args = parse(module.Args, [*arguments, "--total-timesteps", str(updates * first.steps_per_update)])
            if self.peers and remembers(module, args):
                usage_error("--peers have no recurrent policy: compare with ppo.py or ppo_atari.py --network nature")
            others = [peer for peer in peers_for(args) if peer.name not in self.without] if self.peers else []
            figures = self._measure(module, args, others)
        report = summarize(figures, self.updates * args.steps_per_update)
        report |= {"script": self.script.name, "arguments": list(self.arguments), "topology": str(args.layout)}
        report |= {"cores": len(os.sched_getaffinity(0)), "rounds": self.rounds}
        if self.out is not None:
            self.out.write_text(json.dumps(report, indent=2) + "\n")
        print("\n".join(table(report)))

    def _measure(self, module: ModuleType, args: Any, others: list[Peer]) -> dict[str, list]:
        figures: dict[str, list] = {name: [] for name in (*PARTS, "waits", *(peer.name for peer in others))}
        begun = time.perf_counter()
        with Run(args) as run, Actors(module.act, run) as actors:
            work = Workload(module, run, actors)
            work.training(1)
            figures["first_update"] = [time.perf_counter() - begun]
            work.training(WARM_UP - 1, hold=True)
            for part in PARTS[:3]:
                getattr(work, part)(1)
            for _ in range(self.rounds):
                for part in PARTS[:3]:
                    figures[part].append(timed(partial(getattr(work, part), self.updates)))
                work.training(1)
                figures["training"].append(timed(partial(work.training, self.updates)))
                figures["waits"].append(list(_last_lines(run.dir, self.updates)))
                work.training(1, hold=True)
                for peer in others[:]:
                    try:
                        figures[peer.name].append(peer.steps_per_second())
                    except PeerError as error:
                        warn(f"{peer.name} cannot do this and is left out: {error}")
                        others.remove(peer)
                        del figures[peer.name]
            work.close()
        return figures


def remembers(module: ModuleType, args: Any) -> bool:
    """Whether the policy is recurrent."""

    def acted(k: jax.Array) -> Any:
        obs, B = args.env_spec.observation_space, args.envs_per_shard
        row = jnp.zeros((B, *obs.shape), jax.dtypes.canonicalize_dtype(obs.dtype))
        step = EnvStep(row, jnp.zeros(B), jnp.zeros(B, bool))
        return module.act(module.init(k, args).params, step, (), k, args)

    return bool(jax.tree.leaves(jax.eval_shape(acted, key(args.seed, Role.INIT)).carry))


def timed(function: Callable[[], None]) -> tuple[float, float]:
    """Seconds, and cores that were busy."""
    cpu, start = time.process_time(), time.perf_counter()
    function()
    seconds = time.perf_counter() - start
    return seconds, (time.process_time() - cpu) / seconds


def _last_lines(folder: Path, count: int) -> Iterator[dict[str, float]]:
    for line in (folder / "metrics.jsonl").read_text().splitlines()[-count:]:
        yield json.loads(line)


def summarize(figures: dict[str, list], steps: int) -> dict[str, Any]:
    """Medians with extremes over the rounds; ratios are taken within a round, where noise hits all alike."""
    speeds = {part: [steps / seconds for seconds, _ in figures[part]] for part in PARTS}
    ceiling = [1 / sum(1 / speed for speed in parts) for parts in zip(*(speeds[p] for p in PARTS[:3]), strict=True)]
    others = {name: values for name, values in figures.items() if name not in (*PARTS, "waits", "first_update")}
    rounds = zip(figures["training"], figures["waits"], strict=True)
    shares = [{w: sum(line[f"stats/{w}_time"] for line in lines) / s for w in WAITS} for (s, _), lines in rounds]
    return {
        "steps_per_second": {name: spread(values) for name, values in (speeds | {"ceiling": ceiling} | others).items()},
        "cores_busy": {part: spread([busy for _, busy in figures[part]]) for part in PARTS},
        "of_ceiling": spread([a / b for a, b in zip(speeds["training"], ceiling, strict=True)]),
        "times_peer": {
            n: spread([a / b for a, b in zip(speeds["training"], v, strict=True)]) for n, v in others.items()
        },
        "share_of_time": {wait: spread([share[wait] for share in shares]) for wait in WAITS},
        "seconds_to_first_update": figures["first_update"][0],
    }


def spread(values: list[float]) -> list[float]:
    """Median, smallest, largest."""
    return [statistics.median(values), min(values), max(values)]


def table(report: dict[str, Any]) -> list[str]:
    """The report as lines of Markdown."""

    def row(name: str, values: list[float], form: str, *more: str) -> str:
        median, low, high = (format(value, form) for value in values)
        return " | ".join(["", name, median, f"{low} .. {high}", *more, ""]).strip()

    speeds, busy = report["steps_per_second"], report["cores_busy"]
    command = " ".join([report["script"], *report["arguments"]])
    lines = [f"`{command}`, {report['topology']}, {report['cores']} cores, {report['rounds']} rounds", ""]
    lines += ["| | steps/s | spread | cores busy |", "| --- | --- | --- | --- |"]
    for name, values in speeds.items():
        lines.append(row(name, values, ",.0f", f"{busy[name][0]:.2f}" if name in busy else ""))
    lines += ["", "| training | | spread |", "| --- | --- | --- |", row("of the ceiling", report["of_ceiling"], ".2f")]
    lines += [row(f"times {name}", values, ".2f") for name, values in report["times_peer"].items()]
    names = ("learner waits for rollouts", "actors wait for parameters", "transfer", "logging")
    shares = report["share_of_time"].values()
    lines += [row(name, share, ".1%") for name, share in zip(names, shares, strict=True)]
    return [*lines, "", f"First update after {report['seconds_to_first_update']:.1f} s."]
