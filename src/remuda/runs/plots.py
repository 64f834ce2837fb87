"""Curves of runs, with a band where several seeds ran the same thing.

    plot_runs(["runs/ppo-1", "runs/ppo-2", "runs/ppo-3", "runs/a2c-1"], Path("compare.png"))

Runs of one algorithm, env and label are seeds of one group. Their curves are interpolated on the steps that all of
them cover. The band is the 95 % t interval of the mean, wide for few seeds because few seeds say little; of two
seeds it is what lies between them. The legend says which.

Runs that were only evaluated at their end have one point each, after numbers of steps that differ a little, since a
run ends with a whole rollout. Where curves cover no common stretch but end within 10 % of each other's steps, the
last point of each is drawn, and their mean with its interval at the mean of their steps. Nothing is interpolated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remuda.errors import UsageError, nearest
from remuda.logs.writers import STEP, read_metrics
from remuda.runs.directory import RunDirectory, follow_links

NOT_LEARNING = ("eval", "checkpoint", "log", "scheme")  # groups of options that change nothing of what is learned
WHO_SAMPLES = ("sampler.inference", "sampler.workers", "sampler.slots")
LONGEST_NAME = 70  # letters, of which a legend has room for about as many
RETURN = "rollout/ep_rew_mean"
EVALUATION = "eval/mean_reward"
NAMES = {RETURN: "episode return", "rollout/ep_len_mean": "episode length", "time/fps": "steps per second"}
COLORS = ("#1f5fa8", "#d1603d", "#2e8b57", "#8a56a8", "#b8860b", "#c2458f", "#4aa3b5", "#5f6b76")
GRID_POINTS = 200
NEAR = 0.1  # share of the steps by which the last points of runs may differ and still be compared
SEEDS_FOR_INTERVAL = 3  # the interval of two is nine deviations to either side, and hides everything else
# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom.
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)

Array = NDArray[np.float64]
Curve = tuple[Array, Array]  # steps and values


def t_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = 1.959964  # beyond the table, Fisher's expansion is right to three decimals (Abramowitz & Stegun 26.7.5)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def mean_and_band(curves: Sequence[Curve]) -> tuple[Array, Array, Array, Array]:
    """Steps that every curve covers; there the mean, and the lower and upper edge of the band."""
    first = max(steps[0] for steps, _ in curves)
    last = min(steps[-1] for steps, _ in curves)
    if first > last:
        raise ValueError("no step is covered by every curve")
    grid = np.linspace(first, last, GRID_POINTS)
    values = np.stack([np.interp(grid, steps, values) for steps, values in curves])
    mean, count = values.mean(axis=0), len(curves)
    if count < SEEDS_FOR_INTERVAL:
        return grid, mean, values.min(axis=0), values.max(axis=0)
    half_width = t_quantile(count - 1) * values.std(axis=0, ddof=1) / np.sqrt(count)
    return grid, mean, mean - half_width, mean + half_width


def mean_and_bar(curves: Sequence[Curve]) -> tuple[Array, Array, float, float, float]:
    """Steps and values of the last points of curves that end together; their mean, and the edges of its interval."""
    steps, values = (np.array([curve[part][-1] for curve in curves]) for part in (0, 1))
    if steps.max() - steps.min() > NEAR * steps.max():
        raise ValueError("the curves end after different numbers of steps")
    _, mean, low, high = mean_and_band([(np.zeros(1), value[None]) for value in values])
    return steps, values, mean[0], low[0], high[0]


def distinct(paths: Sequence[Path | str]) -> list[Path | str]:
    """The runs that these paths name, each once: runs/* names the newest a second time, as runs/latest."""
    return list({follow_links(Path(path)).resolve(): path for path in paths}.values())


def plot_runs(
    paths: Sequence[Path | str],
    out: Path,
    metric: str = RETURN,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Draw `metric` of the runs at `paths` into `out`; `labels`, one per path, tell apart what configs do not."""
    if not paths:
        raise UsageError("there is nothing to plot: name one or more run directories.")
    if labels is not None and len(labels) != len(paths):
        raise UsageError(f"{len(labels)} labels do not fit {len(paths)} runs: give one for each run.")
    if labels is None:
        paths = distinct(paths)
    runs, rows, curves, names = [], [], [], []
    for index, path in enumerate(paths):
        run = RunDirectory.open(path)
        table = read_metrics(run.path)
        try:
            curves.append(_curve(run.path, table, metric))
        except UsageError as error:
            if index == len(paths) - 1 and not curves:
                raise  # nothing is left to draw
            logging.getLogger("remuda").warning("left out: %s", error)
            continue
        runs.append(run)
        rows.append(table)
        names.append(labels[index] if labels is not None else "")
    groups, shared_env = _group(runs, names if labels is not None else None)
    drawn = {name: [curves[member] for member in members] for name, members in groups.items()}
    points = {}
    if metric == RETURN:
        points = {name: _evaluations([rows[member] for member in members]) for name, members in groups.items()}
    return plot_curves(drawn, out, metric, title if title is not None else shared_env, points)


def plot_curves(
    groups: Mapping[str, Sequence[Curve]],
    out: Path,
    metric: str = RETURN,
    title: str = "",
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Path:
    """Draw the curves of each group, with the mean and band of several, and beside them its points, into `out`."""
    from matplotlib.figure import Figure  # 0.8 s to import, so only here; without pyplot there is no global state

    figure = Figure(figsize=(8.0, 4.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for index, (name, curves) in enumerate(groups.items()):
        color = COLORS[index % len(COLORS)]
        _draw_group(axes, name, curves, color)
        if points and points.get(name):
            _draw_evaluations(axes, name, points[name], color)
    _decorate(axes, metric, title)
    try:
        figure.savefig(out)
    except ValueError as error:
        raise UsageError(f"out={out} cannot be drawn ({error}): use a name that ends in .png.") from None
    except OSError as error:
        raise UsageError(f"out={out} cannot be written ({error.strerror}): choose another place.") from None
    return out


def _curve(path: Path, rows: Sequence[Mapping[str, float | None]], metric: str) -> Curve:
    points = {row[STEP]: row[metric] for row in rows if row.get(metric) is not None}  # the last of equal steps
    if not points:
        known = sorted({key for row in rows for key, value in row.items() if value is not None} - {STEP})
        if not known:
            raise UsageError(f"{path} holds no metrics yet: wait for the run's first log line.")
        remedy = "wait for the first finished episode." if metric == RETURN else nearest(metric, known)
        raise UsageError(f"{path} holds no {metric}: {remedy}")
    steps = np.array(sorted(step for step in points if step is not None), np.float64)
    return steps, np.array([points[step] for step in steps], np.float64)


def _group(runs: Sequence[RunDirectory], labels: Sequence[str] | None) -> tuple[dict[str, list[int]], str]:
    """Which runs belong together by what name, and the env if it is the same for all.

    Runs that differ only in their seed, or in how they were watched, are one group; the name of a group says in what
    it differs from others of its algorithm.
    """
    settings = [_settings(run.read_config()) for run in runs]
    told = _differences(settings)
    envs = {each.get("env", "") for each in settings}
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, (run, each) in enumerate(zip(runs, settings, strict=True)):
        differences = [f"{key}={each.get(key)}" for key in told] if labels is None else [labels[index]]
        env = each.get("env", "") if len(envs) > 1 else ""
        parts = (each.get("algo") or run.path.resolve().name, env, *differences)
        groups.setdefault(tuple(part for part in parts if part), []).append(index)
    named: dict[str, list[int]] = {}
    for parts, members in groups.items():
        name = " ".join(parts)
        if len(name) > LONGEST_NAME:  # its directory says more than a line that nobody reads to its end
            name = f"{parts[0]} ({runs[members[0]].path.resolve().name})"
        named.setdefault(name, []).extend(members)
    return named, envs.pop() if len(envs) == 1 else ""


def _differences(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """In what runs of one algorithm differ: between two algorithms, nearly everything does."""
    found = set()
    for algo in {each.get("algo") for each in settings}:
        alike = [each for each in settings if each.get("algo") == algo]
        keys = {key for each in alike for key in each} - {"algo", "env"}
        found |= {key for key in keys if len({each.get(key) for each in alike}) > 1}
    return sorted(found)


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """What makes a run what it is, flat; options by their names on the command line. Synchronous schemes give the
    same curve, whoever samples."""
    flat = {str(key): str(value) for key, value in config.items() if key not in ("seed", "scheme", "options")}
    if "scheme" in config:
        flat["scheme"] = "async" if config["scheme"] == "async" else "synchronous"
    for group, values in (config.get("options") or {}).items():
        if group not in NOT_LEARNING:
            flat |= {f"{group}.{name}": str(value) for name, value in values.items()}
    return {key: value for key, value in flat.items() if key not in WHO_SAMPLES}


def _draw_group(axes: Any, name: str, curves: Sequence[Curve], color: str) -> None:
    if len(curves) == 1:
        steps, values = curves[0]
        axes.plot(steps, values, color=color, linewidth=1.8, label=name, marker="o" if len(steps) == 1 else None)
        return
    band = "95 % t interval" if len(curves) >= SEEDS_FOR_INTERVAL else "lowest to highest"
    label = f"{name}: mean of {len(curves)} runs, {band}"
    if max(steps[0] for steps, _ in curves) >= min(steps[-1] for steps, _ in curves):
        _draw_last_points(axes, name, curves, color, label)
        return
    grid, mean, low, high = mean_and_band(curves)
    for steps, values in curves:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.35)
    axes.plot(grid, mean, color=color, linewidth=2.0, label=label)
    axes.fill_between(grid, low, high, color=color, alpha=0.18, linewidth=0)


def _draw_last_points(axes: Any, name: str, curves: Sequence[Curve], color: str, label: str) -> None:
    try:
        steps, values, mean, low, high = mean_and_bar(curves)
    except ValueError:
        raise UsageError(
            f"the {len(curves)} runs of {name} share no steps: wait until they overlap, or plot them one by one."
        ) from None
    axes.plot(steps, values, "o", color=color, markersize=5, alpha=0.35)
    axes.errorbar(
        steps.mean(),
        mean,
        [[mean - low], [high - mean]],
        color=color,
        fmt="o",
        markersize=7,
        linewidth=2,
        label=label,
    )


def _evaluations(tables: Sequence[Sequence[Mapping[str, float | None]]]) -> list[tuple[float, float]]:
    rows = [(row[STEP], row.get(EVALUATION)) for table in tables for row in table]
    return [(steps, value) for steps, value in rows if steps is not None and value is not None]


def _draw_evaluations(axes: Any, name: str, points: Sequence[tuple[float, float]], color: str) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, "o", markersize=5, markerfacecolor="white", markeredgecolor=color, label=f"{name}: eval")


def _limit(axes: Any) -> None:
    """Show every curve whole, and of bands what lies near: that of three seeds may be far higher than they are.

    The axis of points at the end of runs starts at 0; otherwise it would magnify how little their steps differ.
    """
    first, last = axes.dataLim.intervalx
    if last - first < NEAR * last:
        axes.set_xlim(0.0, 1.1 * last)
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()])
    low, high = values.min(), values.max()
    span = (high - low) or abs(high) or 1.0
    bottom = max(axes.dataLim.ymin, low - 0.3 * span)
    top = min(axes.dataLim.ymax, high + 0.3 * span)
    axes.set_ylim(bottom - 0.05 * span, top + 0.05 * span)


def _decorate(axes: Any, metric: str, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("environment steps")
    axes.set_ylabel(NAMES.get(metric, metric))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if title:
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axes.grid(True, color="#d8dde2", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#8a939c")
    axes.tick_params(colors="#4a525a")
    axes.margins(x=0.01)
    _limit(axes)
    axes.legend(frameon=False, fontsize=9)
