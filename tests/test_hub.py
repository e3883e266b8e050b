"""Sharing: what is pushed to the Hub, what comes back, what is never run, and one clear line when it cannot be done."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import yaml
from hub_server import TOKEN, Hub, serving
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file
from sessions import ENV, SMALL, finish
from synthetic import params_of

from cleanba import ppo
from cleanba.core.evaluate import Player
from cleanba.core.run import Run, flatten
from cleanba.tools.cli import main
from cleanba.tools.hub import NEEDED, pull

# huggingface_hub 2.4.0 uploads large files in a way that its HTTP library is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ARGS = ppo.Args(num_steps=16, collect="stepwise")
MODEL = "me/CartPole-v1-ppo-seed1"
RESULT = {
    "fingerprint": "4d88",
    "global_step": 7680,
    "eval_episodic_return": 17.25,
    "eval_episodic_return_std": 2.5,
    "eval_episodes": 4,
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub on this machine, whose user is logged in, and an empty directory to work in."""
    with serving() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.chdir(tmp_path)
        yield server
        huggingface_hub.close_session()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run."""
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "videos").mkdir()
    save_file(flatten(params_of(ppo, ARGS)), run / "model" / "params.safetensors")
    config = {"algorithm": "ppo", "experiment": ARGS.experiment}
    private = {"machine": {"coordinator_address": "my-host:1234"}, "command": ["/my/home/ppo.py"], "sessions": [{}]}
    for path, content in (("model/config.json", config), ("config.json", config | private), ("result.json", RESULT)):
        (run / path).write_text(json.dumps(content))
    (run / "metrics.jsonl").write_text('{"update": 1, "global_step": 7680}\n')
    (run / "learning_curve.png").write_bytes(b"a curve")
    (run / "videos" / "seed-1.mp4").write_bytes(b"a film")
    return run


def refused(capsys: Any, *words: object) -> str:
    """The one line that a command which cannot be done says."""
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in words])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    assert TOKEN not in err
    return err


def test_what_is_pushed_and_what_comes_back(hub: Hub, run: Path, capsys: Any) -> None:
    main(["push", str(run), "--hf-entity", "me"])
    assert capsys.readouterr().out == f"pushed to {hub.url}/{MODEL}\n"
    files = hub.repos[MODEL].files
    kept = {"metrics.jsonl", "result.json", "learning_curve.png", "model/config.json", "model/params.safetensors"}
    assert files.keys() == kept | {"README.md", "config.json", "ppo.py", "replay.mp4"}
    assert all(files[name] == (run / name).read_bytes() for name in kept)
    assert files["ppo.py"] == Path(str(ppo.__file__)).read_bytes()
    assert files["replay.mp4"] == b"a film"
    assert json.loads(files["config.json"]) == {"algorithm": "ppo", "experiment": ARGS.experiment}
    assert not any(secret in content for content in files.values() for secret in (b"my-host", b"/my/home"))
    assert any(request.startswith("PUT /blobs/") for request in hub.requests)
    assert not hub.repos[MODEL].private

    main(["pull", MODEL])
    folder = Path("runs/me__CartPole-v1-ppo-seed1")
    assert f"pulled into {folder}" in capsys.readouterr().out
    brought = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name for name in brought if not name.startswith(".cache")} == files.keys() - {"ppo.py"}
    assert all((folder / name).read_bytes() == content for name, content in files.items() if name != "ppo.py")
    assert main(["diff", str(run), str(folder)]) == 0


def test_the_card_has_the_evaluation_where_the_hub_looks_for_it(hub: Hub, run: Path) -> None:
    main(["push", str(run), "--hf-entity", "me", "--repo-name", "mine", "--private"])
    assert hub.repos["me/mine"].private
    card = hub.repos["me/mine"].files["README.md"].decode()
    metadata = yaml.safe_load(card.split("---\n")[1])
    assert metadata["library_name"] == "cleanba"
    assert {"reinforcement-learning", "CartPole-v1", "ppo"} <= set(metadata["tags"])
    [index] = metadata["model-index"]
    [result] = index["results"]
    assert index["name"] == "ppo"
    assert result["task"]["type"] == "reinforcement-learning"
    assert result["dataset"] == {"name": "CartPole-v1", "type": "CartPole-v1"}
    assert result["metrics"] == [
        {"type": "mean_reward", "value": "17.25 +/- 2.50", "name": "mean_reward", "verified": False}
    ]
    assert "cleanba eval hf:me/mine" in card
    assert "`4d88`" in card
    [command] = [line for line in card.splitlines() if line.startswith("python cleanba/ppo.py ")]
    assert ppo.Args(**ARGS.experiment) == read_command(command)


def read_command(line: str) -> ppo.Args:
    from cleanba.core.usage import read

    return read(ppo.Args, line.split()[2:])


def test_a_second_push_is_a_second_commit_and_a_second_pull_brings_it(hub: Hub, run: Path) -> None:
    main(["push", str(run), "--hf-entity", "me"])
    folder = pull(MODEL)
    save_file(flatten(params_of(ppo, ARGS, seed=1)), run / "model" / "params.safetensors")
    main(["push", str(run), "--hf-entity", "me"])
    assert hub.repos[MODEL].commits == ["ppo on CartPole-v1, seed 1"] * 2
    assert pull(MODEL) == folder
    new, old = (load_file(path / "model" / "params.safetensors") for path in (folder, run))
    assert all((new[name] == old[name]).all() for name in new.keys() | old.keys())


def test_a_model_on_the_hub_plays_like_the_one_here(hub: Hub, run: Path, capsys: Any) -> None:
    main(["push", str(run), "--hf-entity", "me"])
    capsys.readouterr()
    main(["eval", f"hf:{MODEL}", "--episodes", "2"])
    said = json.loads(capsys.readouterr().out)
    assert said["returns"] == Player(ppo.act, ARGS, 2).play(params_of(ppo, ARGS), 2)


def test_nothing_that_comes_from_the_hub_is_run(hub: Hub, run: Path, capsys: Any, monkeypatch: Any) -> None:
    main(["push", str(run), "--hf-entity", "me"])
    files = hub.repos[MODEL].files
    evil = b"raise SystemExit('this was run')"
    files |= {"ppo.py": evil, "evil.py": evil, "model/evil.py": evil}
    folder = pull(MODEL)
    assert not list(folder.rglob("*.py"))
    monkeypatch.syspath_prepend(folder)
    capsys.readouterr()
    config = json.loads(files["model/config.json"])
    for changed, said in (
        (config | {"algorithm": "evil"}, "made by evil.py, which is not one of Cleanba's"),
        (config | {"algorithm": "../evil"}, "not one of Cleanba's"),
        (config | {"algorithm": "tools"}, "are not those of cleanba.tools"),
        (config | {"experiment": config["experiment"] | {"env_id": "evil:Env-v0"}}, "evil:Env-v0, a module of yours"),
        (config | {"experiment": config["experiment"] | {"new": 1}}, "are not those of cleanba.ppo"),
        ({}, "does not describe a model"),
    ):
        files["model/config.json"] = json.dumps(changed).encode()
        assert said in refused(capsys, "eval", f"hf:{MODEL}")


def test_what_is_no_model_of_cleanba_is_not_pulled(hub: Hub, run: Path, capsys: Any) -> None:
    main(["push", str(run), "--hf-entity", "me"])
    del hub.repos[MODEL].files[NEEDED[-1]]
    capsys.readouterr()
    assert f"it has no {NEEDED[-1]}" in refused(capsys, "pull", MODEL)
    assert "no model me/other" in refused(capsys, "pull", "me/other")
    assert "not of the form NAME/MODEL" in refused(capsys, "eval", "hf:other")
    assert not Path("runs").exists()


def test_a_directory_with_something_else_in_it_is_left_alone(hub: Hub, run: Path, capsys: Any) -> None:
    main(["push", str(run), "--hf-entity", "me"])
    capsys.readouterr()
    before = sorted(run.rglob("*"))
    assert "was not pulled from the Hub" in refused(capsys, "pull", MODEL, "--dir", run)
    assert sorted(run.rglob("*")) == before
    Path("empty").mkdir()
    assert pull(MODEL, Path("empty")) == Path("empty")


def test_why_a_model_cannot_be_pushed(hub: Hub, run: Path, capsys: Any, monkeypatch: Any) -> None:
    push = ("push", run, "--hf-entity")
    assert "answers 403 (You may not create a model under others)" in refused(capsys, *push, "others")
    assert "cannot be a model's name" in refused(capsys, *push, "me", "--repo-name", "a--b")
    assert "there is no nowhere.py" in refused(capsys, *push, "me", "--script", "nowhere.py")
    main(["push", str(run), "--hf-entity", "me"])
    capsys.readouterr()
    assert "exists and is public" in refused(capsys, *push, "me", "--private")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "answers 401" in refused(capsys, *push, "me")
    monkeypatch.delenv("HF_TOKEN")
    assert "there is no token" in refused(capsys, *push, "me")
    assert len(hub.repos[MODEL].commits) == 1
    for name, said in (("result.json", "not finished"), ("model/params.safetensors", "no saved model")):
        (run / name).unlink()
        assert said in refused(capsys, *push, "me")


def test_without_a_network_one_line_says_so(hub: Hub, run: Path, capsys: Any, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nowhere = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", nowhere)
    for words in (("push", run, "--hf-entity", "me"), ("pull", MODEL), ("eval", f"hf:{MODEL}")):
        said = refused(capsys, *words)
        assert f"{nowhere} cannot be used: " in said
        assert "refused" in said
    assert not Path("runs").exists()


def test_a_token_that_an_error_quotes_is_not_printed(hub: Hub, run: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN}\v{TOKEN}")
    assert "Bearer ..." in refused(capsys, "push", run, "--hf-entity", "me")


def test_a_training_run_uploads_its_model(hub: Hub, tmp_path: Path) -> None:
    here = ENV | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    arguments = f"{SMALL.replace('7680', '1280')} --upload-model --eval-episodes 2 --hf-entity me"
    out, err = finish(tmp_path / "run", arguments, environment=here | {"HF_TOKEN": TOKEN})
    assert out.endswith(f"uploaded to {hub.url}/{MODEL}\n")
    assert err == ""
    files = hub.repos[MODEL].files
    assert set(NEEDED) | {"README.md", "ppo.py", "learning_curve.png", "metrics.jsonl"} <= files.keys()
    written = [path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in [*files.values(), *written])


def test_a_training_run_that_could_not_upload_does_not_begin(
    hub: Hub, run: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    training = Run(ppo.Args(upload_model=True, hf_entity="me"))
    training.dir = run.parent / "new"
    with pytest.raises(SystemExit) as caught:
        training._check_dir()
    assert caught.value.code == 2
    assert "--upload-model: there is no token" in capsys.readouterr().err


def test_a_training_run_whose_upload_fails_says_how_to_try_again(hub: Hub, run: Path, capsys: Any) -> None:
    training = Run(ppo.Args(upload_model=True, hf_entity="others"))
    training.dir = run
    with pytest.raises(SystemExit) as caught:
        training._upload()
    assert caught.value.code == 1
    err = capsys.readouterr().err
    assert err.startswith(f"warning: not uploaded: {hub.url} answers 403 ")
    assert err.endswith(f"to try again: cleanba push {run} --hf-entity others\n")
    assert err.count("\n") == 1
