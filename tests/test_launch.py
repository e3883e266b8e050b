"""`cleanba launch`: the job files it writes, what reaches the script through them, and what it refuses."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cleanba.tools.cli import main

ROOT = Path(__file__).parent.parent
PPO = ROOT / "cleanba" / "ppo.py"
NASTY = [
    "two words",
    "'single' \"double\"",
    "$(touch x) `touch y` $HOME ${HOME} $$ $",
    "a\nb\n#SBATCH --hold",
    "\\ * ? ~ é 😀 \x7f",
    "",
]

DUMP = f"""#!{sys.executable}
import json, pathlib, sys
path = pathlib.Path(sys.argv[0])
path.with_suffix(".json").write_text(json.dumps(sys.argv[1:]))
status = path.with_suffix(".status")
sys.exit(int(status.read_text()) if status.exists() else 0)
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alone is on the path; an empty one to work in."""
    folder, work = tmp_path / "bin", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(work)
    return folder


def fake(programs: Path, name: str, status: int = 0) -> Path:
    """A program that notes its arguments in the file that is returned."""
    (programs / name).write_text(DUMP)
    (programs / name).chmod(0o755)
    (programs / name).with_suffix(".status").write_text(str(status))
    return (programs / name).with_suffix(".json")


def launch(*argv: object) -> int:
    """The exit status of `cleanba launch`."""
    try:
        return main(["launch", *map(str, argv)]) or 0
    except SystemExit as error:
        return int(error.code or 0)


def written(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def the_job() -> Path:
    [path] = written(Path.cwd())
    return path


def directives(job: Path) -> dict[str, str]:
    """What sbatch reads: #SBATCH lines up to the first line that is no comment."""
    lines = job.read_text().split("\n")
    comments = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    pairs = [line.removeprefix("#SBATCH --").partition("=") for line in comments if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in pairs}


def run_job(job: Path, **env: str) -> int:
    return subprocess.run(["/bin/bash", job], env=os.environ | env, check=False).returncode


class TestLocal:
    def test_dry_run_shows_the_command(self, programs, capsys):
        assert launch(PPO, "--topology", "a0-l0-d2", "--run-dir", "a b", "--dry-run", "--", "--exp-name", NASTY[2]) == 0
        expected = ["--topology", "a0-l0-d2", "--run-dir", "a b", "--exp-name", NASTY[2]]
        assert shlex.split(capsys.readouterr().out) == [sys.executable, str(PPO), *expected]
        assert written(Path.cwd()) == []

    def test_arguments_and_exit_status_pass_through(self, programs):
        script = programs / "script.py"
        script.write_text(DUMP)
        script.with_suffix(".status").write_text("7")
        command = [sys.executable, "-m", "cleanba.tools.cli", "launch", script, "--topology", "a0-l0", "--", *NASTY]
        assert subprocess.run(command, check=False).returncode == 7
        assert json.loads(script.with_suffix(".json").read_text()) == ["--topology", "a0-l0", *NASTY]


class TestSlurm:
    def test_resources_are_those_of_the_topology(self, programs):
        options = ["--tasks-per-node", 2, "--time", "1-00:00:00", "--partition", "gpu", "--account", "lab", "--cpus", 8]
        assert launch(PPO, "--topology", "a0-l1,3-d3", "--on", "slurm", "--dry-run", *options, "--", "--seed", 3) == 0
        job = the_job()
        assert re.fullmatch(r"CartPole-v1__ppo__3__\d+\.sbatch", job.name)
        assert directives(job) == {
            "job-name": job.stem,
            "output": str(Path.cwd() / "runs" / f"{job.stem}.out"),
            "time": "1-00:00:00",
            "partition": "gpu",
            "account": "lab",
            "nodes": "2",
            "ntasks": "3",
            "ntasks-per-node": "2",
            "cpus-per-task": "8",
            "gpus-per-task": "4",
            "open-mode": "append",
            "requeue": "",
            "signal": "USR1@90",
        }

    def test_on_the_cpu(self, programs):
        assert launch(PPO, "--on", "slurm", "--gpus", 0, "--run-dir", "deep/down/x", "--dry-run") == 0
        assert the_job() == Path.cwd() / "deep/down/x.sbatch"
        assert not {"gpus-per-task", "time", "partition", "account"} & directives(the_job()).keys()

    def test_arguments_arrive_as_they_were_given(self, programs):
        words = ["--wandb-project-name", "\n".join(NASTY), "--wandb-entity", "", f"--exp-name={NASTY[1]}"]
        assert launch(PPO, "--on", "slurm", "--run-dir", "x", "--dry-run", "--", *words) == 0
        subprocess.run(["/bin/bash", "-n", the_job()], check=True)
        srun = fake(programs, "srun")
        assert run_job(the_job()) == 0
        own = ["--kill-on-bad-exit=1", "--cpus-per-task=4"]
        run = [sys.executable, str(PPO), "--topology", "a0-l0-d1", "--run-dir", str(Path.cwd() / "x")]
        assert json.loads(srun.read_text()) == [*own, *run, *words]

    @pytest.mark.parametrize(("status", "again"), [(0, False), (1, False), (2, False), (138, True), (143, True)])
    def test_a_run_that_was_stopped_is_queued_again(self, programs, status, again):
        assert launch(PPO, "--on", "slurm", "--dry-run") == 0
        job = the_job()
        fake(programs, "srun", status)
        scontrol = fake(programs, "scontrol")
        assert run_job(job, SLURM_JOB_ID="17") == status
        assert scontrol.exists() == again
        if again:
            assert json.loads(scontrol.read_text()) == ["requeue", "17"]

    @pytest.mark.parametrize("status", [0, 5])
    def test_submission(self, programs, status):
        sbatch = fake(programs, "sbatch", status)
        assert launch(PPO, "--on", "slurm", "--run-dir", "x") == status
        assert json.loads(sbatch.read_text()) == [str(the_job())]

    def test_dry_run_submits_nothing(self, programs, capsys):
        sbatch = fake(programs, "sbatch")
        assert launch(PPO, "--on", "slurm", "--dry-run") == 0
        assert not sbatch.exists()
        assert capsys.readouterr().out == f"wrote {the_job()}; to start it: sbatch {the_job()}\n"

    def test_an_environment_beside_the_script_is_found(self, programs, monkeypatch):
        monkeypatch.setattr(sys, "path", sys.path[:])
        register = "import gymnasium; gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv')"
        (programs / "envs_of_mine.py").write_text(register)
        (programs / "ppo_of_mine.py").write_text("from cleanba.ppo import Args")
        argv = [programs / "ppo_of_mine.py", "--on", "slurm", "--dry-run", "--", "--env-id", "envs_of_mine:Mine-v0"]
        assert launch(*argv) == 0

    def test_without_slurm_here(self, programs, capsys):
        assert launch(PPO, "--on", "slurm", "--dry-run") == 0
        assert "(not on this machine)" in capsys.readouterr().out


def expanded(word: str, env: dict[str, str]) -> str:
    """What Kubernetes makes of a word of a command."""
    return re.sub(
        r"\$(\$|\(([^)]*)\))", lambda match: "$" if match[1] == "$" else env.get(match[2], f"$({match[2]})"), word
    )


class TestKubernetes:
    def manifest(self, *options: object, words: tuple[object, ...] = ()) -> dict[str, Any]:
        assert launch(PPO, "--on", "kubernetes", "--image", "me/cleanba:1", "--dry-run", *options, "--", *words) == 0
        return yaml.safe_load(the_job().read_text())

    def test_a_job_set_with_a_pod_for_each_process(self, programs):
        manifest = self.manifest("--topology", "a0-l1,3-d3", "--cpus", 8, "--max-restarts", 4, words=("--seed", 3))
        assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
        name = manifest["metadata"]["name"]
        assert re.fullmatch(r"cartpole-v1-ppo-3-\d+", name)
        assert manifest["spec"]["network"] == {"enableDNSHostnames": True}
        [replicated] = manifest["spec"]["replicatedJobs"]
        job = replicated["template"]["spec"]
        assert replicated["name"] == "run"
        assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
        pod = job["template"]["spec"]
        [container] = pod["containers"]
        assert container["image"] == "me/cleanba:1"
        assert container["resources"] == {"requests": {"cpu": 8}, "limits": {"nvidia.com/gpu": 4}}
        env = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert env["JAX_COORDINATOR_ADDRESS"] == f"{name}-run-0-0.{name}:55527"
        assert env["JAX_NUM_PROCESSES"] == "3"
        index = container["env"][-1]["valueFrom"]["fieldRef"]["fieldPath"]
        assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        run_dir = container["command"][container["command"].index("--run-dir") + 1]
        assert run_dir == f"/runs/{the_job().stem}"
        assert container["volumeMounts"] == [{"name": "runs", "mountPath": "/runs"}]
        assert pod["volumes"] == [{"name": "runs", "persistentVolumeClaim": {"claimName": "cleanba-runs"}}]

    def test_preemptions_restart_it_without_being_counted(self, programs):
        manifest = self.manifest("--max-restarts", 4)
        policy = manifest["spec"]["failurePolicy"]
        assert policy["maxRestarts"] == 4
        [rule] = policy["rules"]
        assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
        job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert job["backoffLimit"] == 0
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
        exits, disrupted = job["podFailurePolicy"]["rules"]
        assert exits["onExitCodes"] == {"operator": "In", "values": [138, 143]}
        assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert {exits["action"], disrupted["action"]} == {"FailJob"}
        assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]

    def test_arguments_arrive_as_they_were_given(self, programs):
        words = ("--wandb-project-name", "\n".join([*NASTY, "$(JAX_PROCESS_ID)"]), "--wandb-entity", "")
        manifest = self.manifest("--run-dir", "/data/me/x", "--gpus", 0, words=words)
        [container] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
        command = [expanded(word, {"JAX_PROCESS_ID": "wrong", "HOME": "wrong"}) for word in container["command"]]
        assert command == ["python", str(PPO), "--topology", "a0-l0-d1", "--run-dir", "/data/me/x", *words]
        assert container["volumeMounts"][0]["mountPath"] == "/data/me"

    def test_a_name_that_yaml_would_take_for_something_else(self, programs):
        assert self.manifest("--run-dir", "/runs/TRUE")["metadata"]["name"] == "true"

    def test_submission(self, programs):
        kubectl = fake(programs, "kubectl", 3)
        assert launch(PPO, "--on", "kubernetes", "--image", "x") == 3
        assert json.loads(kubectl.read_text()) == ["apply", "-f", str(the_job().relative_to(Path.cwd()))]


SLURM, KUBERNETES = ("--on", "slurm", "--dry-run"), ("--on", "kubernetes", "--dry-run", "--image", "x")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["missing.py"], "missing.py is not a Python file"),
        ([ROOT], "is not a Python file"),
        ([ROOT / "README.md"], "is not a Python file"),
        ([ROOT / "cleanba" / "__init__.py", *SLURM], "no class Args"),
        ([PPO, "--on", "moon"], "--on"),
        ([PPO, *SLURM, "--topology", "a0l1"], "not of the form"),
        ([PPO, *SLURM, "--topology", "a0-l0,0"], "twice"),
        ([PPO, *SLURM, "--topology", "a0-l0,1,2,3,4,5,6,7,8"], "9 learners"),
        ([PPO, *SLURM, "--", "--topology", "a0-l0"], "--topology belongs before the --"),
        ([PPO, *SLURM, "--", "--run_dir=x"], "--run-dir belongs before the --"),
        ([PPO, *SLURM, "--", "--num-envs", "30"], "24 or 32 would do"),
        ([PPO, *SLURM, "--", "--sed", "1"], "--sed"),
        ([PPO, *SLURM, "--cpus", "0"], "--cpus 0 must be at least 1"),
        ([PPO, *SLURM, "--gpus", "-1"], "--gpus -1 must be at least 0"),
        ([PPO, *SLURM, "--gpus", "1", "--topology", "a0-l1"], "give as many"),
        ([PPO, *SLURM, "--tasks-per-node", "-2"], "--tasks-per-node -2"),
        ([PPO, *SLURM, "--partition", "x\n#SBATCH --hold"], "--partition"),
        ([PPO, *SLURM, "--time", "1 --hold"], "--time"),
        ([PPO, *SLURM, "--run-dir", "runs/%j"], "--run-dir"),
        ([PPO, *SLURM, "--run-dir", "/"], "needs a parent"),
        ([PPO, *SLURM, "--image", "x"], "--image is not for --on slurm"),
        ([PPO, "--on", "slurm"], "sbatch is not on this machine; --dry-run"),
        ([PPO, "--on", "kubernetes", "--image", "x"], "kubectl is not on this machine; --dry-run"),
        ([PPO, "--on", "kubernetes", "--dry-run"], "needs --image"),
        ([PPO, *KUBERNETES, "--max-restarts", "-1"], "--max-restarts -1"),
        ([PPO, *KUBERNETES, "--claim", 'x"y'], "--claim"),
        ([PPO, *KUBERNETES, "--run-dir", "/x"], "needs a parent"),
        ([PPO, *KUBERNETES, "--run-dir", "/runs/1st"], "a letter first"),
        ([PPO, *KUBERNETES, "--run-dir", f"/runs/{'x' * 60}"], "at most 49 characters"),
        ([PPO, *KUBERNETES, "--time", "1:00"], "--time is not for --on kubernetes"),
        ([PPO, "--cpus", "2"], "--cpus is not for --on local"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(programs, capsys, argv, said):
    assert launch(*argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert written(Path.cwd()) == []


STUB = '''"""Stands in for a training: counts to 40 in tenths of a second, and goes on counting after it was stopped."""

import json, os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Args:
    topology: str = ""
    run_dir: str = ""
    exp_name: str = ""

    def check(self):
        return self

    def run_name(self, algorithm, now):
        return f"Env__{algorithm}__1__{now}"

    @property
    def layout(self):
        from cleanba.core.topology import Topology

        return Topology.parse(self.topology)


if __name__ == "__main__":
    process, stopped = int(os.environ["SLURM_PROCID"]), []
    for signum in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda signum, _: stopped.append(signum))
    folder = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    folder.mkdir(exist_ok=True)
    (folder / f"argv-{process}").write_text(json.dumps(sys.argv[1:]))
    count = folder / f"count-{process}"
    for n in range(int(count.read_text()) if count.exists() else 0, 40):
        time.sleep(0.1)
        if stopped:
            time.sleep(1 - process)  # the last one to leave is not cut short
            count.write_text(str(n))
            sys.exit(128 + stopped[0])
    (folder / f"done-{process}").touch()
'''


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm on this machine."""
    if os.geteuid() or not all(map(shutil.which, ("munged", "slurmctld", "slurmd", "sbatch"))):
        pytest.skip("needs Slurm, and root to start it; see tests/slurm_localhost.sh")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        monkeypatch.setenv("SLURM_PORT", str(probe.getsockname()[1]))
    script, folder = ROOT / "tests" / "slurm_localhost.sh", tmp_path / "slurm"
    subprocess.run([script, "start", folder], check=True)
    monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
    yield
    subprocess.run([script, "stop", folder], check=True)


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def show(job: str) -> str:
    return subprocess.check_output(["scontrol", "show", "job", job], text=True)


def test_a_job_of_slurm_is_stopped_and_goes_on(slurm, tmp_path, capfd):
    """Two processes, submitted for real; SIGUSR1 is what they get before the time limit, SIGTERM in a preemption."""
    (tmp_path / "stub.py").write_text(STUB)
    run = tmp_path / "run"
    options = ["--topology", "a0-l0-d2", "--on", "slurm", "--gpus", 0, "--cpus", 1, "--tasks-per-node", 2]
    words = ["--exp-name", "\n".join(NASTY)]
    assert launch(tmp_path / "stub.py", *options, "--run-dir", run, "--", *words) == 0
    job = capfd.readouterr().out.split()[-1]
    for stop in (["scancel", "--signal=USR1", job], ["scontrol", "requeue", job]):
        wait_until(lambda: len(list(run.glob("argv-*"))) == 2)
        for path in run.glob("argv-*"):
            path.unlink()
        subprocess.run(stop, check=True)
        wait_until(lambda: "JobState=PENDING" in show(job))
        assert len(list(run.glob("count-*"))) == 2
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)  # not in two minutes
    wait_until(lambda: "JobState=COMPLETED" in show(job))
    assert "Restarts=2" in show(job)
    assert len(list(run.glob("done-*"))) == 2
    for process in range(2):
        argv = json.loads((run / f"argv-{process}").read_text())
        assert argv == ["--topology", "a0-l0-d2", "--run-dir", str(run), *words]
