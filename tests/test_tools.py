"""The `cleanba` command, on small run directories written by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cleanba.tools.cli import COMMANDS, WIDTH, main
from cleanba.tools.curves import smooth
from cleanba.tools.plot import labels, plot, read_curve

PNG = b"\x89PNG\r\n\x1a\n"


def write_run(
    run: Path,
    updates: int = 5,
    changes: dict[int, dict[str, Any]] | None = None,
    algorithm: str = "ppo",
    **experiment: Any,
) -> Path:
    """A run directory; `changes` are put into the records of the updates they are filed under."""
    run.mkdir()
    experiment = {"env_id": "CartPole-v1", "seed": 1} | experiment
    (run / "config.json").write_text(json.dumps({"algorithm": algorithm, "experiment": experiment}))
    records: list[dict[str, Any]] = [
        {
            "update": n,
            "global_step": 100 * n,
            "fingerprint": f"{n:064x}",
            "charts/episodes": 4,
            "charts/episodic_return": 10.0 * n,
            "losses/value_loss": 1.0 / n,
            "charts/SPS": hash(run) % 1000,
            "stats/time": float(hash(run)),
        }
        | (changes or {}).get(n, {})
        for n in range(1, updates + 1)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def cleanba(*argv: object) -> int:
    """The exit status of a command line."""
    try:
        return main([str(word) for word in argv]) or 0
    except SystemExit as error:
        return int(error.code or 0)


def assert_one_line(capsys: pytest.CaptureFixture[str], *said: str) -> None:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    for words in said:
        assert words in err


class TestDiff:
    def test_identical_but_for_timings(self, tmp_path, capsys):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
        assert (a / "metrics.jsonl").read_text() != (b / "metrics.jsonl").read_text()
        assert cleanba("diff", a, b) == 0
        assert capsys.readouterr().out == "identical: 5 updates, fingerprint 0000000000000000\n"

    def test_names_the_first_update_and_its_metrics(self, tmp_path, capsys):
        a = write_run(tmp_path / "a", changes={3: {"losses/value_loss": 0.3}})
        b = write_run(tmp_path / "b", changes={3: {"losses/value_loss": 0.1 + 0.2}, 4: {"fingerprint": "x"}})
        assert cleanba("diff", a, b) == 1
        out = capsys.readouterr().out
        assert out.startswith("different from update 3 on, there in 1 metric\n")
        assert ["losses/value_loss", "0.3", "0.30000000000000004"] in [line.split() for line in out.splitlines()]
        assert "fingerprint" not in out
        assert "setting" not in out

    def test_metric_that_only_one_has(self, tmp_path, capsys):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes={1: {"losses/entropy": 0.5}})
        assert cleanba("diff", a, b) == 1
        assert ["losses/entropy", "-", "0.5"] in [line.split() for line in capsys.readouterr().out.splitlines()]

    @pytest.mark.parametrize("swapped", [False, True])
    def test_prefix(self, tmp_path, capsys, swapped):
        a, b = write_run(tmp_path / "a", updates=5), write_run(tmp_path / "b", updates=3)
        assert cleanba("diff", *((b, a) if swapped else (a, b))) == 1
        assert capsys.readouterr().out == f"identical up to update 3; {b} stops there\n"

    def test_half_written_last_line_is_not_there_yet(self, tmp_path, capsys):
        a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
        whole = (b / "metrics.jsonl").read_text()
        (b / "metrics.jsonl").write_text(whole[:-20])
        assert cleanba("diff", a, b) == 1
        assert capsys.readouterr().out == f"identical up to update 4; {b} stops there\n"

    @pytest.mark.parametrize(
        ("x", "y", "status"), [(np.nan, np.nan, 0), (np.nan, 1.0, 1), (0.0, -0.0, 1), (np.inf, np.inf, 0)]
    )
    def test_compares_as_written(self, tmp_path, x, y, status):
        a, b = (write_run(tmp_path / name, changes={2: {"losses/z": z}}) for name, z in (("a", x), ("b", y)))
        assert cleanba("diff", a, b) == status

    def test_lists_differing_settings(self, tmp_path, capsys):
        a, b = write_run(tmp_path / "a", gamma=0.99), write_run(tmp_path / "b", gamma=0.9, algorithm="dqn")
        assert cleanba("diff", a, b) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["gamma", "0.99", "0.9"] in rows
        assert ["algorithm", "ppo", "dqn"] in rows
        assert not any(row and row[0] == "seed" for row in rows)


class TestBadInput:
    def test_missing_directory(self, tmp_path, capsys):
        assert cleanba("diff", write_run(tmp_path / "a"), tmp_path / "b") == 2
        assert_one_line(capsys, f"{tmp_path / 'b'} is not a directory")

    @pytest.mark.parametrize("command", ["diff", "plot"])
    def test_no_run_in_it(self, tmp_path, capsys, command):
        assert cleanba(command, tmp_path, tmp_path) == 2
        assert_one_line(capsys, "no config.json")

    @pytest.mark.parametrize("command", ["diff", "plot"])
    @pytest.mark.parametrize(
        ("text", "said"),
        [
            (None, "no update has been finished"),
            ("", "no update has been finished"),
            ('{"update": 1, "glob', "no update has been finished"),
            ('{"update": 1, "global_step": 1}\nnonsense\n{"update": 3, "global_step": 3}\n', "line 2"),
            ('{"update": 1}\n', "line 1"),
            ("[]\n", "line 1"),
        ],
    )
    def test_metrics(self, tmp_path, capsys, command, text, said):
        run, other = write_run(tmp_path / "a"), write_run(tmp_path / "b")
        (run / "metrics.jsonl").unlink()
        if text is not None:
            (run / "metrics.jsonl").write_text(text)
        assert cleanba(command, other, run) == 2
        assert_one_line(capsys, said, str(run))

    @pytest.mark.parametrize("text", ["", "[]", "{"])
    def test_config(self, tmp_path, capsys, text):
        run = write_run(tmp_path / "a")
        (run / "config.json").write_text(text)
        assert cleanba("diff", run, run) == 2
        assert_one_line(capsys, "config.json")

    @pytest.mark.parametrize(
        ("argv", "said"),
        [
            (["train"], "use eval, diff, plot"),
            (["diff", "a"], "RUN_B"),
            (["diff", "a", "b", "c"], "c"),
            (["plot"], "at least one run"),
            (["plot", "a", "--metrc", "x"], "--metric"),
            (["eval", "nowhere"], "no saved model"),
        ],
    )
    def test_command_line(self, capsys, argv, said):
        assert cleanba(*argv) == 2
        assert_one_line(capsys, said)

    def test_unknown_metric_names_those_there_are(self, tmp_path, capsys):
        assert cleanba("plot", write_run(tmp_path / "a"), "--metric", "losses/q", "--out", tmp_path / "c.png") == 2
        assert_one_line(capsys, "losses/q", "losses/value_loss")
        assert not (tmp_path / "c.png").exists()

    def test_metric_that_is_no_number(self, tmp_path, capsys):
        assert cleanba("plot", write_run(tmp_path / "a"), "--metric", "fingerprint") == 2
        assert_one_line(capsys, "no numbers for --metric fingerprint")

    def test_picture_that_cannot_be_written(self, tmp_path, capsys):
        run = write_run(tmp_path / "a")
        assert cleanba("plot", run, "--out", tmp_path / "c.xyz") == 2
        assert_one_line(capsys, ".xyz", "png")
        (tmp_path / "folder.png").mkdir()
        assert cleanba("plot", run, "--out", tmp_path / "folder.png") == 2
        assert_one_line(capsys, "folder.png")


class TestPlot:
    def test_writes_a_png(self, tmp_path, capsys):
        runs = [write_run(tmp_path / f"r{seed}", seed=seed, updates=20) for seed in (1, 2, 3)]
        assert cleanba("plot", *runs, "--out", tmp_path / "new" / "c.png") == 0
        assert (tmp_path / "new" / "c.png").read_bytes().startswith(PNG)
        assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'c.png'}\n"

    def test_without_an_ending_it_is_a_png_too(self, tmp_path):
        plot([write_run(tmp_path / "a")], tmp_path / "curve")
        assert (tmp_path / "curve").read_bytes().startswith(PNG)

    @pytest.mark.parametrize("updates", [1, 2, 3])
    def test_few_points(self, tmp_path, updates):
        run = write_run(tmp_path / "a", updates=updates)
        plot([run], tmp_path / "c.png")
        assert (tmp_path / "c.png").read_bytes().startswith(PNG)
        assert len(read_curve(run).step) == updates

    def test_no_episode_has_ended(self, tmp_path):
        none = {n: {"charts/episodes": 0, "charts/episodic_return": None} for n in range(1, 6)}
        run = write_run(tmp_path / "a", changes=none)
        plot([run], tmp_path / "c.png")
        plot([run, write_run(tmp_path / "b", seed=2)], tmp_path / "d.png")
        assert (tmp_path / "c.png").read_bytes().startswith(PNG)
        assert len(read_curve(run).step) == 0

    def test_half_written_last_line(self, tmp_path):
        run = write_run(tmp_path / "a")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"update": 6, "global_s')
        np.testing.assert_array_equal(read_curve(run).step, [100, 200, 300, 400, 500])

    def test_numbers_that_are_not_finite_are_left_out(self, tmp_path):
        run = write_run(tmp_path / "a", changes={2: {"losses/value_loss": np.nan}, 4: {"losses/value_loss": np.inf}})
        curve = read_curve(run, "losses/value_loss")
        np.testing.assert_array_equal(curve.step, [100, 300, 500])
        assert np.isfinite(curve.smooth).all()
        plot([run], tmp_path / "c.png", "losses/value_loss")

    def test_many_runs_with_odd_names(self, tmp_path):
        runs = [write_run(tmp_path / f"_{i}$^^$") for i in range(12)]
        plot([*runs, runs[0]], tmp_path / "c.png")
        assert (tmp_path / "c.png").read_bytes().startswith(PNG)

    def test_labels_say_what_differs(self, tmp_path):
        one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", seed=2)
        other = write_run(tmp_path / "other", algorithm="impala_atari", env_id="Pong-v5")
        (tmp_path / "sub").mkdir()
        same_name = write_run(tmp_path / "sub" / "one")

        def of(*runs: Path) -> list[str]:
            return labels([read_curve(run) for run in runs])

        assert of(one, two) == ["seed 1", "seed 2"]
        assert of(one, other) == ["ppo · CartPole-v1 · seed 1", "impala_atari · Pong-v5 · seed 1"]
        assert of(one, two, write_run(tmp_path / "three")) == ["one", "two", "three"]
        assert of(one, same_name) == [str(one), str(same_name)]


class TestSmooth:
    @pytest.mark.parametrize("n", [1, 2, 3, 10, 1000])
    def test_a_constant_stays(self, n):
        np.testing.assert_allclose(smooth(np.full(n, 7.0), np.ones(n)), 7.0)

    def test_weights_count_and_unweighted_values_do_not(self):
        n = 601
        value, weight = np.zeros(n), np.ones(n)
        value[300], weight[300] = 1.0, 10.0
        kernel = np.exp(-0.5 * ((np.arange(n) - 300) / (n / 60)) ** 2) * (abs(np.arange(n) - 300) <= 31)
        expected = 10 / (kernel.sum() + 9)
        np.testing.assert_allclose(smooth(value, weight)[300], expected)
        value[300], weight[300] = np.nan, 0.0
        np.testing.assert_array_equal(smooth(value, weight), 0.0)

    def test_nothing_near(self):
        weight = np.zeros(100)
        weight[0] = 1
        smoothed = smooth(np.ones(100), weight)
        assert smoothed[0] == 1
        assert np.isnan(smoothed[50])


def test_help_lists_the_commands_and_needs_neither_jax_nor_matplotlib(tmp_path):
    code = (
        "import sys; from cleanba.tools.cli import main; main(['--help']); main(['diff', *sys.argv[1:]]);"
        "print(sorted({'jax', 'envpool', 'matplotlib'} & sys.modules.keys()))"
    )
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    done = subprocess.run([sys.executable, "-c", code, a, b], capture_output=True, text=True, check=True)
    for name in COMMANDS:
        assert f"\n  {name:{WIDTH}}  " in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(capsys, command):
    assert cleanba(command, "--help") == 0
    assert f"usage: cleanba {command}" in capsys.readouterr().out
