"""Test the curves and bands of plots against known numbers, and the texts of plots."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from registering import forget_registered

from remuda.errors import CheckpointError, UsageError
from remuda.logs import MetricsFile
from remuda.registry import register_scheme
from remuda.runs.directory import RunDirectory
from remuda.runs.plots import EVALUATION, mean_and_band, mean_and_bar, plot_runs, t_quantile


def make_run(path: Path, config: dict[str, Any], rows: list[tuple[int, dict[str, float]]]) -> Path:
    with RunDirectory.create(path, "x", config) as run:
        writer = MetricsFile(run.path)
        for step, metrics in rows:
            writer.write(step, metrics)
        writer.close()
    return path


def learning(seed: int, height: float = 500.0) -> list[tuple[int, dict[str, float]]]:
    generator = np.random.default_rng(seed)
    rows: list[tuple[int, dict[str, float]]] = []
    for step in range(2048 + seed, 200_000, 2048):
        value = height / (1 + math.exp(-(step - 80_000 - 4000 * seed) / 15_000)) + generator.normal(0, 12)
        rows.append((step, {"rollout/ep_rew_mean": value}))
        if step // 2048 % 20 == 0:
            rows.append((step, {"eval/mean_reward": value + 20, "eval/std_reward": 5.0}))
    return rows


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_quantiles_of_t() -> None:
    # The expected values are from tables of Student's t distribution, two-sided 95 %.
    for degrees, expected in ((1, 12.706), (4, 2.776), (10, 2.228), (11, 2.201), (30, 2.042), (1000, 1.962)):
        assert t_quantile(degrees) == pytest.approx(expected, abs=1e-3)


def test_mean_and_band_on_the_common_steps() -> None:
    # The curves are the lines y = 0, y = 10 and y = x / 10, recorded at different steps.
    curves = [
        (np.array([0.0, 100.0]), np.array([0.0, 0.0])),
        (np.array([20.0, 60.0, 90.0]), np.array([10.0, 10.0, 10.0])),
        (np.array([10.0, 120.0]), np.array([1.0, 12.0])),
    ]
    grid, mean, low, high = mean_and_band(curves)
    assert (grid[0], grid[-1]) == (20.0, 90.0)
    np.testing.assert_allclose(mean, (0 + 10 + grid / 10) / 3)
    deviation = np.std([0.0, 10.0, 9.0], ddof=1)
    half_width = 4.3027 * deviation / math.sqrt(3)
    assert (high - mean)[-1] == pytest.approx(half_width, rel=1e-4)
    assert (mean - low)[-1] == pytest.approx(half_width, rel=1e-4)
    grid, mean, low, high = mean_and_band(curves[:2])  # the band of two seeds is the range between them
    assert (low[0], mean[0], high[0]) == (0.0, 5.0, 10.0)


def test_plot_of_several_seeds_and_a_single_run(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / f"ppo-{seed}", {"algo": "ppo", "env": "CartPole-v1", "seed": seed}, learning(seed))
        for seed in range(5)
    ]
    paths.append(make_run(tmp_path / "a2c", {"algo": {"name": "a2c"}, "env": "CartPole-v1"}, learning(9, 350.0)))
    out = plot_runs(paths, tmp_path / "compare.png")
    assert png_size(out) == (880, 528)
    assert 10_000 < out.stat().st_size < 150_000


def drawn(paths: list[Path], tmp_path: Path, **options: Any) -> str:
    """Return the plot as SVG, in which its texts are stored as text."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        return plot_runs(paths, tmp_path / "picture.svg", **options).read_text()


def test_texts_of_the_plot(tmp_path: Path) -> None:
    pong = [make_run(tmp_path / f"p{seed}", {"algo": "ppo", "env": "Pong"}, learning(seed)) for seed in range(2)]
    text = drawn(pong, tmp_path)
    for expected in ("ppo: mean of 2 runs, lowest to highest", "ppo: eval", ">Pong<", "episode return", ">100k<"):
        assert expected in text
    third = make_run(tmp_path / "p2", {"algo": "ppo", "env": "Pong"}, learning(2))
    assert "ppo: mean of 3 runs, 95 % t interval" in drawn([*pong, third], tmp_path)
    other = make_run(tmp_path / "breakout", {"algo": "ppo", "env": "Breakout", "label": "wide"}, learning(1))
    text = drawn([*pong, other], tmp_path, title="Two games")
    for expected in (
        "ppo Pong label=None: mean of 2 runs",
        "ppo Breakout label=wide",
        "Two games",
        "environment steps",
    ):
        assert expected in text
    text = drawn(pong, tmp_path, labels=["first", "second"])
    assert "ppo first" in text
    assert "ppo second" in text
    assert "seeds" not in text


def test_a_run_with_an_empty_config_is_named_by_its_directory(tmp_path: Path) -> None:
    paths = [make_run(tmp_path / name, {}, learning(1)) for name in ("one", "two")]
    text = drawn(paths, tmp_path)
    assert ">one<" in text
    assert ">two<" in text


def test_plot_of_another_metric_with_a_single_point(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"algo": "ppo"}, [(10, {"train/loss": 1.0, "eval/mean_reward": 3.0})])
    text = drawn([run], tmp_path, metric="train/loss")
    assert "train/loss" in text
    assert "eval" not in text
    with pytest.raises(UsageError, match=r"holds no train/los: did you mean train/loss"):
        plot_runs([run], tmp_path / "x.png", metric="train/los")


def test_runs_without_the_metric_and_wrong_paths_are_refused(tmp_path: Path) -> None:
    empty = make_run(tmp_path / "empty", {}, [])
    young = make_run(tmp_path / "young", {}, [(10, {"time/fps": 5.0, "rollout/ep_rew_mean": math.nan})])
    good = make_run(tmp_path / "good", {}, learning(1))
    out = tmp_path / "x.png"
    for paths, sentence in (
        ([], "there is nothing to plot"),
        ([empty], "holds no metrics yet"),
        ([young], "holds no rollout/ep_rew_mean: wait for the first finished episode"),
    ):
        with pytest.raises(UsageError, match=sentence):
            plot_runs(paths, out)
    with pytest.raises(CheckpointError, match="is not a run"):
        plot_runs([tmp_path / "nowhere"], out)
    with pytest.raises(UsageError, match="1 labels do not fit 2 runs"):
        plot_runs([good, good], out, labels=["one"])
    with pytest.raises(UsageError, match=r"cannot be written .* ends in \.png"):
        plot_runs([good], tmp_path / "x.qqq")
    with pytest.raises(UsageError, match="cannot be written"):
        plot_runs([good], tmp_path / "nowhere" / "x.png")
    assert not out.exists()


def test_seeds_without_common_steps_are_refused(tmp_path: Path) -> None:
    config = {"algo": "ppo", "env": "Pong"}
    early = make_run(tmp_path / "a", config, [(10, {"rollout/ep_rew_mean": 1.0}), (20, {"rollout/ep_rew_mean": 1.0})])
    late = make_run(tmp_path / "b", config, [(30, {"rollout/ep_rew_mean": 1.0})])
    with pytest.raises(UsageError, match="the 2 runs of ppo share no steps"):
        plot_runs([early, late], tmp_path / "x.png")


@pytest.mark.parametrize("count", [2, 3])
def test_seeds_with_one_evaluation_each_are_points_with_an_interval(tmp_path: Path, count: int) -> None:
    """The steps of the evaluations differ by less than a rollout. The plot shows points, and the mean's interval."""
    paths = [
        make_run(
            tmp_path / f"{seed}", {"algo": "ppo", "seed": seed}, [(10_000 + 31 * seed, {EVALUATION: 5.0 * seed})]
        )
        for seed in range(count)
    ]
    band = "lowest to highest" if count == 2 else "95 % t interval"
    assert f"ppo: mean of {count} runs, {band}" in drawn(paths, tmp_path, metric=EVALUATION)
    curves = [(np.array([10_000.0 + 31 * seed]), np.array([5.0 * seed])) for seed in range(count)]
    steps, values, mean, low, high = mean_and_bar(curves)
    assert steps.tolist() == [10_000 + 31 * seed for seed in range(count)]
    assert values.tolist() == [5.0 * seed for seed in range(count)]
    if count == 2:
        assert (mean, low, high) == (2.5, 0.0, 5.0)
    else:
        assert mean == 5.0
        assert high - mean == pytest.approx(4.3027 * 5.0 / math.sqrt(3), rel=1e-4)
        assert mean - low == pytest.approx(high - mean)


def test_single_points_must_be_at_about_the_same_step(tmp_path: Path) -> None:
    def run(name: str, step: int) -> Path:
        return make_run(tmp_path / name, {"algo": "ppo"}, [(step, {EVALUATION: 1.0})])

    one, same, later = run("one", 1000), run("same", 1000), run("later", 1200)
    text = drawn([one, same], tmp_path, metric=EVALUATION)
    assert "mean of 2 runs" in text
    assert ">0<" in text, "the axis starts at 0, because a narrow range would magnify small differences"
    with pytest.raises(UsageError, match="the 2 runs of ppo share no steps"):
        plot_runs([one, later], tmp_path / "x.png", metric=EVALUATION)


def test_a_run_without_the_metric_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = make_run(tmp_path / "good", {"algo": "ppo"}, [(10, {"rollout/ep_rew_mean": 1.0})])
    bad = make_run(tmp_path / "bad", {"algo": "ppo"}, [(10, {"train/loss": 1.0})])
    for order in ([good, bad], [bad, good]):
        caplog.clear()
        plot_runs(order, tmp_path / "x.png")
        assert "left out" in caplog.text
        assert "bad holds no rollout/ep_rew_mean" in caplog.text
    with pytest.raises(UsageError, match="bad holds no rollout/ep_rew_mean"):
        plot_runs([bad], tmp_path / "x.png")


def test_a_run_that_is_passed_twice_counts_once(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"algo": "ppo"}, learning(1))
    (tmp_path / "latest").symlink_to("run")
    assert "mean of" not in drawn([run, tmp_path / "latest"], tmp_path)


def test_runs_with_different_options_are_different_curves(tmp_path: Path) -> None:
    def config(rate: str, seed: int) -> dict[str, Any]:
        return {"algo": "ppo", "env": "Pong", "seed": seed, "options": {"algo": {"learning_rate": rate}}}

    paths = [
        make_run(tmp_path / f"{rate}-{seed}", config(rate, seed), learning(seed))
        for rate in ("1e-2", "1e-5")
        for seed in (1, 2)
    ]
    text = drawn(paths, tmp_path)
    assert "ppo algo.learning_rate=1e-2: mean of 2 runs" in text
    assert "ppo algo.learning_rate=1e-5: mean of 2 runs" in text


def test_runs_of_two_algorithms_are_labeled_by_their_names(tmp_path: Path) -> None:
    """Labels omit the options of different algorithms, and sampler.inference, also under its name in version 0.1."""

    def config(algo: str, scheme: str, **options: Any) -> dict[str, Any]:
        return {"algo": algo, "env": "Pong", "scheme": scheme, "options": {"sampler": options}}

    dqn = make_run(tmp_path / "dqn", config("dqn", "serial", act="central", envs=8), learning(1))
    ppo = make_run(tmp_path / "ppo", config("ppo", "parallel", inference="workers", envs=16), learning(2))
    text = drawn([dqn, ppo], tmp_path)
    assert ">dqn<" in text
    assert ">ppo<" in text
    other = make_run(tmp_path / "other", config("dqn", "async", inference="workers", workers=2, envs=8), learning(3))
    text = drawn([dqn, other], tmp_path)
    assert ">dqn scheme=synchronous<" in text
    assert ">dqn scheme=async<" in text


def test_parts_and_ranks_form_groups_by_their_number(tmp_path: Path) -> None:
    """Two ranks learn what two parts do, and not what one process does; config.yaml of version 0.1 has no parts."""

    def config(scheme: str, seed: int, **options: Any) -> dict[str, Any]:
        return {"algo": "ppo", "env": "Pong", "scheme": scheme, "seed": seed, "options": {"scheme": options}}

    runs = {
        "old": config("serial", 1),
        "parallel": config("parallel", 2, parts=1, ranks=0, threads=4),
        "parts": config("serial", 1, parts=2, ranks=0),
        "ranks": config("replicas", 2, parts=1, ranks=2, exchange="gloo"),
    }
    text = drawn([make_run(tmp_path / name, each, learning(1)) for name, each in runs.items()], tmp_path)
    assert ">ppo: mean of 2 runs" in text
    assert ">ppo scheme.parts=2: mean of 2 runs" in text


def test_options_of_asynchronous_schemes_form_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheme of another package may be asynchronous as well; one that is not installed is a group of its own."""
    forget_registered(monkeypatch)
    register_scheme("theirs_async", "remuda.build.schemes:make_asynchronous", "", is_asynchronous=True)

    def config(scheme: str, **options: Any) -> dict[str, Any]:
        return {"algo": "dqn", "env": "Pong", "scheme": scheme, "options": {"scheme": options}}

    runs = [config("theirs_async"), config("theirs_async", throttle=False), config("theirs_async", threads=4)]
    paths = [make_run(tmp_path / str(index), run, learning(index)) for index, run in enumerate(runs)]
    text = drawn(paths, tmp_path)
    assert ">dqn: mean of 2 runs" in text
    assert ">dqn scheme.throttle=False<" in text
    other = make_run(tmp_path / "other", config("missing"), learning(3))
    assert ">dqn scheme=missing<" in drawn([*paths[:1], other], tmp_path)


def test_labels_that_would_be_too_long_use_the_directory(tmp_path: Path) -> None:
    paths = [
        make_run(tmp_path / f"run-{rate}", {"algo": "ppo", "options": {"algo": {"x" * 60: rate}}}, learning(rate))
        for rate in (1, 2)
    ]
    text = drawn(paths, tmp_path)
    assert ">ppo (run-1)<" in text
    assert ">ppo (run-2)<" in text
