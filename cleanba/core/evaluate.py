"""Playing episodes with saved parameters, on fresh environments.

Run:  python -m cleanba.core.evaluate RUN --episodes 20        (the same as: cleanba eval RUN --episodes 20)
"""

import importlib
import importlib.util
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from cleanba.core.actors import Collector
from cleanba.core.seeding import Role
from cleanba.core.topology import to_device
from cleanba.core.usage import read, usage_error

MAX_WIDTH = 16  # environments side by side


def play(act: Any, params: Any, args: Any, episodes: int) -> list[float]:
    """The returns of the first episodes of fresh environments: equally many of each, or short ones would win."""
    width = min(episodes, MAX_WIDTH)
    quota = math.ceil(episodes / width)
    args = replace(args, num_envs=width, num_shards=1)
    device = jax.local_devices()[0]
    params = to_device(jax.device_get(params), device)
    collector = Collector(act, params, args, [0], device, Role.EVALUATE)
    returns: list[list[float]] = [[] for _ in range(width)]
    n = 0
    while min(map(len, returns)) < quota:
        n += 1
        [(_, ended, _)] = collector.collect(params, n)
        for t, env in zip(*np.nonzero(ended.over), strict=True):
            returns[env].append(float(ended.returns[t, env]))
    collector.close()
    in_order = [mine[i] for i in range(quota) for mine in returns]
    return in_order[:episodes]


def load(run: Path, script: str = "") -> tuple[ModuleType, Any, Any]:
    """The algorithm, its arguments and the parameters of a saved model: JSON and arrays, nothing that executes."""
    folder = run if (run / "params.safetensors").exists() else run / "model"
    if not (folder / "params.safetensors").exists():
        usage_error(f"{run} has no saved model; train with --save-model")
    config = json.loads((folder / "config.json").read_text())
    module = algorithm(config["algorithm"], script)
    params = unflatten_dict(load_file(folder / "params.safetensors"), sep="/")
    return module, experiment_args(module, config["experiment"]), params


def experiment_args(module: ModuleType, experiment: dict[str, Any]) -> Any:
    """The arguments that a config.json records."""
    return module.Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in experiment.items()})


def algorithm(name: str, script: str) -> ModuleType:
    """The algorithm file, by the name that the model carries or, for a file of one's own, from `script`."""
    if script:
        spec = importlib.util.spec_from_file_location(Path(script).stem, script)
        if spec is None or spec.loader is None or not Path(script).exists():
            usage_error(f"--script {script} is not a Python file")
        sys.path.insert(0, str(Path(script).parent))  # where Python looks first when it runs a script
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    if not name.isidentifier() or importlib.util.find_spec(f"cleanba.{name}") is None:
        usage_error(f"the model was made by {name}.py, which is not one of Cleanba's; give its path with --script")
    return importlib.import_module(f"cleanba.{name}")


@dataclass(frozen=True)
class Eval:
    """Play episodes with a saved model and print the returns as JSON."""

    run: Annotated[Path, tyro.conf.Positional]
    """a run directory, or the model folder in it"""
    episodes: int = 20
    """episodes to play"""
    seed: int | None = None
    """seed of the environments (default: the run's)"""
    script: str = ""
    """the algorithm file, if it is not one of Cleanba's"""

    def main(self) -> None:
        """Play and print."""
        if self.episodes < 1:
            usage_error(f"--episodes {self.episodes} must be at least 1")
        module, args, params = load(self.run, self.script)
        args = replace(args, seed=args.seed if self.seed is None else self.seed)
        args.layout.start(args.cpu_threads)
        returns = play(module.act, params, args, self.episodes)
        mean, error = float(np.mean(returns)), float(np.std(returns) / math.sqrt(len(returns)))
        print(json.dumps({"mean": mean, "standard_error": error, "episodes": len(returns), "returns": returns}))


if __name__ == "__main__":
    read(Eval, sys.argv[1:]).main()
