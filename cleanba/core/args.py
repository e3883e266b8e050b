"""The arguments every run has, the sizes derived from them, and checks that answer in one line."""

import functools
import math
import re
import sys
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeVar

from cleanba.core import envs
from cleanba.core.processes import Place, end_with_supervisor, find_place, supervise
from cleanba.core.topology import Topology, TopologyError
from cleanba.core.usage import read, usage_error

INSTEAD = {
    "--local-num-envs": "--num-envs, the number of all environments, however many devices and processes there are",
    "--num-actor-devices": "--topology, such as a0,1-l2,3-d1",
    "--distributed": "--topology, such as a0-l0-d2 for two processes",
    "--cuda": "JAX's own choice of device, or JAX_PLATFORMS=cpu",
}


@dataclass(frozen=True)
class MachineArgs:
    """Where and how a run is carried out. None of these changes a number that is learned."""

    topology: str = ""
    """which devices act and learn, in how many processes: a0-l1,2,3-d1 (default: a0-l0-d1)"""
    actor_device_ids: tuple[int, ...] = ()
    """the same as the a-part of the topology, such as 0 1"""
    learner_device_ids: tuple[int, ...] = ()
    """the same as the l-part of the topology, such as 2 3"""
    num_actor_threads: int = 1
    """actor threads on each actor device; the shards are shared out among them"""
    env_threads: int = 1
    """EnvPool threads for each actor thread"""
    collect: Literal["auto", "fused", "stepwise"] = "auto"
    """fused: a rollout is one jitted call through EnvPool's XLA interface; stepwise: a Python loop"""
    run_dir: str = ""
    """where the run's files go (default: runs/ENV__NAME__SEED__TIME)"""
    checkpoint_every: str = "5m"
    """updates (50) or time (90s, 5m, 2h) between checkpoints; 0: only at the end and on a signal"""
    keep_checkpoints: int = 2
    """how many are kept: where the newest is damaged, the one before serves"""
    resume_envs: Literal["exact", "fresh"] = "exact"
    """fresh: a resumed run goes on with new environments, where the old ones cannot be replayed; the numbers change"""
    coordinator_address: str = ""
    """host:port where the processes of a topology like a0-l0-d2 meet, if no scheduler says it; same as the variable
    JAX_COORDINATOR_ADDRESS"""
    process_id: int | None = None
    """which of them this is, from 0; same as JAX_PROCESS_ID"""
    peer_timeout: float = 60.0
    """seconds of silence after which a process counts as lost"""
    exp_name: str = ""
    """the NAME in that (default: the algorithm file's)"""
    save_model: bool = False
    """at the end: save the parameters, evaluate them on fresh environments, draw the learning curve"""
    eval_every: int = 0
    """updates between evaluations on fresh environments while training; 0: none"""
    eval_episodes: int = 20
    """episodes of an evaluation"""
    capture_video: bool = False
    """film the first episode of every evaluation into the run's videos/, and show it on Weights & Biases"""
    upload_model: bool = False
    """at the end: put the model on the Hugging Face Hub, too; implies --save-model"""
    hf_entity: str = ""
    """user or organization there"""
    quiet: bool = False
    """show neither progress nor results, only warnings and errors"""
    track: bool = False
    """log to Weights & Biases too (WANDB_MODE=offline works without a network)"""
    wandb_project_name: str = "cleanba"
    """Weights & Biases project"""
    wandb_entity: str | None = None
    """Weights & Biases team"""


@dataclass(frozen=True)
class CoreArgs(MachineArgs):
    """The experiment: with the algorithm file it decides every number."""

    SIGNED: ClassVar[tuple[str, ...]] = ()  # the arguments that may be negative

    env_id: str = "CartPole-v1"
    """the environment: one of EnvPool's, or a registered Gymnasium environment (also as module:Name-v0)"""
    engine: Literal["auto", "envpool", "gymnasium"] = "auto"
    """who steps the environments; auto: EnvPool if it has this one"""
    atari_protocol: Literal["machado", "classic"] = "machado"
    """machado: sticky actions, all 18 actions, whole games; classic: the wrappers of before 2018"""
    seed: int = 1
    """seed of everything"""
    total_timesteps: int = 500_000
    """environment steps of the run; it is cut to whole updates"""
    num_envs: int = 64
    """environments, over all devices and processes"""
    num_steps: int = 128
    """steps of each environment in a rollout"""
    num_shards: int = 8
    """parts that environments and gradients are computed in; the largest number of learners"""
    concurrency: bool = True
    """collect rollout n with version n-1 while update n-1 runs; without: wait for version n"""
    renew_envs_every: int = 0
    """make new environments every so many updates: a resumed run then replays at most that many; 0: never"""
    cpu_threads: int = 16
    """threads of XLA's pool on the CPU, and the most virtual devices: the order of a sum depends on it"""

    @property
    def envs_per_shard(self) -> int:
        """B"""
        return self.num_envs // self.num_shards

    @property
    def steps_per_update(self) -> int:
        """Rows of all rollouts of an update."""
        return self.num_envs * self.num_steps

    @property
    def num_updates(self) -> int:
        """Whole updates that fit into the steps asked for."""
        return self.total_timesteps // self.steps_per_update

    def run_name(self, algorithm: str, now: int) -> str:
        """ENV__NAME__SEED__TIME, as CleanRL names runs, in characters that do in a file's name."""
        name = f"{self.env_id}__{self.exp_name or algorithm}__{self.seed}__{now}"
        return re.sub(r"[^\w.-]", "-", name, flags=re.ASCII)

    @functools.cached_property
    def layout(self) -> Topology:
        """The topology, from whichever arguments named it."""
        if self.topology:
            return Topology.parse(self.topology)
        return Topology(self.actor_device_ids or (0,), self.learner_device_ids or (0,))

    @functools.cached_property
    def place(self) -> Place:
        """Which of the run's processes this is; the only one if nobody says otherwise."""
        try:
            found = find_place(self.coordinator_address, self.process_id, self.layout.processes)
        except ValueError as error:
            usage_error(f"JAX_PROCESS_ID or JAX_NUM_PROCESSES, or the scheduler's, is not a number: {error}")
        return found or Place(0, 1, "")

    @property
    def checkpoint_interval(self) -> tuple[int, float]:
        """Updates and seconds between checkpoints; 0 where that does not count."""
        match = re.fullmatch(r"(\d+)([smh]?)", self.checkpoint_every)
        if match is None:
            usage_error(f"--checkpoint-every {self.checkpoint_every!r} is neither updates (50) nor time (90s, 5m, 2h)")
        number, unit = int(match[1]), match[2]
        return (0, number * {"s": 1.0, "m": 60.0, "h": 3600.0}[unit]) if unit else (number, 0.0)

    @property
    def keeps_model(self) -> bool:
        """Whether the model is saved and evaluated at the end."""
        return self.save_model or self.upload_model

    @property
    def env_spec(self) -> envs.EnvSpec:
        """What the environment shows and takes."""
        return envs.make_spec(self.env_id, self.engine, self.atari_protocol)

    @property
    def experiment(self) -> dict[str, Any]:
        """The arguments that change numbers."""
        machine = {field.name for field in fields(MachineArgs)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in machine}

    @property
    def machine(self) -> dict[str, Any]:
        """The arguments that do not."""
        return {field.name: getattr(self, field.name) for field in fields(MachineArgs)}

    def check(self) -> Self:
        """Exit with one line if these arguments cannot be run; an algorithm adds its own checks."""
        for name, value in (self.experiment | self.machine).items():
            if isinstance(value, int | float) and name not in self.SIGNED and not 0 <= value < math.inf:
                usage_error(f"{option(name)} {value} must be a number that is not negative")
        counts = (
            "num_envs num_steps num_shards cpu_threads num_actor_threads env_threads eval_episodes keep_checkpoints"
        )
        for name in counts.split():
            self.check_that(getattr(self, name) > 0, f"{option(name)} must be at least 1")
        self.check_that(self.seed < 2**32, f"--seed {self.seed} is too large; the largest is {2**32 - 1}")
        self.check_divides("num_shards", "num_envs", self.num_envs)
        self.check_that(
            self.num_updates > 0,
            f"--total-timesteps {self.total_timesteps} is less than one update of {self.steps_per_update} steps "
            f"(--num-envs {self.num_envs} x --num-steps {self.num_steps})",
        )
        _ = self.checkpoint_interval
        self.check_that(
            self.hf_entity or not self.upload_model,
            "--upload-model needs --hf-entity NAME, a user or an organization on the Hugging Face Hub",
        )
        self.check_that(
            self.keeps_model or self.eval_every or not self.capture_video,
            "--capture-video films evaluations; add --save-model or --eval-every N",
        )
        self.check_that(self.peer_timeout > 0, "--peer-timeout must be more than 0 seconds")
        self.check_topology()
        try:
            can_fuse = self.env_spec.can_fuse
        except envs.EnvError as error:
            usage_error(f"--env-id: {error}")
        self.check_that(
            can_fuse or self.collect != "fused",
            f"--collect fused needs EnvPool on Linux and numbers of 32 bits, which {self.env_id} has not; use auto",
        )
        return self

    def check_topology(self) -> None:
        """The topology is written rightly, and its devices can share the shards."""
        both = self.topology and (self.actor_device_ids or self.learner_device_ids)
        self.check_that(not both, "give --topology or --actor-device-ids and --learner-device-ids, not both")
        try:
            layout = Topology.parse(str(self.layout))
        except TopologyError as error:
            usage_error(str(error))
        learners = len(layout.learners) * layout.processes
        threads = len(layout.actors) * self.num_actor_threads * layout.processes
        self.check_that(
            learners <= self.num_shards,
            f"topology {layout}: {learners} learners for --num-shards {self.num_shards}; "
            f"use at most {self.num_shards} learners or a larger --num-shards",
        )
        self.check_that(
            threads <= self.num_shards,
            f"topology {layout}: {threads} actor threads for --num-shards {self.num_shards}; "
            "use fewer actor devices or a smaller --num-actor-threads",
        )

    @property
    def remark(self) -> str:
        """What a run says about itself at its start, if anything."""
        return ""

    def check_devices(self) -> None:
        """Exit with one line if the run does not fit onto its devices, once they are known."""

    def check_that(self, condition: object, message: str) -> None:
        """Exit with this line unless the condition holds."""
        if not condition:
            usage_error(message)

    def check_parts(self, rows: int, parts: int) -> None:
        """Exit unless a shard's rows go evenly into minibatches and their parts."""
        self.check_that(
            parts and rows % parts == 0,
            f"a shard's {rows} rows (--num-envs {self.num_envs}, --num-shards {self.num_shards}, --num-steps "
            f"{self.num_steps}) do not go evenly into {parts} parts (minibatches x gradient accumulation steps)",
        )

    def check_discrete(self) -> None:
        """Exit unless the environment's actions are discrete."""
        try:
            _ = self.env_spec.num_actions
        except envs.EnvError as error:
            usage_error(f"--env-id {self.env_id}: {error}")

    def check_continuous(self, bounded: bool = False) -> None:
        """Exit unless the environment's actions are continuous, and within bounds if these are needed."""
        try:
            bounds = self.env_spec.action_bounds
        except envs.EnvError as error:
            usage_error(f"--env-id {self.env_id}: {error}; try HalfCheetah-v4")
        has_bounds = all(math.isfinite(x) for bound in bounds for x in bound.ravel())
        self.check_that(has_bounds or not bounded, f"--env-id {self.env_id}: its actions have no bounds to scale to")

    def check_frames(self) -> None:
        """Exit unless the environment shows stacked 84 x 84 frames."""
        shape = self.env_spec.observation_space.shape
        fits = len(shape) == 3 and shape[1:] == (84, 84)
        self.check_that(fits, f"--env-id {self.env_id}: shows {shape}, not stacked frames (4, 84, 84); try Pong-v5")

    def check_divides(self, divisor: str, what: str, value: int) -> None:
        """Exit unless the argument `divisor` divides `value`, and say which neighbours of `value` would do."""
        by = getattr(self, divisor)
        if by == 0 or value % by:
            below, above = (value // by * by, (value // by + 1) * by) if by else (0, 0)
            near = f"{below} or {above}" if below else str(above)
            usage_error(f"{option(divisor)} {by} does not divide {option(what)} {value}; {near} would do")


A = TypeVar("A", bound=CoreArgs)


def option(name: str) -> str:
    """num_envs -> --num-envs, as it is typed; text that is no field's name stays as it is."""
    return f"--{name.replace('_', '-')}" if name.isidentifier() else name


def parse(cls: type[A], argv: list[str] | None = None) -> A:
    """Read and check the command line, and start JAX as the topology wants it. Bad input: one line, exit status 2."""
    argv = sys.argv[1:] if argv is None else argv
    for word in argv:
        name = word.split("=")[0].replace("_", "-")
        if name in INSTEAD:
            usage_error(f"{name} is not used here; use {INSTEAD[name]}")
    args = read(cls, argv, description=sys.modules[cls.__module__].__doc__)
    args.check()
    end_with_supervisor()
    asked, started = args.layout.processes, args.place.processes
    if asked > 1 and not args.place.coordinator:
        raise SystemExit(supervise(asked, args.layout.devices_needed))
    args.check_that(
        asked == started,
        f"topology {args.layout} names {asked} process{'es' * (asked > 1)}, but {started} were started; "
        f"use -d{started} or start {asked}",
    )
    args.check_that(
        args.place.process < asked, f"process {args.place.process} is not one of the {asked} of topology {args.layout}"
    )
    args.check_that(
        asked == 1 or re.fullmatch(r".+:\d+", args.place.coordinator),
        f"the coordinator's address {args.place.coordinator!r} is not of the form host:port",
    )
    try:
        args.layout.start(args.cpu_threads, args.place, args.peer_timeout)
    except TopologyError as error:
        usage_error(str(error))
    args.check_devices()
    return args
