"""`cleanba doctor` and `cleanba completion`."""

import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from cleanba.core import envs
from cleanba.tools import doctor
from cleanba.tools.cli import COMMANDS, main
from cleanba.tools.doctor import Doctor, Finding


def states(findings: Any) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


def test_everything_that_training_needs_is_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr().out
    for what in ("Python", "cores", "memory", "jax ", "JAX device", "CartPole-v1", "Pong-v5", "extra docs", "cache"):
        assert what in said
    assert said.splitlines()[-1] == "everything that training needs is here"
    assert list(tmp_path.iterdir()) == []  # it only looked


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert states(doctor.find_disks(tmp_path / "file" / "runs"))["runs"] == "broken"
    assert states(doctor.find_disks(tmp_path / "new" / "runs"))["runs"] == "ok"


def test_one_broken_part_is_named_and_the_rest_still_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_pool(*_: Any) -> None:
        raise RuntimeError("no [such] library")

    monkeypatch.setattr(envs, "make", no_pool)
    assert Doctor(tmp_path).main() == 1
    said = capsys.readouterr().out
    assert "RuntimeError: no [such] library" in said
    assert "ffmpeg" in said
    assert said.splitlines()[-1] == "broken: EnvPool"


def test_an_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 2))
    [finding] = doctor.find_python()
    assert finding.state == "broken"
    assert "3.11, 3.12 or 3.13" in finding.found


class TestPackages:
    VERSIONS = {"cleanba": "0.1.0", "jax": "0.4.30", "numpy": "2.1.0", "optuna": "4.1"}
    REQUIRES = {
        "cleanba": [
            "jax>=0.10",
            "numpy>=2",
            "flax>=0.12",
            "pywin32>=1; sys_platform == 'nowhere'",
            "optuna>=4; extra == 'tune'",
            "pygame>=2; extra == 'tune' and sys_platform == 'nowhere'",
            "jax[cuda12]>=0.4; extra == 'cuda'",
        ],
        "jax": ["jaxlib", "nvidia-cudnn; extra == 'cuda12'"],
    }

    @pytest.fixture(autouse=True)
    def _installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def version(name: str) -> str:
            if name not in self.VERSIONS:
                raise PackageNotFoundError(name)
            return self.VERSIONS[name]

        monkeypatch.setattr(doctor, "version", version)
        monkeypatch.setattr(doctor, "requires", lambda name: self.REQUIRES[name])

    def test_what_is_old_or_missing_is_broken_and_an_extra_may_be_missing(self) -> None:
        assert list(doctor.find_packages()) == [
            Finding("ok", "cleanba", "0.1.0"),
            Finding("broken", "jax", "0.4.30, but >=0.10 is needed"),
            Finding("ok", "numpy", "2.1.0"),
            Finding("broken", "flax", "not installed"),
            Finding("ok", "extra tune", "optuna 4.1"),
            Finding("lacking", "extra cuda", "jax 0.4.30, without [cuda12]; pip install 'cleanba[cuda]'"),
        ]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_commands_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", shell])
    said = capsys.readouterr().out
    assert all(f"{name}" in said for name in COMMANDS)
    assert "--resume-envs" not in said  # that is a script's
    assert "--tasks-per-node" in said


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    ask = """
        source "$1"; PATH="$2:$PATH"
        COMP_LINE="cleanba launch --tasks"; COMP_WORDS=($COMP_LINE); COMP_CWORD=2; COMP_POINT=${#COMP_LINE}
        function=$(complete -p cleanba | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function cleanba --tasks launch; echo "${COMPREPLY[@]}"
    """
    command = ["bash", "-c", ask, "bash", str(tmp_path / "completion"), str(Path(sys.executable).parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--tasks-per-node" in done.stdout, done.stderr


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_what_was_sourced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "zsh"])
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    ask = 'autoload -U compinit; compinit -u -d "$2/dump"; source "$1"; echo "$_comps[cleanba]"'
    command = ["zsh", "-f", "-c", ask, "zsh", str(tmp_path / "completion"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "_tyro_cleanba"
    assert done.stderr == ""
