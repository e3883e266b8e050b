"""Other people's PPO on the same work, for `cleanba bench --peers`: each in a process and virtual environment apart."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleanba.core.envs import envpool_options
from cleanba.core.topology import user_cache
from cleanba.core.usage import usage_error

PACKAGES = ("torch", "stable-baselines3", "sbx-rl", "envpool", "gymnasium", "pandas", "pygame", "tensorboard")
# CleanRL, which asks for a Python of its time, and what it needs of that time: in a folder, to go before all others.
CLEANRL = ("cleanrl==1.2.0", "gym==0.23.1", "gym-notices", "stable-baselines3==1.2.0", "envpool==0.8.4")
HERE = Path(__file__).parent


class PeerError(RuntimeError):
    """A peer that could not do its work: what it said last, then all of it."""


@dataclass(frozen=True)
class Peer:
    """One program that trains for some updates and prints its steps per second."""

    name: str
    python: Path
    work: dict[str, Any]
    packages: Path | None = None  # that go before those of its Python

    def steps_per_second(self) -> float:
        """Run it once."""
        command = [str(self.python), str(HERE / f"{self.name}.py"), json.dumps(self.work)]
        with tempfile.TemporaryDirectory() as folder:  # CleanRL writes where it is run, SB3 where temporary files go
            env = os.environ | {"TMPDIR": folder, "PYTHONPATH": str(self.packages or "")}
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=env)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            raise PeerError(f"{last}\n{' '.join(command)}\n{done.stderr}")
        return float(done.stdout.split()[-1])


def peers_for(args: Any) -> list[Peer]:
    """The peers that can do this work: PPO by PyTorch alone, by CleanRL, by Stable-Baselines3 and by SBX."""
    if not hasattr(args, "update_epochs"):
        usage_error("--peers run PPO: compare with ppo.py or ppo_atari.py --network nature")
    args.check_discrete()
    if getattr(args, "network", "nature") != "nature":
        usage_error("--peers have no IMPALA ResNet; add --network nature")
    names = "env_id num_envs num_steps num_minibatches update_epochs learning_rate gamma gae_lambda"
    names += " clip_coef ent_coef vf_coef max_grad_norm"
    work = {name: getattr(args, name) for name in names.split()}
    python, file = install(), "ppo_atari_envpool.py" if hasattr(args, "network") else "ppo.py"
    published = cleanrl(python, file, args.steps_per_update, **work)
    work |= {"steps": args.steps_per_update, "env_options": envpool_options(args.env_id, args.atari_protocol)}
    return [Peer("torch_ppo", python, work), published, *(Peer(name, python, work) for name in ("sb3_ppo", "sbx_ppo"))]


def cleanrl(python: Path, file: str, steps: int, env_id: str, **arguments: Any) -> Peer:
    """A file of CleanRL's that says how fast it is every so many steps."""
    arguments |= {"env_id": env_id, "total_timesteps": 10**9}
    words = [word for name, value in arguments.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    packages = user_cache() / "peers" / "cleanrl"
    work = {"file": str(packages / "cleanrl" / file), "steps": steps, "env_id": env_id, "arguments": words}
    return Peer("cleanrl", python, work, packages)


def install() -> Path:
    """The peers' own environment, in the user's cache, made once or again when other packages are asked for."""
    cache = user_cache() / "peers"
    python, mark, wanted = cache / "bin" / "python", cache / ".installed", " ".join(PACKAGES + CLEANRL)
    if not mark.exists() or mark.read_text() != wanted:
        print(f"installing {wanted} into {cache}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(cache)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, *PACKAGES], check=True)
        apart = ["--target", str(cache / "cleanrl"), "--upgrade", "--no-deps", "--ignore-requires-python"]
        subprocess.run([*pip, *apart, *CLEANRL], check=True)
        mark.write_text(wanted)
    return python
