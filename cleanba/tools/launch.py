"""Starting a run here, or as a job of Slurm or Kubernetes that goes on by itself after it was preempted.

Run:  cleanba launch cleanba/ppo.py --topology a0-l1,2,3-d2 --on slurm --time 1-00:00:00 -- --seed 3
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
import yaml

from cleanba.core.usage import read, usage_error

SUBMIT = {"slurm": ["sbatch"], "kubernetes": ["kubectl", "apply", "-f"]}
FOREIGN = {  # options that say nothing there
    "local": ["cpus", "gpus", "time", "partition", "account", "tasks_per_node", "image", "claim", "max_restarts"],
    "slurm": ["image", "claim", "max_restarts"],
    "kubernetes": ["time", "partition", "account", "tasks_per_node"],
}

SBATCH = """\
#!/bin/bash
{directives}
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=USR1@90
# The signal goes to the processes of srun: 90 s before the time limit they write a checkpoint and exit.

cd {directory} || exit 1
{before}srun --kill-on-bad-exit=1 --cpus-per-task={cpus} {command}
status=$?
# 128 + SIGUSR1 or SIGTERM: a checkpoint was written. Slurm requeues by itself only what it has killed.
case $status in 138 | 143) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit $status
"""

JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: "{name}"
spec:
  network: {{enableDNSHostnames: true}}
  failurePolicy:
    maxRestarts: {max_restarts}
    rules:
    - name: preempted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
  - name: run
    template:
      spec:
        completions: {processes}
        parallelism: {processes}
        completionMode: Indexed
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onExitCodes: {{operator: In, values: [138, 143]}}  # a checkpoint was written after SIGUSR1 or SIGTERM
          - action: FailJob
            onPodConditions: [{{type: DisruptionTarget, status: "True"}}]
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 90
            containers:
            - name: run
              image: "{image}"
              command:
{command}
              env:
              - {{name: JAX_COORDINATOR_ADDRESS, value: "{name}-run-0-0.{name}:55527"}}
              - {{name: JAX_NUM_PROCESSES, value: "{processes}"}}
              - name: JAX_PROCESS_ID
                valueFrom:
                  fieldRef: {{fieldPath: "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
              resources:
                requests: {{cpu: {cpus}}}
                limits: {{nvidia.com/gpu: {gpus}}}
              volumeMounts:
              - {{name: runs, mountPath: "{mount}"}}
            volumes:
            - {{name: runs, persistentVolumeClaim: {{claimName: "{claim}"}}}}
"""


def read_script(script: Path, argv: Sequence[str]) -> Any:
    """The script's arguments, checked as it does itself: no job should wait in a queue only to be refused."""
    from cleanba.core.evaluate import algorithm  # here, because importing JAX takes a second

    module = algorithm("", str(script))
    if not hasattr(module, "Args"):
        usage_error(f"{script} has no class Args; name an algorithm's file, such as cleanba/ppo.py")
    return read(module.Args, list(argv)).check()


def check_plain(option: str, value: str) -> None:
    """Exit unless the value means the same in a #SBATCH line, in YAML between quotes, and to the reader."""
    if not re.fullmatch(r"[\w./:@+,-]*", value, re.ASCII):
        usage_error(f"{option} {value!r}: use only letters, digits and . / : @ + , _ - here")


def directives(options: dict[str, Any]) -> str:
    """Options of sbatch as lines of its script, without those that say nothing."""
    return "\n".join(f"#SBATCH --{option}={value}" for option, value in options.items() if value)


@dataclass(frozen=True)
class Launch:
    """Start a run here, or write a job for Slurm or Kubernetes and submit it.

    After a preemption the job goes on from its last checkpoint. The run directory must be on a file system that all
    processes share. With --dry-run the job file is only written; it is yours to read and change.
    """

    script: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SCRIPT")]
    """the algorithm's file, such as cleanba/ppo.py"""
    arguments: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="-- ARGUMENTS")] = ()
    """what the script gets besides --topology and --run-dir"""
    topology: str = "a0-l0-d1"
    """which devices act and learn, in how many processes: a0-l1,2,3-d2"""
    on: Literal["local", "slurm", "kubernetes"] = "local"
    """who starts the processes"""
    dry_run: bool = False
    """show the command, or write the job file, and start nothing"""
    run_dir: str = ""
    """where the run's files go (default: runs/ENV__NAME__SEED__TIME; on Kubernetes /runs/..., in the container)"""
    cpus: int = 4
    """CPU cores of each process"""
    gpus: int | None = None
    """GPUs of each process, 0 to compute on the CPU (default: as many as the topology names)"""
    time: str = ""
    """Slurm: time limit, such as 1-00:00:00; the run then goes on in the queue again"""
    partition: str = ""
    """Slurm: partition"""
    account: str = ""
    """Slurm: account"""
    tasks_per_node: int = 1
    """Slurm: processes on each node"""
    image: str = ""
    """Kubernetes: container image with Cleanba; SCRIPT is a path in it too"""
    claim: str = "cleanba-runs"
    """Kubernetes: PersistentVolumeClaim (ReadWriteMany), mounted at the run directory's parent"""
    max_restarts: int = 10
    """Kubernetes: restarts after failures; those after preemptions are not counted"""

    def main(self) -> int:
        """Start the run, or write its job and submit it; the exit status is that of the script or the submission."""
        self.check()
        if self.on == "local":
            command = self.command(sys.executable, self.run_dir)
            if not self.dry_run:
                os.execv(sys.executable, command)
            print(shlex.join(command))
            return 0
        submit = SUBMIT[self.on]
        here = shutil.which(submit[0]) is not None
        if not (here or self.dry_run):
            usage_error(f"{submit[0]} is not on this machine; --dry-run writes the job file, to be submitted elsewhere")
        submit = [*submit, str(self.write())]
        if not self.dry_run:
            return subprocess.run(submit, check=False).returncode
        print(f"wrote {submit[-1]}; to start it: {shlex.join(submit)}{'' if here else ' (not on this machine)'}")
        return 0

    def check(self) -> None:
        """Exit with one line if this cannot be launched; `write` checks what only the script knows."""
        if not (self.script.is_file() and self.script.suffix == ".py"):
            usage_error(f"{self.script} is not a Python file; name an algorithm's, such as cleanba/ppo.py")
        for name in (word.split("=")[0].replace("_", "-") for word in self.arguments):
            if name in ("--topology", "--run-dir"):
                usage_error(f"{name} belongs before the --, not among the script's arguments")
        for field in fields(self):
            option, value = f"--{field.name.replace('_', '-')}", getattr(self, field.name)
            if field.name in FOREIGN[self.on] and value != field.default:
                usage_error(f"{option} is not for --on {self.on}")
            least = 1 if field.name in ("cpus", "tasks_per_node") else 0
            if isinstance(value, int) and value < least:
                usage_error(f"{option} {value} must be at least {least}")
            if field.name in ("time", "partition", "account", "image", "claim"):
                check_plain(option, value)
        if self.on == "kubernetes" and not (self.image and self.claim):
            usage_error("--on kubernetes needs --image and --claim")

    def command(self, python: str, run_dir: object) -> list[str]:
        """What each process runs; the same command with the same run directory goes on from the last checkpoint."""
        where = ["--run-dir", str(run_dir)] if run_dir else []
        return [python, str(self.script), "--topology", self.topology, *where, *self.arguments]

    def write(self) -> Path:
        """Write the job file and say where it is."""
        args = read_script(self.script, ["--topology", self.topology, *self.arguments])
        layout, needed = args.layout, args.layout.devices_needed
        gpus = needed if self.gpus is None else self.gpus
        if 0 < gpus < needed:
            usage_error(f"--gpus {gpus}: topology {layout} needs {needed}; give as many, or 0 to compute on the CPU")
        name = args.run_name(self.script.stem, int(time.time()))
        home = "/" if self.on == "kubernetes" else os.getcwd()
        run_dir = Path(os.path.normpath(os.path.join(home, self.run_dir or f"runs/{name}")))
        if len(run_dir.parts) < 3:
            usage_error(f"--run-dir {run_dir} needs a parent, such as /runs/{name}")
        check_plain("--run-dir", str(run_dir))
        if self.on == "slurm":
            text, path = self.sbatch(run_dir, layout.processes, gpus), run_dir.with_name(f"{run_dir.name}.sbatch")
        else:
            text, path = self.jobset(run_dir, layout.processes, gpus), Path(f"runs/{run_dir.name}.yaml")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.fsencode(text))
        except OSError as error:
            usage_error(f"{path} cannot be written: {error.strerror}")
        return path

    def sbatch(self, run_dir: Path, processes: int, gpus: int) -> str:
        """A job script for Slurm."""
        options = {
            "job-name": run_dir.name,
            "output": run_dir.with_name(f"{run_dir.name}.out"),
            "partition": self.partition,
            "account": self.account,
            "time": self.time,
            "nodes": -(-processes // self.tasks_per_node),
            "ntasks": processes,
            "ntasks-per-node": self.tasks_per_node,
            "cpus-per-task": self.cpus,
            "gpus-per-task": gpus,
        }
        return SBATCH.format(
            directives=directives(options),
            directory=shlex.quote(os.getcwd()),
            before="",
            cpus=self.cpus,
            command=shlex.join(self.command(sys.executable, run_dir)),
        )

    def jobset(self, run_dir: Path, processes: int, gpus: int) -> str:
        """A JobSet for Kubernetes: one Job, with a pod for each process."""
        name = re.sub(r"[^a-z0-9]+", "-", run_dir.name.lower()).strip("-")
        longest = 63 - len(f"-run-0-{processes - 1}-abcde")  # the name of a pod is at most 63 characters long
        if not re.fullmatch(rf"[a-z].{{,{longest - 1}}}", name):
            usage_error(f"--run-dir: Kubernetes needs a name of at most {longest} characters, a letter first: {name!r}")
        words = [word.replace("$", "$$") for word in self.command("python", run_dir)]  # or it would expand $(NAME)
        command = yaml.safe_dump(words, default_style='"', width=float("inf"))
        return JOBSET.format(
            **vars(self) | {"name": name, "processes": processes, "gpus": gpus, "mount": run_dir.parent},
            command=textwrap.indent(command.rstrip(), 14 * " "),
        )
