"""Playing episodes with saved parameters, on fresh environments.

Run:  python -m cleanba.core.evaluate RUN --episodes 20        (the same as: cleanba eval RUN --episodes 20)
"""

import importlib
import importlib.util
import json
import math
import os
import sys
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from cleanba.core import envs
from cleanba.core.actors import Collector
from cleanba.core.records import write_json
from cleanba.core.seeding import Role
from cleanba.core.topology import to_device
from cleanba.core.usage import read, usage_error
from cleanba.tools import hub

NUM_ENVS = 16  # side by side, if nobody says otherwise
FRAMES_PER_SECOND = 30  # of a video


class Player:
    """A policy in environments that no training has seen, and each time it plays in the same ones."""

    def __init__(self, act: Any, args: Any, num_envs: int, show: envs.Show | None = None):
        self._act, self._show = act, show
        self._args = replace(args, num_envs=num_envs, num_shards=1)
        self._device = jax.local_devices()[0]
        self._collector: Collector | None = None

    def play(self, params: Any, episodes: int) -> list[float]:
        """The returns of the environments' first episodes: equally many of each, or short ones would win. The one that
        is shown comes first."""
        params = to_device(jax.device_get(params), self._device)
        if self._collector is None:
            self._collector = Collector(
                self._act, params, self._args, [0], self._device, Role.EVALUATE, show=self._show
            )
        else:
            self._collector.open(params)
        quota = math.ceil(episodes / self._args.num_envs)
        returns: list[list[float]] = [[] for _ in range(self._args.num_envs)]
        n = 0
        while min(map(len, returns)) < quota:
            n += 1
            [(_, ended, _)] = self._collector.collect(params, n)
            for t, env in zip(*np.nonzero(ended.over), strict=True):
                returns[env].append(float(ended.returns[t, env]))
        self._collector.close()
        in_order = [mine[i] for i in range(quota) for mine in returns]
        return in_order[:episodes]


class Film:
    """An MP4 video of the frames that it is shown; it has its name when it is whole."""

    def __init__(self, path: Path):
        if importlib.util.find_spec("imageio_ffmpeg") is None:
            usage_error("a video needs imageio-ffmpeg: pip install 'cleanba[video]'")
        os.environ["IMAGEIO_FFMPEG_NO_PREVENT_SIGINT"] = "1"  # or it would fork, which JAX's threads do not stand
        self.path, self._part = path, path.with_name(f"part-{path.name}")
        self._writer: Generator[None, np.ndarray, None] | None = None

    def show(self, frame: np.ndarray) -> None:
        """Add a frame, [height, width, 3]."""
        if self._writer is None:
            from imageio_ffmpeg import write_frames  # here, because it is an extra

            self._part.parent.mkdir(parents=True, exist_ok=True)
            size = frame.shape[1], frame.shape[0]
            self._writer = write_frames(self._part, size, fps=FRAMES_PER_SECOND, macro_block_size=2)
            next(self._writer)
        self._writer.send(np.ascontiguousarray(frame))

    def close(self) -> None:
        """The film is over."""
        if self._writer is not None:
            self._writer.close()
            self._part.replace(self.path)


def check_film(args: Any) -> None:
    """Exit if videos cannot be made at all; EnvError if this environment cannot be rendered."""
    Film(Path("film.mp4"))
    engine = envs.make(replace(args, num_envs=1, num_shards=1), [0], Role.EVALUATE, show=lambda _: None)
    engine.reset()
    engine.close()


def load(run: Path, script: str = "") -> tuple[ModuleType, Any, Any]:
    """The algorithm, its arguments and the parameters of a saved model: JSON and arrays, nothing that executes."""
    folder = run if (run / "params.safetensors").exists() else run / "model"
    if not (folder / "params.safetensors").exists():
        usage_error(f"{run} has no saved model; train with --save-model")
    try:
        config = json.loads((folder / "config.json").read_text())
        name, experiment = str(config["algorithm"]), dict(config["experiment"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        usage_error(f"{folder / 'config.json'} does not describe a model: {error!r}")
    module = algorithm(name, script)
    params = unflatten_dict(load_file(folder / "params.safetensors"), sep="/")
    return module, experiment_args(module, experiment), params


def experiment_args(module: ModuleType, experiment: dict[str, Any]) -> Any:
    """The arguments that a config.json records."""
    try:
        return module.Args(**{k: tuple(v) if isinstance(v, list) else v for k, v in experiment.items()})
    except (AttributeError, TypeError) as error:
        usage_error(f"the model's arguments are not those of {module.__name__}: {error}")


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
    """a run directory, the model folder in it, or hf:NAME/MODEL on the Hugging Face Hub"""
    episodes: int = 20
    """episodes to play"""
    num_envs: int = NUM_ENVS
    """environments side by side, at most one for each episode; with another number other actions are drawn"""
    seed: int | None = None
    """seed of the environments (default: the run's)"""
    video: bool = False
    """film the first episode, as RUN/videos/seed-SEED.mp4"""
    out: Path | None = None
    """a file for the JSON, too"""
    script: str = ""
    """the algorithm file, if it is not one of Cleanba's"""

    def main(self) -> None:
        """Play and print."""
        for option, number in (("--episodes", self.episodes), ("--num-envs", self.num_envs)):
            if number < 1:
                usage_error(f"{option} {number} must be at least 1")
        if self.out is not None and not self.out.absolute().parent.is_dir():
            usage_error(f"--out {self.out}: there is no directory {self.out.parent}")
        run = self._pulled() if self._is_on_hub else self.run
        module, args, params = load(run, self.script)
        if self._is_on_hub and ":" in args.env_id:
            usage_error(f"{self.run} plays {args.env_id}, a module of yours; if you want that: cleanba eval {run}")
        args = replace(args, seed=args.seed if self.seed is None else self.seed)
        args.layout.start(args.cpu_threads)
        film = Film(run / "videos" / f"seed-{args.seed}.mp4") if self.video else None
        num_envs = min(self.episodes, self.num_envs)
        try:
            player = Player(module.act, args, num_envs, film.show if film else None)
            returns = player.play(params, self.episodes)
        except envs.EnvError as error:
            usage_error(str(error))
        result = {
            "env_id": args.env_id,
            "seed": args.seed,
            "num_envs": num_envs,
            "episodes": len(returns),
            "mean": float(np.mean(returns)),
            "standard_error": standard_error(returns),
            "returns": returns,
        }
        if film:
            film.close()
            result["video"] = str(film.path)
        if self.out is not None:
            write_json(self.out, result)
        print(json.dumps(result))

    @property
    def _is_on_hub(self) -> bool:
        return str(self.run).startswith("hf:")

    def _pulled(self) -> Path:
        """The run directory that the model was brought into."""
        try:
            return hub.pull(str(self.run).removeprefix("hf:"))
        except hub.HubError as error:
            usage_error(str(error))


def standard_error(returns: list[float]) -> float | None:
    """Of their mean; one return says nothing about it."""
    return float(np.std(returns, ddof=1) / math.sqrt(len(returns))) if len(returns) > 1 else None


if __name__ == "__main__":
    read(Eval, sys.argv[1:]).main()
