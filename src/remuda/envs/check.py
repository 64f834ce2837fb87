"""Find problems of an env and measure its speed, for `remuda doctor`.

    report = examine(resolve("CartPole-v1"))
    print(report.steps_per_second, *report.problems, sep="\\n")

Exceptions of the env are caught; each problem becomes one sentence of the report.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env, data_equivalence

from remuda.core import Actions
from remuda.data.trees import leaves
from remuda.envs.action_values import stored_action
from remuda.envs.failures import FAILURES, raised
from remuda.envs.local import LocalEnvs
from remuda.envs.observation_values import Forbidden, reader
from remuda.envs.spaces import action_space, observation_space
from remuda.envs.spec import EnvSpec
from remuda.errors import EnvSpecError, NoState, RemudaError

CONTRACT_STEPS = 200
SAVED_STEPS = 50
WITH_NEW_EPISODES = "with new episodes"
COLOR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class EnvReport:
    """Properties, speed and problems of one env."""

    label: str
    observation: str = ""
    action: str = ""
    steps_per_second: float = 0.0  # speed of one env with random actions, not counting resets
    reset_seconds: float = 0.0  # mean duration of a reset
    mean_episode_length: float | None = None  # None if no episode ended in the given time
    saw_termination: bool = False
    saw_truncation: bool = False
    is_repeatable: bool | None = None  # whether the same seed gave the same observations; None if it is unknown
    resume: str = ""  # how a stopped run with this env is resumed: exactly, or with new episodes
    problems: list[str] = field(default_factory=list)


def examine(spec: EnvSpec, seconds: float = 1.0) -> EnvReport:
    """Run all checks on one env, including Gymnasium's own, then step the env with random actions for `seconds`."""
    report = EnvReport(spec.label)
    for check in (
        _check_spaces,
        _check_with_gymnasium,
        _check_contract,
        _check_repeatable,
        _check_saving,
        partial(_measure, seconds=seconds),
    ):
        if not _guarded(report, spec, check):
            break
    return report


def _guarded(report: EnvReport, spec: EnvSpec, check: Callable[[EnvSpec, gymnasium.Env, EnvReport], None]) -> bool:
    """Run a check on a new env and add any exception to the report; return False if the env cannot be built."""
    try:
        env = spec.build()
    except EnvSpecError as error:
        report.problems.append(str(error))
        return False
    try:
        check(spec, env, report)
    except FAILURES as error:
        text = str(error) if isinstance(error, RemudaError) else f"{spec.label}: {raised(error)}."
        if text not in report.problems:
            report.problems.append(text)
    finally:
        try:
            env.close()
        except FAILURES as error:
            report.problems.append(f"{spec.label}: close() raised {raised(error)}.")
    return True


def _check_spaces(spec: EnvSpec, env: gymnasium.Env, report: EnvReport) -> None:
    report.observation, report.action = str(env.observation_space), str(env.action_space)
    observation_space(env.observation_space, spec.label)
    action_space(env.action_space, spec.label)


def _check_with_gymnasium(spec: EnvSpec, env: gymnasium.Env, report: EnvReport) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True)
        finally:
            for warning in caught:
                text = COLOR.sub("", str(warning.message)).removeprefix("WARN: ").strip()
                # Warnings about infinite bounds are left out, because unbounded observations are common (CartPole's
                # velocities) and every agent accepts them.
                if text and "infinity" not in text and text not in report.problems:
                    report.problems.append(text)


def _check_contract(spec: EnvSpec, env: gymnasium.Env, report: EnvReport) -> None:
    """Report values that are not finite or contradict their space.

    Training would refuse such values, cast them or warn about them.
    """

    def add_problem(text: str) -> None:
        problem = f"{spec.label}: {text}"
        if problem not in report.problems:
            report.problems.append(problem)

    read = reader(env.observation_space, observation_space(env.observation_space, spec.label), on_cast=add_problem)
    with contextlib.suppress(Forbidden):  # `LocalEnvs` below raises a better error, with seed and step
        read(env.reset(seed=0)[0])
        read(env.step(env.action_space.sample())[0])
    with LocalEnvs(spec, 1, max_restarts=0, on_notice=lambda notice: report.problems.append(notice.text)) as envs:
        envs.reset(seed=0)
        for _ in range(CONTRACT_STEPS):
            slot, _step = envs.recv()
            envs.send(slot, stored_action(envs.action, env.action_space.sample()))


def _check_saving(spec: EnvSpec, env: gymnasium.Env, report: EnvReport) -> None:
    """Check whether an env's state can be saved, and whether a new env continues from that state in the same way."""
    env.action_space.seed(0)
    # Warnings about the env are dropped here, because _check_contract has reported them.
    quiet = partial(LocalEnvs, spec, 1, max_restarts=0, on_notice=lambda _: None)
    with quiet() as envs, quiet() as others:
        envs.reset(seed=0)
        envs.recv()
        actions = [stored_action(envs.action, env.action_space.sample()) for _ in range(2 * SAVED_STEPS)]
        for action in actions[:SAVED_STEPS]:
            _step(envs, action)
        try:
            others.set_state(envs.get_state())
        except NoState as error:
            report.resume = f"{WITH_NEW_EPISODES}, because its state cannot be saved ({error})"
            return
        report.resume = "exactly, its state is saved"
        if any(_step(envs, action) != _step(others, action) for action in actions[SAVED_STEPS:]):
            report.problems.append(
                f"{spec.label}: a new env that was given its state continued differently: "
                "let get_state() return all that changes."
            )


def _step(envs: LocalEnvs, action: Actions) -> list[bytes]:
    """Step the only env of `envs`; return the bytes of every array of the resulting `Step`."""
    envs.send(0, action)
    return [np.asarray(leaf).tobytes() for _, leaf in leaves(envs.recv()[1])]


def _check_repeatable(spec: EnvSpec, env: gymnasium.Env, report: EnvReport) -> None:
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(5)]
    first, second = _observations(env, actions), _observations(env, actions)
    report.is_repeatable = len(first) == len(second) and all(
        map(partial(data_equivalence, exact=True), first, second)
    )
    if not report.is_repeatable:
        report.problems.append(f"{spec.label}: two resets with the same seed led to different observations.")


def _observations(env: gymnasium.Env, actions: Sequence[object]) -> list[object]:
    seen = [copy.deepcopy(env.reset(seed=7)[0])]
    for action in actions:
        obs, _, terminated, truncated, _ = env.step(copy.deepcopy(action))  # the env may modify this copy
        seen.append(copy.deepcopy(obs))
        if terminated or truncated:
            break
    return seen


def _measure(spec: EnvSpec, env: gymnasium.Env, report: EnvReport, seconds: float) -> None:
    end = time.perf_counter() + seconds
    lengths, resetting, stepping, steps, resets = [], 0.0, 0.0, 0, 0
    while time.perf_counter() < end:
        start = time.perf_counter()
        env.reset(seed=None if resets else 0)
        begun = time.perf_counter()
        resetting, resets, length = resetting + begun - start, resets + 1, 0
        is_over = False
        while not is_over and time.perf_counter() < end:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            length += 1
            is_over = bool(terminated or truncated)
            report.saw_termination |= bool(terminated)
            report.saw_truncation |= bool(truncated)
        steps, stepping = steps + length, stepping + time.perf_counter() - begun
        if is_over:
            lengths.append(length)
    report.steps_per_second = steps / stepping if stepping else 0.0
    report.reset_seconds = resetting / resets if resets else 0.0
    report.mean_episode_length = float(np.mean(lengths)) if lengths else None
