"""Comparing runs: what is read, averaged and drawn, on small run directories written by hand, and in a real browser."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import envpool
import numpy as np
import pytest
from browser import CHROMIUM, Browser
from rliable.metrics import aggregate_iqm
from test_tools import assert_one_line, cleanba

from cleanba.tools.curves import (
    RETURN,
    Run,
    band,
    final_score,
    in_order,
    panels,
    read_run,
    smoothed,
    thin,
    training_time,
    variants,
)
from cleanba.tools.report import Comparison, content, estimate, iqm, page, profile
from cleanba.tools.runs import find_runs
from cleanba.tools.scores import RANDOM_AND_HUMAN, human_normalized, is_atari

HOSTILE = "</script><script>document.title='taken'</script> & \"quoted\" <b>"


def write_run(
    path: Path,
    algorithm: str = "ppo",
    env_id: str = "CartPole-v1",
    seed: int = 1,
    updates: int = 40,
    level: float = 100.0,
    finished: bool = True,
    metrics: dict[str, Any] | None = None,
    **settings: Any,
) -> Path:
    """A run whose return rises to about `level`, at 1,000 steps and two seconds an update."""
    path.mkdir(parents=True)
    experiment = {"env_id": env_id, "seed": seed, "total_timesteps": 40_000} | settings
    sessions = [{"after_update": 0}]
    (path / "config.json").write_text(
        json.dumps({"algorithm": algorithm, "experiment": experiment, "sessions": sessions})
    )
    numbers = np.random.default_rng(seed)
    with (path / "metrics.jsonl").open("w") as file:
        for n in range(1, updates + 1):
            record = {"update": n, "global_step": 1000 * n, "stats/time": 1.7e9 + 2 * n, "charts/episodes": 5}
            record |= {RETURN: level * (1 - math.exp(-5 * n / updates)) + numbers.normal(), "losses/loss": 1 / n}
            file.write(json.dumps(record | (metrics or {})) + "\n")
    if finished:
        (path / "result.json").write_text(json.dumps({"eval_episodic_return": level}))
    return path


def a_run(path: str = "a", algorithm: str = "ppo", env_id: str = "CartPole-v1", seed: int = 1, **settings: Any) -> Run:
    """A run in memory, with the return 1, 2, ..., 10."""
    value = np.arange(1.0, 11.0)
    step, episodes = 100 * value, np.full(10, 5.0)
    return Run(Path(path), algorithm, env_id, str(seed), settings, 10, step, 2 * value, episodes, {RETURN: value}, {})


class TestScores:
    def test_the_57_games_of_envpool(self):
        assert len(RANDOM_AND_HUMAN) == 57
        assert {f"{game}-v5" for game in RANDOM_AND_HUMAN} <= set(envpool.list_all_envs())

    @pytest.mark.parametrize("env_id", ["Pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4", "Pong-v0"])
    def test_zero_is_random_and_one_is_human(self, env_id):
        assert is_atari(env_id)
        assert human_normalized(env_id, -20.7) == 0
        assert human_normalized(env_id, 14.6) == 1
        np.testing.assert_allclose(human_normalized(env_id, np.array([-20.7, -3.05, 14.6])), [0, 0.5, 1])

    @pytest.mark.parametrize("env_id", ["CartPole-v1", "Breakout-MinAtar-v1", "Pong", "?", ""])
    def test_others_are_not_atari(self, env_id):
        assert is_atari(env_id) == (env_id == "Pong")


class TestFindRuns:
    def test_a_run_and_a_folder_of_runs(self, tmp_path):
        one = write_run(tmp_path / "one")
        two = write_run(tmp_path / "all" / "deep" / "two with spaces")
        three = write_run(tmp_path / "all" / "three")
        assert find_runs([one, tmp_path / "all"]) == [one, three, two]
        assert set(find_runs([tmp_path])) == {one, two, three}

    def test_a_model_in_a_run_is_no_run(self, tmp_path):
        run = write_run(tmp_path / "one")
        write_run(run / "model")
        assert find_runs([tmp_path]) == [run]

    def test_each_once(self, tmp_path):
        run = write_run(tmp_path / "one")
        (tmp_path / "link").symlink_to(run)
        assert len(find_runs([run, tmp_path, run, tmp_path / "link"])) == 1

    @pytest.mark.parametrize("command", ["plot", "report"])
    def test_nothing_there(self, tmp_path, capsys, command):
        assert cleanba(command, tmp_path) == 2
        assert_one_line(capsys, str(tmp_path), "no config.json")
        assert cleanba(command, tmp_path / "missing") == 2
        assert_one_line(capsys, "missing is not a directory")
        assert cleanba(command) == 2
        assert_one_line(capsys, "at least one run directory")


class TestTrainingTime:
    def times(self, clock: list[Any], *after: int) -> list[float]:
        records = [{"update": n, "stats/time": t} for n, t in enumerate(clock, 1)]
        return training_time(records, [{"after_update": n} for n in after]).tolist()

    def test_counts_from_a_median_update_before_the_first_record(self):
        assert self.times([100, 102, 105, 107], 0) == [2, 4, 7, 9]

    def test_a_pause_between_sessions_counts_as_an_update(self):
        assert self.times([100, 102, 104, 9000, 9002], 0, 3) == [2, 4, 6, 8, 10]
        assert self.times([100, 102, 104, 9000, 9002], 0) == [2, 4, 6, 8902, 8904]

    def test_a_session_that_was_cut_away_left_no_pause(self):
        assert self.times([100, 102, 9000, 9002, 9005, 9007], 0, 4, 2) == [2, 4, 6, 8, 11, 13]

    def test_a_clock_that_was_set_back(self):
        assert self.times([100, 102, 50, 52], 0) == [2, 4, 4, 6]

    def test_few_records(self):
        assert self.times([]) == []
        assert self.times([100]) == [0]
        assert self.times([100, 900], 0, 1) == [0, 0]

    def test_unknown(self):
        assert np.isnan(self.times([100, None, 102])).all()


class TestThin:
    def test_keeps_a_short_run(self):
        run = a_run()
        assert thin(run, 10) is run

    def test_is_a_mean_by_episodes_over_neighbours(self):
        value, episodes = np.arange(1.0, 11.0), np.array([1, 0, 3, 1, 1, 1, 1, 1, 0, 0.0])
        value[5] = np.nan
        run = a_run()._replace(values={RETURN: value, "losses/x": value}, episodes=episodes)
        thinned = thin(run, 5)
        np.testing.assert_allclose(thinned.values[RETURN], [1, (3 * 3 + 4) / 4, 5, 7.5, np.nan])
        np.testing.assert_allclose(thinned.values["losses/x"], [1.5, 3.5, 5, 7.5, 9.5])
        np.testing.assert_allclose(thinned.step, [150, 350, 550, 750, 950])
        np.testing.assert_allclose(thinned.episodes, [1, 4, 2, 2, 0])

    @pytest.mark.parametrize("n", [7, 11, 999, 10_000])
    def test_the_mean_of_all_stays(self, n):
        step = np.arange(1.0, n + 1)
        run = a_run()._replace(step=step, time=step, episodes=np.ones(n), values={RETURN: np.sin(step)})
        thinned = thin(run, 6)
        assert len(thinned.step) == 6
        mean = np.average(thinned.values[RETURN], weights=thinned.episodes)
        np.testing.assert_allclose(mean, np.sin(step).mean(), atol=1e-12)


class TestFinalScore:
    def test_is_the_mean_of_the_last_hundred_episodes(self):
        episodes = np.array([50, 50, 30, 0, 60, 10.0])
        values = {RETURN: np.array([1, 2, 3, np.nan, 5, 6.0])}
        run = a_run()._replace(episodes=episodes, values=values)
        assert final_score(run) == pytest.approx((30 * 3 + 60 * 5 + 10 * 6) / 100)

    def test_of_fewer_episodes(self):
        assert final_score(a_run()) == pytest.approx(5.5)

    def test_of_none(self):
        assert math.isnan(final_score(a_run()._replace(values={})))
        assert math.isnan(final_score(a_run()._replace(episodes=np.zeros(10))))


class TestGroups:
    def test_arguments_that_differ_within_an_environment_are_named(self):
        runs = [
            a_run(learning_rate=0.1, num_envs=8),
            a_run(learning_rate=0.2, num_envs=8),
            a_run(learning_rate=0.1, num_envs=64, env_id="Acrobot-v1"),
            a_run(algorithm="dqn", num_envs=1),
        ]
        low, high = "ppo · learning-rate 0.1", "ppo · learning-rate 0.2"
        assert variants(runs) == [low, high, low, "dqn"]

    def test_nothing_unlike_is_averaged(self):
        runs = [a_run(algorithm=a, env_id=e, seed=s) for a in ("ppo", "dqn") for e in ("A-v0", "B-v0") for s in (2, 10)]
        for by, count in (("algorithm", 2), ("env", 2), ("seed", 1)):
            charts = panels(runs, by)  # type: ignore[arg-type]
            assert len(charts) == 2
            groups = [group for chart in charts for group in chart.groups.values()]
            assert {len(group) for group in groups} == {count}
            assert all(len({(run.algorithm, run.env_id) for run in group}) == 1 for group in groups)
        assert list(panels(runs, "seed")[0].groups)[:2] == ["dqn · seed 2", "dqn · seed 10"]
        assert list(panels(runs[:4], "seed")[0].groups) == ["seed 2", "seed 10"]

    def test_order(self):
        assert in_order({"b 10", "b 9", "a", "", "7"}) == ["", "7", "a", "b 9", "b 10"]


class TestBand:
    def three(self) -> list[Run]:
        run = a_run()
        return [run._replace(values={RETURN: np.full(10, level)}) for level in (1.0, 2.0, 6.0)]

    def test_mean_and_interval(self):
        mean = band(self.three(), RETURN, "step", 5)
        np.testing.assert_allclose(mean.x, [100, 325, 550, 775, 1000])
        np.testing.assert_allclose(mean.mean, 3)
        assert mean.runs.tolist() == [3] * 5
        # Of 27 equally likely resamples one has the mean 1 and three have 4/3; the same at the upper end.
        np.testing.assert_allclose(mean.low, 1)
        np.testing.assert_allclose(mean.high, 6)

    def test_a_single_run_has_no_interval(self):
        mean = band(self.three()[:1], RETURN, "time", 5)
        np.testing.assert_allclose(mean.mean, 1)
        assert np.isnan(mean.low).all()

    def test_goes_as_far_as_more_than_half_of_the_runs(self):
        early, late = (
            run._replace(step=run.step + shift) for run, shift in zip(self.three()[:2], (0, 5000), strict=True)
        )
        assert len(band([early, late], RETURN, "step", 100).x) == 0
        short, middle, long = self.three()
        short = short._replace(step=short.step / 4)
        middle = middle._replace(step=middle.step / 2)
        mean = band([short, middle, long], RETURN, "step", 100)
        assert 495 <= mean.x[-1] <= 515
        assert mean.runs[-1] == 2
        np.testing.assert_allclose(mean.mean[-1], 4)
        assert mean.runs.max() == 3

    def test_runs_that_end_a_few_steps_apart_have_no_step_at_the_end(self):
        runs = [run._replace(step=run.step + i) for i, run in enumerate(self.three())]
        assert set(band(runs, RETURN, "step", 100).runs) == {3}

    def test_one_point_and_none(self):
        one = a_run()._replace(step=np.array([5.0]), episodes=np.ones(1), values={RETURN: np.array([7.0])})
        mean = band([one, one], RETURN, "step", 50)
        assert (mean.x.tolist(), mean.mean.tolist(), mean.low.tolist()) == ([5], [7], [7])
        assert len(band([one], "losses/none", "step", 50).x) == 0
        assert len(band([one._replace(values={RETURN: np.array([np.nan])})], RETURN, "step", 50).x) == 0

    def test_gaps_are_bridged(self):
        value = np.arange(1.0, 11.0)
        value[4] = np.nan
        run = a_run()._replace(values={RETURN: value})
        assert np.isnan(smoothed(run, RETURN)[4])
        assert np.isfinite(band([run], RETURN, "step", 100).mean).all()


class TestStatistics:
    def test_interquartile_mean(self):
        scores = np.array([1000.0, 3, 1, 2, 4, -1000, 5, 0])
        found = estimate([scores[:3], scores[3:]], iqm)
        assert found.point == pytest.approx((1 + 2 + 3 + 4) / 4)
        for n in range(1, 9):
            assert iqm(scores[:n]) == pytest.approx(aggregate_iqm(scores[:n]))
        assert found.low <= found.point <= found.high

    def test_tasks_are_drawn_apart(self):
        """However the runs are drawn, a task's mean is its own: there is no doubt about it here."""
        found = estimate([np.full(3, 1.0), np.full(2, 9.0)], np.mean)
        assert found.point == found.low == found.high == pytest.approx(21 / 5)

    def test_the_same_again(self):
        scores = np.random.default_rng(0).normal(size=8)
        assert estimate([scores], iqm) == estimate([scores], iqm)

    def test_profile(self):
        shares = profile({"a": [np.array([1.0, 2, 3, 4])], "b": [np.array([2.0]), np.array([3.0])]}, np.arange(5.0))
        assert shares["a"].point.tolist() == [1, 0.75, 0.5, 0.25, 0]
        assert shares["b"].point.tolist() == [1, 1, 0.5, 0, 0]
        assert (shares["a"].low <= shares["a"].point).all()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two algorithms, one of them with different arguments; Atari; runs that are odd in some way."""
    folder = tmp_path_factory.mktemp("runs")
    for seed in (1, 2, 3):
        write_run(folder / f"ppo {seed}", seed=seed, level=450, updates=1500)
        write_run(folder / f"dqn_{seed}", "dqn", seed=seed, level=300, metrics={"losses/q": float(seed)})
        for game, level in (("Pong-v5", 10), ("Breakout-v5", 60)):
            write_run(folder / "atari" / f"{game}_{seed}", "ppo_atari", game, seed, level=level)
            write_run(folder / "atari" / f"{game}_i{seed}", "impala_atari", game, seed, level=level / 2)
    write_run(folder / "slow", seed=4, level=200, finished=False, learning_rate=1e-5)
    write_run(folder / "none", seed=5, updates=0, finished=False)
    write_run(folder / "one point", "sac", "Pendulum-v1", updates=1)
    write_run(folder / "nan", "td3", "Pendulum-v1", metrics={RETURN: math.nan, "losses/loss": math.inf})
    write_run(folder / "silent", "td3", "Pendulum-v1", seed=2, metrics={"charts/episodes": 0, RETURN: None})
    write_run(folder / HOSTILE.replace("/", "\\"), f"ppo {HOSTILE}", f"Env {HOSTILE}", metrics={f"x/{HOSTILE}": 1.0})
    return folder


@pytest.fixture(scope="module", autouse=True)
def few_resamples() -> Iterator[None]:
    """Enough for every test but those of the numbers themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cleanba.tools.report.RESAMPLES", 50)
        yield


@pytest.fixture(scope="module")
def report(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report") / "new folder" / "report.html"
    assert cleanba("report", runs, "--out", out) == 0
    return out


class TestReport:
    def test_says_what_it_wrote(self, tmp_path, capsys):
        write_run(tmp_path / "a"), write_run(tmp_path / "b", "dqn", finished=False)
        assert cleanba("report", tmp_path, "--out", tmp_path / "r.html") == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / 'r.html'}: 2 runs in 2 groups, 1 not finished\n"

    def test_the_same_again(self, tmp_path):
        paths = [write_run(tmp_path / "a"), write_run(tmp_path / "b", seed=2)]
        assert page(Comparison(paths)) == page(Comparison(paths))

    def test_needs_nothing_else(self, report):
        text = report.read_text()
        assert not re.findall(r"(?:src|href)\s*=|@import|url\(|fetch\(|XMLHttpRequest|import\(", text)
        assert set(re.findall(r"https?://[^\"' ]+", text)) == {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xhtml",
        }

    def test_text_of_runs_stays_text(self, report):
        text = report.read_text()
        assert text.count("<script") == 2
        assert text.count("</script>") == 2
        assert "<b>" not in text
        assert "<!-- " not in text

    def test_data(self, runs):
        drawn = content(Comparison([runs]))
        assert drawn["metrics"][0] == RETURN
        assert "stats/time" not in drawn["metrics"]
        json.dumps(drawn, allow_nan=False)
        assert max(len(run["step"]) for run in drawn["runs"]) == 300
        assert {"dqn", "impala_atari", "ppo_atari", "sac", "td3"} < set(drawn["groups"])
        empty = next(run for run in drawn["runs"] if run["name"] == "none")
        assert empty["step"] == []

    def test_a_profile_needs_scores_that_differ(self, tmp_path):
        one = Comparison([write_run(tmp_path / "a")])
        assert content(one)["profiles"] == []
        assert "Performance profiles" not in page(one)
        write_run(tmp_path / "b", seed=2)
        [drawn] = content(Comparison([tmp_path]))["profiles"]
        assert drawn["lines"][0]["y"][0] == 0.5
        assert drawn["lines"][0]["y"][-1] == 0

    def test_final_scores(self, runs, report):
        comparison = Comparison([runs])
        assert len(comparison.scores("CartPole-v1", "dqn")) == 3
        mean = np.mean([final_score(read_run(runs / f"dqn_{seed}")) for seed in (1, 2, 3)])
        assert comparison.scores("CartPole-v1", "dqn").mean() == pytest.approx(mean)
        row = next(line for line in report.read_text().split("<tr") if ">dqn</td>" in line)
        assert f"<td>{mean:.1f}<small> ±" in row

    def test_atari_over_the_games_that_all_have_played(self, tmp_path):
        for game in ("Pong-v5", "Breakout-v5"):
            write_run(tmp_path / f"a{game}", "ppo_atari", game)
        write_run(tmp_path / "b", "impala_atari", "Breakout-v5")
        games, scores = Comparison([tmp_path]).atari()
        assert games == ["Breakout-v5"]
        own = human_normalized("Breakout-v5", Comparison([tmp_path]).scores("Breakout-v5", "impala_atari"))
        np.testing.assert_array_equal(scores["impala_atari"], [own])
        assert "Over 1 game that" in page(Comparison([tmp_path]))
        write_run(tmp_path / "c", "dqn_atari", "Pong-v5")
        assert Comparison([tmp_path]).atari() == ([], {})
        assert "no game that all groups" in page(Comparison([tmp_path]))

    @pytest.mark.parametrize("ending", ["png", "svg"])
    def test_picture(self, runs, tmp_path, ending):
        assert cleanba("report", runs / "atari", runs / "one point", "--out", tmp_path / f"r.{ending}") == 0
        drawn = (tmp_path / f"r.{ending}").read_bytes()
        assert drawn.startswith(b"\x89PNG") or b"<!-- Atari, 2 games -->" in drawn

    def test_without_times(self, tmp_path):
        run = write_run(tmp_path / "a", metrics={"stats/time": None})
        assert content(Comparison([run]))["runs"][0]["time"] is None
        assert cleanba("report", run, "--out", tmp_path / "r.html") == 0
        assert cleanba("report", run, "--out", tmp_path / "r.png") == 0

    def test_nothing_to_compare(self, tmp_path, capsys):
        empty = write_run(tmp_path / "a", updates=0)
        assert cleanba("report", empty, "--out", tmp_path / "r.html") == 2
        assert_one_line(capsys, f"{empty} has no metrics yet")
        write_run(tmp_path / "b", updates=0)
        assert cleanba("report", tmp_path, "--out", tmp_path / "r.html") == 2
        assert_one_line(capsys, "none of the 2 runs has metrics yet")
        assert not (tmp_path / "r.html").exists()

    def test_cannot_be_written(self, tmp_path, capsys):
        run = write_run(tmp_path / "a")
        assert cleanba("report", run, "--out", tmp_path / "r.docx") == 2
        assert_one_line(capsys, ".docx", "html")
        (tmp_path / "r.html").mkdir()
        assert cleanba("report", run, "--out", tmp_path / "r.html") == 2
        assert_one_line(capsys, "r.html")

    def test_without_rliable(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
        assert cleanba("report", write_run(tmp_path / "a")) == 2
        assert_one_line(capsys, "pip install 'cleanba[report]'")

    def test_damaged_metrics(self, tmp_path, capsys):
        run = write_run(tmp_path / "a")
        (run / "metrics.jsonl").write_text("nonsense\n")
        assert cleanba("report", tmp_path) == 2
        assert_one_line(capsys, "metrics.jsonl", "line 1")


class TestPlotBy:
    @pytest.mark.parametrize(
        ("by", "x"), [("algorithm", "step"), ("algorithm", "time"), ("seed", "step"), ("env", "time"), ("run", "time")]
    )
    def test_draws(self, runs, tmp_path, by, x, capsys):
        out = tmp_path / "c.svg"
        assert cleanba("plot", runs, "--by", by, "--x", x, "--out", out) == 0
        assert capsys.readouterr().out == f"wrote {out}; 1 without an update left out\n"
        drawn = out.read_text()
        assert ("environment steps" if x == "step" else "minutes of training") in drawn
        assert by in ("run", "env") or "<!-- Pong-v5 -->" in drawn

    def test_a_metric_that_only_some_have(self, runs, tmp_path, capsys):
        out = tmp_path / "c.svg"
        assert cleanba("plot", runs, "--by", "algorithm", "--metric", "losses/q", "--out", out) == 0
        assert "<!-- dqn -->" in out.read_text()
        assert "<!-- sac -->" not in out.read_text()
        capsys.readouterr()
        assert cleanba("plot", runs, "--by", "algorithm", "--metric", "losses/p", "--out", tmp_path / "d.png") == 2
        assert_one_line(capsys, "losses/p", "losses/q")

    def test_only_runs_without_an_update(self, tmp_path, capsys):
        write_run(tmp_path / "runs" / "a", updates=0)
        assert cleanba("plot", tmp_path) == 2
        assert_one_line(capsys, "no update has been finished")

    @pytest.mark.parametrize("by", ["run", "algorithm"])
    def test_no_time(self, tmp_path, capsys, by):
        run = write_run(tmp_path / "a", metrics={"stats/time": None})
        assert cleanba("plot", run, "--x", "time", "--by", by, "--out", tmp_path / "c.png") == 2
        assert_one_line(capsys, "stats/time", "--x step")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium here; on Debian: apt install chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


class TestBrowser:
    """The page as a reader sees it."""

    def paths(self, browser: Browser, selector: str) -> int:
        return browser.run(f"document.querySelectorAll({json.dumps(selector)}).length")

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize(("width", "height"), [(1440, 900), (390, 844)])
    def test_fits_every_screen_and_asks_for_nothing(self, browser, report, width, height, scheme):
        browser.open(report, width, height, scheme)
        assert browser.errors == []
        assert browser.requests == [report.resolve().as_uri()]
        assert browser.run("document.documentElement.scrollWidth") == width
        assert browser.run("[...document.querySelectorAll('.plot svg')].every(s => s.clientWidth > 250)")
        background = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (int(re.findall(r"\d+", background)[0]) < 60) == (scheme == "dark")

    def test_text_of_runs_stays_text(self, browser, report):
        browser.open(report)
        assert browser.run("document.title").startswith("Comparison of ")
        assert self.paths(browser, "script") == 2
        titles = browser.run("[...document.querySelectorAll('h3')].map(h => h.textContent)")
        assert f"Env {HOSTILE}" in titles
        assert f"ppo {HOSTILE}" in browser.run("document.getElementById('legend').textContent")

    def test_hover_shows_values(self, browser, report):
        browser.open(report)
        box = browser.box(".plot")
        assert browser.run("getComputedStyle(document.querySelector('.tip')).visibility") == "hidden"
        browser.mouse(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        tip = browser.run("document.querySelector('.tip').innerText")
        assert re.search(r"step [\d,]+", tip)
        assert "runs" in tip
        assert browser.run("getComputedStyle(document.querySelector('.tip')).visibility") == "visible"
        browser.mouse(1, 1)
        assert browser.run("getComputedStyle(document.querySelector('.tip')).visibility") == "hidden"

    def test_a_touch_shows_values_until_the_next_one_elsewhere(self, browser, report):
        browser.open(report, 390, 844)
        browser.run("document.querySelector('.plot').scrollIntoView({block: 'center', behavior: 'instant'})")
        box = browser.box(".plot")
        browser.touch(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        assert browser.run("getComputedStyle(document.querySelector('.tip')).visibility") == "visible"
        tip = browser.box(".tip")
        assert tip["x"] >= 0
        assert tip["x"] + tip["width"] <= 390
        browser.touch(5, box["y"] - 40)
        assert browser.run("getComputedStyle(document.querySelector('.tip')).visibility") == "hidden"

    def test_keys_move_over_a_curve(self, browser, report):
        browser.open(report)
        browser.run("document.querySelector('.plot svg').focus()")
        seen = set()
        for _ in range(3):
            browser.call("Input.dispatchKeyEvent", type="keyDown", key="ArrowLeft", code="ArrowLeft")
            seen.add(browser.run("document.querySelector('.tip b').textContent"))
        assert len(seen) == 3

    def test_groups_and_runs_can_be_hidden(self, browser, report):
        browser.open(report)
        group = browser.run("data.groups.indexOf('dqn')")
        mean, light = f"path.mean[data-group='{group}']", "#curves path.run"
        before = self.paths(browser, light)
        assert self.paths(browser, f"#curves {mean}") == 1
        box = browser.box(f"#legend [data-group='{group}']")
        browser.mouse(box["x"] + 10, box["y"] + 10, click=True)
        assert self.paths(browser, mean) == 0
        assert self.paths(browser, light) == before - 3
        assert self.paths(browser, f"tr.off[data-group='{group}']") >= 4
        browser.mouse(box["x"] + 10, box["y"] + 10, click=True)
        assert self.paths(browser, light) == before
        browser.run("document.querySelector('input[data-run]').click()")
        assert self.paths(browser, light) == before - 1
        browser.run(f"document.querySelector(`#legend [data-group='{group}']`).dispatchEvent(new Event('dblclick'))")
        assert self.paths(browser, "#curves .mean") == self.paths(browser, f"#curves {mean}") == 1

    def test_axis_and_metric_can_be_chosen(self, browser, report):
        browser.open(report)
        browser.run("document.querySelector('[data-axis=time]').click()")
        assert "minutes of training" in browser.run("document.getElementById('curves').textContent")
        browser.run("metric.value = 'losses/q'; metric.dispatchEvent(new Event('change'))")
        assert self.paths(browser, "#curves .mean") == 1
        assert "nothing to show here" in browser.run("document.getElementById('curves').textContent")
        assert browser.errors == []
