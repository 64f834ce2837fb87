"""What is wrong with an env, and how fast it is: the part of `remuda doctor` that looks at one env.

    report = examine(resolve("CartPole-v1"))
    print(report.steps_per_second, *report.problems, sep="\\n")

Never raises for what the env does: whatever goes wrong becomes a sentence of the report.
"""

from __future__ import annotations

import contextlib
import copy
import re
import time
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from gymnasium.utils.env_checker import check_env, data_equivalence

from remuda.data.trees import leaves
from remuda.envs.failures import FAILURES, raised
from remuda.envs.local import LocalEnvs
from remuda.envs.space_values import Forbidden, reader, stored_action
from remuda.envs.spaces import action_space, observation_space
from remuda.envs.spec import EnvSpec
from remuda.errors import EnvSpecError, NoState, RemudaError

CONTRACT_STEPS = 200
SAVED_STEPS = 50
WITH_NEW_EPISODES = "with new episodes"
COLOR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class EnvReport:
    """What `examine` found."""

    label: str
    observation: str = ""
    action: str = ""
    steps_per_second: float = 0.0  # of one env with random actions, resets left out
    reset_seconds: float = 0.0  # mean
    mean_episode_length: float | None = None  # None: no episode ended in the time given
    saw_termination: bool = False
    saw_truncation: bool = False
    is_repeatable: bool | None = None  # the same seed gave the same first observations; None: could not tell
    resume: str = ""  # how a run with this env goes on exactly where it was stopped
    problems: list[str] = field(default_factory=list)


def examine(spec: EnvSpec, seconds: float = 1.0) -> EnvReport:
    """Check one env with Gymnasium's checker, then step it at random for so long."""
    report = EnvReport(spec.label)
    for part in (_look, _check, _keep_contract, _repeat, _save, partial(_measure, seconds=seconds)):
        if not _guarded(report, spec, part):
            break
    return report


def _guarded(report: EnvReport, spec: EnvSpec, part: Any) -> bool:
    """Run a part on an env of its own; False if not even that could be built."""
    try:
        env = spec.build()
    except EnvSpecError as error:
        report.problems.append(str(error))
        return False
    try:
        part(spec, env, report)
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


def _look(spec: EnvSpec, env: Any, report: EnvReport) -> None:
    report.observation, report.action = str(env.observation_space), str(env.action_space)
    observation_space(env.observation_space, spec.label)
    action_space(env.action_space, spec.label)


def _check(spec: EnvSpec, env: Any, report: EnvReport) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_env(env.unwrapped, skip_render_check=True)
        finally:
            for warning in caught:
                text = COLOR.sub("", str(warning.message)).removeprefix("WARN: ").strip()
                # unbounded observations are usual (CartPole's velocities) and no problem to any agent here
                if text and "infinity" not in text and text not in report.problems:
                    report.problems.append(text)


def _keep_contract(spec: EnvSpec, env: Any, report: EnvReport) -> None:
    """Find what training would refuse, warn of or cast: values that are not finite, or not as the spaces say."""

    def note(text: str) -> None:
        problem = f"{spec.label}: {text}"
        if problem not in report.problems:
            report.problems.append(problem)

    read = reader(env.observation_space, observation_space(env.observation_space, spec.label), on_cast=note)
    with contextlib.suppress(Forbidden):  # refused below, with seed and step
        read(env.reset(seed=0)[0])
        read(env.step(env.action_space.sample())[0])
    with LocalEnvs(spec, 1, max_restarts=0, tell=lambda notice: report.problems.append(notice.text)) as envs:
        envs.reset(seed=0)
        for _ in range(CONTRACT_STEPS):
            slot, _step = envs.recv()
            envs.send(slot, stored_action(envs.action, env.action_space.sample()))


def _save(spec: EnvSpec, env: Any, report: EnvReport) -> None:
    """Whether its state can be saved, and a new env goes on from there as this one does."""
    env.action_space.seed(0)
    quiet = partial(LocalEnvs, spec, 1, max_restarts=0, tell=lambda _: None)  # _keep_contract reports these warnings
    with quiet() as envs, quiet() as others:
        envs.reset(seed=0)
        envs.recv()
        draws = [stored_action(envs.action, env.action_space.sample()) for _ in range(2 * SAVED_STEPS)]
        for action in draws[:SAVED_STEPS]:
            _answer(envs, action)
        try:
            others.set_state(envs.get_state())
        except NoState as error:
            report.resume = f"{WITH_NEW_EPISODES}, because its state cannot be saved ({error})"
            return
        report.resume = "exactly, its state is saved"
        if any(_answer(envs, action) != _answer(others, action) for action in draws[SAVED_STEPS:]):
            report.problems.append(
                f"{spec.label}: a new env that was given its state went on differently: "
                "let get_state() return all that changes."
            )


def _answer(envs: LocalEnvs, action: Any) -> list[bytes]:
    envs.send(0, action)
    return [np.asarray(leaf).tobytes() for _, leaf in leaves(envs.recv()[1])]


def _repeat(spec: EnvSpec, env: Any, report: EnvReport) -> None:
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(5)]
    first, second = _observations(env, actions), _observations(env, actions)
    report.is_repeatable = len(first) == len(second) and all(
        map(partial(data_equivalence, exact=True), first, second)
    )
    if not report.is_repeatable:
        report.problems.append(f"{spec.label}: two resets with the same seed led to different observations.")


def _observations(env: Any, actions: list[Any]) -> list[Any]:
    seen = [copy.deepcopy(env.reset(seed=7)[0])]
    for action in actions:
        obs, _, terminated, truncated, _ = env.step(copy.deepcopy(action))  # an env may change what it is given
        seen.append(copy.deepcopy(obs))
        if terminated or truncated:
            break
    return seen


def _measure(spec: EnvSpec, env: Any, report: EnvReport, seconds: float) -> None:
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
