"""Other people's PPO on the same work, for `cleanba bench --peers`: each in a process and virtual environment apart."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleanba.core.envs import envpool_options
from cleanba.core.topology import user_cache
from cleanba.core.usage import usage_error

PACKAGES = ("torch", "stable-baselines3", "sbx-rl", "envpool", "gymnasium")
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Peer:
    """One program that trains for some updates and prints its steps per second."""

    name: str
    python: Path
    work: dict[str, Any]

    def steps_per_second(self) -> float:
        """Run it once."""
        command = [str(self.python), str(HERE / f"{self.name}.py"), json.dumps(self.work)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        return float(done.stdout.split()[-1])


def peers_for(args: Any) -> list[Peer]:
    """The peers that can do this work: PPO by PyTorch alone, by Stable-Baselines3 and by SBX."""
    if not hasattr(args, "update_epochs"):
        usage_error("--peers run PPO: compare with ppo.py or ppo_atari.py --network nature")
    if getattr(args, "network", "nature") != "nature":
        usage_error("--peers have no IMPALA ResNet; add --network nature")
    names = "env_id num_envs num_steps num_minibatches update_epochs learning_rate gamma gae_lambda"
    names += " clip_coef ent_coef vf_coef max_grad_norm"
    work = {name: getattr(args, name) for name in names.split()}
    work["env_options"] = envpool_options(args.env_id, args.atari_protocol)
    python = install()
    return [Peer(name, python, work) for name in ("torch_ppo", "sb3_ppo", "sbx_ppo")]


def install() -> Path:
    """The peers' own environment, made once, in the user's cache."""
    cache = user_cache() / "peers"
    python = cache / "bin" / "python"
    if not (cache / ".installed").exists():
        print(f"installing {', '.join(PACKAGES)} into {cache}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(cache)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (cache / ".installed").touch()
    return python
