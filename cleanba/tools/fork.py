"""A new run that begins where another one stood, with other arguments.

Run:  cleanba fork runs/RUN --update 200 --run-dir runs/NEW -- --learning-rate 1e-4
"""

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from cleanba.core.checkpoint import Checkpoints, Damaged
from cleanba.core.evaluate import algorithm, experiment_args
from cleanba.core.records import write_json
from cleanba.core.usage import read, usage_error
from cleanba.tools.runs import flags, read_config

# What the environments depend on: with other values they could not be replayed. And the lag, because a checkpoint holds
# the parameters of the rollout under way.
KEPT = ["env_id", "engine", "atari_protocol", "seed", "num_envs", "num_steps", "num_shards", "renew_envs_every"]
KEPT += ["concurrency"]


@dataclass(frozen=True)
class Fork:
    """Start a new run from a checkpoint of another, with changed arguments, which its config.json records."""

    run: Annotated[Path, tyro.conf.Positional]
    """the run directory to start from"""
    run_dir: Path
    """the new one"""
    changes: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- ARGUMENTS")] = ()
    """arguments of the algorithm that change, such as -- --learning-rate 1e-4"""
    update: int | None = None
    """the update to start after; there must be a checkpoint of it (default: the last one)"""
    script: str = ""
    """the algorithm's file, if it is not one of Cleanba's"""

    def main(self) -> None:
        """Copy the checkpoint, write what changed, and become the new run."""
        config = read_config(self.run)
        module = algorithm(config["algorithm"], self.script)
        old = experiment_args(module, config["experiment"])
        new = read(module.Args, list(self.changes), default=old).check()
        changed = {k: [old.experiment[k], v] for k, v in new.experiment.items() if v != old.experiment[k]}
        if fixed := [f"--{name.replace('_', '-')}" for name in KEPT if name in changed]:
            usage_error(f"{', '.join(fixed)} cannot change in a fork: the rollout under way could not go on")
        update = self._choose(old)
        if update > new.num_updates:
            usage_error(f"--total-timesteps {new.total_timesteps} ends before update {update}, where the fork begins")
        if self.run_dir.exists():
            usage_error(f"--run-dir {self.run_dir} exists; a fork needs a new one")
        shutil.copytree(self.run / "checkpoints" / f"{update:08d}", self.run_dir / "checkpoints" / f"{update:08d}")
        for log in (self.run / "checkpoints").glob("actions_*"):
            shutil.copytree(log, self.run_dir / "checkpoints" / log.name)
        shutil.copy(self.run / "metrics.jsonl", self.run_dir)
        origin = {"run": str(self.run), "update": update, "changed": changed}
        config |= {"name": self.run_dir.name, "experiment": new.experiment, "forked_from": origin, "sessions": []}
        write_json(self.run_dir / "config.json", config)
        machine = {k: v for k, v in new.machine.items() if v != getattr(type(new)(), k)}
        words = flags(new.experiment | machine | {"run_dir": str(self.run_dir)})
        print(f"forked after update {update} of {self.run}", flush=True)
        os.execv(sys.executable, [sys.executable, str(module.__file__), *words])

    def _choose(self, old: Any) -> int:
        checkpoints = Checkpoints(self.run, old, process=0)
        there = checkpoints.all()
        update = self.update if self.update is not None else next(iter(there), 0)
        if update not in there:
            usage_error(f"{self.run} has no checkpoint of update {update}; there are {there or 'none'}")
        try:
            checkpoints.load(update, range(old.num_shards))
        except Damaged as error:
            usage_error(f"the checkpoint of update {update} cannot be used: {error}")
        return update
