"""Models on the Hugging Face Hub: a run directory without what belongs to one machine only, and a card about it.

Run:  cleanba push runs/RUN --hf-entity NAME        cleanba pull NAME/MODEL        cleanba eval hf:NAME/MODEL
"""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

import cleanba
from cleanba.core.usage import usage_error
from cleanba.tools.runs import flags, read_config, read_metrics

PUBLIC = ("algorithm", "name", "experiment", "versions", "devices", "git_commit")  # of config.json: no paths, no hosts
NEEDED = ("config.json", "model/config.json", "model/params.safetensors")
# Arrays, JSON, pictures and text are brought back. The algorithm's file is on the Hub to be read, never to be run.
PULLED = (*NEEDED, "README.md", "metrics.jsonl", "result.json", "learning_curve.png", "replay.mp4")

CARD = """
# {algorithm} on {env_id}

Trained by Cleanba's `{algorithm}.py`, which is in this repository to be read.

| | |
| --- | --- |
| return of {eval_episodes} episodes in fresh environments | {mean} (mean and standard deviation) |
| environment steps | {global_step:,} |
| fingerprint of the parameters (SHA-256) | `{fingerprint}` |

![return over environment steps](learning_curve.png)

To play with it, and to have it as a run directory:

```
cleanba eval hf:{repo} --episodes 100
cleanba pull {repo}
```

To train it again, on any topology, to the same fingerprint (with the versions and the kind of device of `config.json`):

```
python cleanba/{algorithm}.py {arguments}
```
"""


class HubError(Exception):
    """Why the Hub could not be used, in one line."""


@contextlib.contextmanager
def in_one_line(model: str) -> Iterator[None]:
    """Turn whatever goes wrong into a HubError, without the token that was sent."""
    try:
        from huggingface_hub import constants, errors  # here, because it is an extra
    except ImportError as error:
        raise HubError("the Hugging Face Hub needs huggingface_hub: pip install 'cleanba[share]'") from error
    try:
        yield
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"{constants.ENDPOINT} has no model {model}, or not for your token") from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        why = error.server_message or error.response.reason_phrase
        advice = f"; the token must be allowed to write to {model}" * (status in (401, 403))
        raise HubError(f"{constants.ENDPOINT} answers {status} ({_plain(why)}){advice}") from error
    except errors.HFValidationError as error:
        raise HubError(f"{model!r} cannot be a model's name: {_plain(error)}") from error
    except RuntimeError as error:  # a file's upload failed; the cause says why
        raise HubError(f"{constants.ENDPOINT} cannot be used: {_plain(error)} {_plain(error.__cause__)}") from error
    except (errors.HTTPError, OSError, ValueError) as error:
        raise HubError(f"{constants.ENDPOINT} cannot be used: {_plain(error) or type(error).__name__}") from error


def _plain(text: Any) -> str:
    """In one line, and without the header that an error may quote."""
    return re.sub(r"Bearer [^\s']+", "Bearer ...", " ".join(str(text).split()))


def check_token() -> None:
    """HubError if there is nothing to log in with."""
    with in_one_line("the model"):
        from huggingface_hub import get_token

        if get_token() is None:
            raise HubError("there is no token for the Hugging Face Hub: run `hf auth login`, or set HF_TOKEN")


def push(run: Path, entity: str, source: Path, repo_name: str = "", private: bool = False) -> str:
    """Put a finished run's model on the Hub, with all that tells where it comes from. Returns its address."""
    config, result = read_config(run), _read_result(run)
    read_metrics(run)
    experiment = config["experiment"]
    about = f"{experiment['env_id']}-{config['algorithm']}-seed{experiment['seed']}"
    repo = f"{entity}/{repo_name or re.sub('[^A-Za-z0-9_]+', '-', about)}"
    check_token()
    with in_one_line(repo):
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.utils import disable_progress_bars

        public = json.dumps({key: config[key] for key in PUBLIC if key in config}, indent=2) + "\n"
        files: dict[str, bytes | Path] = {
            "README.md": model_card(repo, config, result).encode(),
            "config.json": public.encode(),
            source.name: source,
        }
        files |= {name: run / name for name in PULLED if name not in files and (run / name).exists()}
        if films := sorted((run / "videos").glob("[!p]*.mp4"), key=lambda path: path.stat().st_mtime):
            files["replay.mp4"] = films[-1]  # the name that the Hub shows
        disable_progress_bars()
        api = HfApi()
        api.create_repo(repo, private=private or None, exist_ok=True)
        if private and not api.model_info(repo).private:
            raise HubError(f"{repo} exists and is public; make it private on the Hub, or choose another --repo-name")
        api.create_commit(
            repo,
            [CommitOperationAdd(name, str(file) if isinstance(file, Path) else file) for name, file in files.items()],
            commit_message=f"{config['algorithm']} on {experiment['env_id']}, seed {experiment['seed']}",
        )
        return f"{api.endpoint}/{repo}"


def _read_result(run: Path) -> dict[str, Any]:
    """The result of a run that was evaluated at its end."""
    if not (run / "model" / "params.safetensors").exists():
        usage_error(f"{run} has no saved model; train with --save-model")
    try:
        result = json.loads((run / "result.json").read_text())
    except FileNotFoundError:
        usage_error(f"{run} has no result.json: the run is not finished")
    except (OSError, ValueError) as error:
        usage_error(f"cannot read {run / 'result.json'}: {error}")
    if "eval_episodic_return_std" not in result:
        usage_error(f"{run / 'result.json'} has no evaluation; train with --save-model")
    return result


def model_card(repo: str, config: dict[str, Any], result: dict[str, Any]) -> str:
    """What the Hub shows: metadata for its search and its leaderboards, and text for people."""
    from huggingface_hub import EvalResult, ModelCardData

    algorithm, env_id = config["algorithm"], config["experiment"]["env_id"]
    mean = f"{result['eval_episodic_return']:.2f} +/- {result['eval_episodic_return_std']:.2f}"
    evaluation = EvalResult(
        task_type="reinforcement-learning",
        task_name="reinforcement-learning",
        dataset_type=env_id,
        dataset_name=env_id,
        metric_type="mean_reward",
        metric_name="mean_reward",
        metric_value=mean,
        verified=False,
    )
    metadata = ModelCardData(
        model_name=algorithm,
        library_name="cleanba",
        pipeline_tag="reinforcement-learning",
        tags=[env_id, algorithm, "reinforcement-learning", "deep-reinforcement-learning", "cleanba"],
        eval_results=[evaluation],
    )
    words = dict(repo=repo, mean=mean, algorithm=algorithm, env_id=env_id)
    text = CARD.format(**result, **words, arguments=shlex.join(flags(config["experiment"])))
    return f"---\n{metadata.to_yaml()}\n---\n{text}"


def pull(model: str, folder: Path | None = None) -> Path:
    """Bring NAME/MODEL back as a run directory; one that was pulled before is brought up to date."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", model, re.ASCII):
        raise HubError(f"{model!r} is not of the form NAME/MODEL")
    folder = folder or Path("runs") / model.replace("/", "__")
    if folder.exists() and not (folder.is_dir() and (_was_pulled(folder) or not any(folder.iterdir()))):
        raise HubError(f"{folder} exists and was not pulled from the Hub; name a new directory with --dir")
    with in_one_line(model):
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        api = HfApi()
        info = api.model_info(model)
        there = {file.rfilename for file in info.siblings or ()}
        if missing := [name for name in NEEDED if name not in there]:
            raise HubError(f"{model} is not a model that `cleanba push` made: it has no {missing[0]}")
        for name in PULLED:
            if name in there:
                api.hf_hub_download(model, name, revision=info.sha, local_dir=folder)
    return folder


def _was_pulled(folder: Path) -> bool:
    """huggingface_hub keeps there which version of each file it has brought."""
    return (folder / ".cache" / "huggingface").is_dir()


@dataclass(frozen=True)
class Push:
    """Put a run's model on the Hugging Face Hub, with config, metrics, learning curve, algorithm, video and a card."""

    run: Annotated[Path, tyro.conf.Positional]
    """a run directory with a saved model"""
    hf_entity: str
    """user or organization on the Hub"""
    repo_name: str = ""
    """the model's name there (default: ENV-ALGORITHM-seedSEED)"""
    private: bool = False
    """make a repository that others cannot see"""
    script: str = ""
    """the algorithm's file, if it is not one of Cleanba's"""

    def main(self) -> None:
        """Push and say where it is."""
        name = read_config(self.run)["algorithm"]
        source = Path(self.script or Path(cleanba.__file__).parent / f"{name}.py")
        if not source.is_file():
            usage_error(f"there is no {source}; give the algorithm's file with --script")
        try:
            print(f"pushed to {push(self.run, self.hf_entity, source, self.repo_name, self.private)}")
        except HubError as error:
            usage_error(str(error))


@dataclass(frozen=True)
class Pull:
    """Bring a model from the Hugging Face Hub into a run directory."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME/MODEL")]
    """user or organization, and model"""
    dir: Path | None = None
    """where to (default: runs/NAME__MODEL)"""

    def main(self) -> None:
        """Pull and say what to do next."""
        try:
            folder = pull(self.model, self.dir)
        except HubError as error:
            usage_error(str(error))
        print(f"pulled into {folder}; next: cleanba eval {folder} --episodes 100")
