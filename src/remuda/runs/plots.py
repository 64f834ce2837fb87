"""Learning curves of runs, with a confidence band over seeds.

    plot_runs(["runs/ppo-1", "runs/ppo-2", "runs/ppo-3", "runs/a2c-1"], Path("compare.png"))

Runs of the same algorithm and env form one group if they differ only in their seed, or in options that do not change
what is learned. If labels are given, runs of the same algorithm and env form one group if they have the same label.
The curves of a group are interpolated on the steps that all of them cover. The band is the 95 % t interval of the
mean, which is wide for few seeds; for two seeds, the band is the area between the two curves. The legend says which
kind of band is shown.

Runs that were evaluated only at their end have one point each, at slightly different numbers of steps, because a run
ends with a whole rollout. If the curves of a group share no steps, but their last steps differ by at most 10 %, the
plot shows the last point of each curve, and the mean of these points with its interval.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from remuda.config.run_options import SchemeOptions
from remuda.errors import ConfigError, UsageError, nearest
from remuda.logs.writers import STEP, read_metrics
from remuda.registry import find_scheme
from remuda.runs.directory import RunDirectory
from remuda.runs.latest import follow_links

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IRRELEVANT_GROUPS = ("eval", "checkpoint", "log")  # groups of options that do not change what is learned
ASYNCHRONOUS_OPTIONS = ("max_lag", "publish_every", "throttle")  # options of the group scheme that count under async
# Options of other groups that do not change what is learned. In version 0.1, sampler.inference was sampler.act.
IRRELEVANT_OPTIONS = ("sampler.inference", "sampler.act", "sampler.workers", "sampler.slots")
MAX_NAME_LENGTH = 70  # number of characters that fit into a line of the legend
RETURN = "rollout/ep_rew_mean"
EVALUATION = "eval/mean_reward"
AXIS_LABELS = {RETURN: "episode return", "rollout/ep_len_mean": "episode length", "time/fps": "steps per second"}
COLORS = ("#1f5fa8", "#d1603d", "#2e8b57", "#8a56a8", "#b8860b", "#c2458f", "#4aa3b5", "#5f6b76")
GRID_POINTS = 200
END_TOLERANCE = 0.1  # the last points of curves are averaged only if their steps differ by at most this fraction
# Minimum number of seeds for a t interval. With two seeds, the interval would extend nine standard deviations to
# either side and hide the curves.
SEEDS_FOR_INTERVAL = 3
# Two-sided 95 % quantiles of Student's t for 1 to 10 degrees of freedom.
T_95 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)

Array = NDArray[np.float64]
Curve = tuple[Array, Array]  # steps and values


def t_quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution with `degrees` degrees of freedom."""
    if degrees <= len(T_95):
        return T_95[degrees - 1]
    z = 1.959964  # two-sided 95 % quantile of the normal distribution
    # For more than 10 degrees of freedom, this expansion (Abramowitz & Stegun 26.7.5) is accurate to three decimals.
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


def mean_and_band(curves: Sequence[Curve]) -> tuple[Array, Array, Array, Array]:
    """Return a grid of the steps that every curve covers, and on this grid the mean and both edges of the band.

    Raise ValueError if there is no such step.
    """
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
    """Return steps and values of the curves' last points, the mean value, and both ends of the mean's interval.

    Raise ValueError if the steps of the last points differ by more than END_TOLERANCE.
    """
    steps, values = (np.array([curve[part][-1] for curve in curves]) for part in (0, 1))
    if steps.max() - steps.min() > END_TOLERANCE * steps.max():
        raise ValueError("the curves end after different numbers of steps")
    _, mean, low, high = mean_and_band([(np.zeros(1), value[None]) for value in values])
    return steps, values, mean[0], low[0], high[0]


def distinct(paths: Sequence[Path | str]) -> list[Path | str]:
    """Return one path per run. The pattern runs/* names the newest run twice, because runs/latest links to it."""
    return list({follow_links(Path(path)).resolve(): path for path in paths}.values())


def plot_runs(
    paths: Sequence[Path | str],
    out: Path,
    metric: str = RETURN,
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Path:
    """Plot `metric` of the runs at `paths` to the file `out`, and return `out`.

    If `labels` (one for each path) are given, they group the runs, and appear in the names of the groups instead of
    the options in which runs differ. The default `title` is the env, if it is the same for all runs. A run without
    the metric is left out with a warning; UsageError is raised if no run has it.
    """
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
                raise  # no curve is left to plot
            logging.getLogger("remuda").warning("left out: %s", error)
            continue
        runs.append(run)
        rows.append(table)
        names.append(labels[index] if labels is not None else "")
    groups, shared_env = _group(runs, names if labels is not None else None)
    grouped = {name: [curves[index] for index in indices] for name, indices in groups.items()}
    points = {}
    if metric == RETURN:
        points = {name: _evaluations([rows[index] for index in indices]) for name, indices in groups.items()}
    return plot_curves(grouped, out, metric, title if title is not None else shared_env, points)


def plot_curves(
    groups: Mapping[str, Sequence[Curve]],
    out: Path,
    metric: str = RETURN,
    title: str = "",
    points: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> Path:
    """Plot groups of curves to `out`: the mean and band of each group, and the group's `points` as circles."""
    from matplotlib.figure import Figure  # imported here, because that takes 0.8 s; pyplot would keep global state

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
        raise UsageError(f"out={out} cannot be written ({error}): use a name that ends in .png.") from None
    except OSError as error:
        raise UsageError(f"out={out} cannot be written ({error.strerror}): choose another place.") from None
    return out


def _curve(path: Path, rows: Sequence[Mapping[str, float | None]], metric: str) -> Curve:
    """Return the steps and values of a metric; if several rows have the same step, the last row is used."""
    points = {row[STEP]: row[metric] for row in rows if row.get(metric) is not None}
    if not points:
        known = sorted({key for row in rows for key, value in row.items() if value is not None} - {STEP})
        if not known:
            raise UsageError(f"{path} holds no metrics yet: wait for the run's first log line.")
        remedy = "wait for the first finished episode." if metric == RETURN else nearest(metric, known)
        raise UsageError(f"{path} holds no {metric}: {remedy}")
    steps = np.array(sorted(step for step in points if step is not None), np.float64)
    return steps, np.array([points[step] for step in steps], np.float64)


def _group(runs: Sequence[RunDirectory], labels: Sequence[str] | None) -> tuple[dict[str, list[int]], str]:
    """Return the indices of the runs in each group, by the group's name, and the env of all runs ("" if envs differ).

    The module's docstring says which runs form a group. The name of a group contains the group's label if there are
    `labels`, and otherwise the options in which runs of the group's algorithm differ.
    """
    settings = [_settings(run.read_config()) for run in runs]
    differing = _differences(settings)
    envs = {each.get("env", "") for each in settings}
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, (run, each) in enumerate(zip(runs, settings, strict=True)):
        # A scheme option that a run lacks has its default or no effect there (see `_scheme_settings`).
        own = [key for key in differing if key in each or not key.startswith("scheme.")]
        differences = [f"{key}={each.get(key)}" for key in own] if labels is None else [labels[index]]
        env = each.get("env", "") if len(envs) > 1 else ""
        parts = (each.get("algo") or run.path.resolve().name, env, *differences)
        groups.setdefault(tuple(part for part in parts if part), []).append(index)
    named: dict[str, list[int]] = {}
    for parts, indices in groups.items():
        name = " ".join(parts)
        if len(name) > MAX_NAME_LENGTH:  # the directory identifies the group better than a very long line
            name = f"{parts[0]} ({runs[indices[0]].path.resolve().name})"
        named.setdefault(name, []).extend(indices)
    return named, envs.pop() if len(envs) == 1 else ""


def _differences(settings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the options in which runs of the same algorithm differ.

    Runs of different algorithms are not compared, because they differ in nearly all options.
    """
    found = set()
    for algo in {each.get("algo") for each in settings}:
        alike = [each for each in settings if each.get("algo") == algo]
        keys = {key for each in alike for key in each} - {"algo", "env"}
        found |= {key for key in keys if len({each.get(key) for each in alike}) > 1}
    return sorted(found)


def _settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that determine a run's curve, as one flat dict, with names as on the command line.

    Synchronous schemes are not distinguished, because they give the same curve if the run has as many parts or ranks.
    """
    flat = {str(key): str(value) for key, value in config.items() if key not in ("seed", "scheme", "options")}
    groups = config.get("options") or {}
    if "scheme" in config:
        flat |= _scheme_settings(str(config["scheme"]), groups.get("scheme") or {})
    for group, values in groups.items():
        if group not in (*IRRELEVANT_GROUPS, "scheme"):
            flat |= {f"{group}.{name}": str(value) for name, value in values.items()}
    return {key: value for key, value in flat.items() if key not in IRRELEVANT_OPTIONS}


def _scheme_settings(name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of a scheme, and those of its options that change what is learned and are not the default."""
    try:
        is_asynchronous = find_scheme(name).is_asynchronous
    except ConfigError:  # the package that registers this scheme is not installed
        return {"scheme": name}
    default = vars(SchemeOptions())
    options = {**default, **options}  # runs of earlier versions lack some options
    if not is_asynchronous:
        parts = options["parts"] * max(1, options["ranks"])
        return {"scheme": "synchronous", **({"scheme.parts": str(parts)} if parts > 1 else {})}
    changed = {each: options[each] for each in ASYNCHRONOUS_OPTIONS if options[each] != default[each]}
    return {"scheme": name, **{f"scheme.{each}": str(value) for each, value in changed.items()}}


def _draw_group(axes: Axes, name: str, curves: Sequence[Curve], color: str) -> None:
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


def _draw_last_points(axes: Axes, name: str, curves: Sequence[Curve], color: str, label: str) -> None:
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


def _draw_evaluations(axes: Axes, name: str, points: Sequence[tuple[float, float]], color: str) -> None:
    steps, values = zip(*points, strict=True)
    axes.plot(steps, values, "o", markersize=5, markerfacecolor="white", markeredgecolor=color, label=f"{name}: eval")


def _limit(axes: Axes) -> None:
    """Limit the axes to the curves and the part of the bands that is near the curves.

    The bands of three seeds may be far wider than the curves. If the plot shows only the last points of runs, the
    step axis starts at 0, because magnifying the small differences between their steps would mislead.
    """
    first, last = axes.dataLim.intervalx
    if last - first < END_TOLERANCE * last:
        axes.set_xlim(0.0, 1.1 * last)
    values = np.concatenate([np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()])
    low, high = values.min(), values.max()
    span = (high - low) or abs(high) or 1.0
    bottom = max(axes.dataLim.ymin, low - 0.3 * span)
    top = min(axes.dataLim.ymax, high + 0.3 * span)
    axes.set_ylim(bottom - 0.05 * span, top + 0.05 * span)


def _decorate(axes: Axes, metric: str, title: str) -> None:
    from matplotlib.ticker import EngFormatter

    axes.set_xlabel("environment steps")
    axes.set_ylabel(AXIS_LABELS.get(metric, metric))
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
