"""A process that evaluates while training goes on: greedy episodes of the newest weights, again and again.

    evaluator = EvaluatorProcess(config, spec, weights, version, steps, run / "videos" / "newest.mp4")
    while training:
        for found in evaluator.look(learner.version, steps):     # what was played since, and of which weights
            ...
    evaluator.close()

It takes `eval.cpu_fraction` of a core: however long an evaluation took, it rests so much longer before the next. If
it fails for good, training goes on without it.
"""

from __future__ import annotations

import logging
import os
import select
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remuda.agents import NetFactory
from remuda.build.algorithm import make_algorithm
from remuda.build.envs import agent_view, describe_net, find_net
from remuda.config.run_config import RunConfig, from_dict, to_dict
from remuda.envs import EnvSpec, probe
from remuda.errors import Interrupted, RemudaError
from remuda.learning.weights import FileWeights, SharedWeights, join_weights
from remuda.processes import worker_main as serving
from remuda.processes.links import Link
from remuda.processes.notices import Reporter, collect_warnings
from remuda.processes.worker_pool import WorkerPool
from remuda.runs.evaluation import eval_episodes, eval_seed, play_episodes
from remuda.runs.policy import Policy
from remuda.runs.video import Film, draw_without_screen, play

logger = logging.getLogger("remuda.recipes")

LOOK_SECONDS = 0.2  # how often a resting evaluator looks for orders
BEAT_SECONDS = 1.0  # how often it says that it lives


class EvaluatorProcess:
    """The learner's side; looks at the process whenever it is asked, and never waits for it.

    But if somebody kills its fork server, the learner waits for the seconds in which another one loads torch.
    """

    def __init__(
        self,
        config: RunConfig,
        spec: EnvSpec,
        weights: SharedWeights | FileWeights,
        version: int = 0,
        steps: int = 0,
        video: Path | None = None,
        should_stop: Callable[[], bool] | None = None,
        net: NetFactory | None = None,
    ) -> None:
        """`version` is that of the weights as they are, and `steps` what they have seen; asked while it is built."""
        order = {
            "config": to_dict(config),
            "spec": spec.to_json(),
            "net": describe_net(config, net),
            "video": None if video is None else str(video.resolve()),
        }
        self._weights = weights
        self._versions, self._steps = [version], [steps]  # that were published, and the steps done by then
        self._was_useful, self._is_open, self._looked = False, True, time.monotonic()
        self._reporter = Reporter(logger)
        options = config.envs
        self._patience = max(options.step_timeout, options.build_timeout)
        self._worker_pool = WorkerPool(
            __name__, [order], options.build_timeout, options.max_worker_restarts, should_stop
        )
        try:
            self._worker_pool.start()
            self._worker_pool.should_stop = None  # from here on it is only looked at
        except BaseException:
            self._worker_pool.close()
            raise
        self._introduce()

    def look(self, version: int, steps: int) -> list[dict[str, Any]]:
        """Evaluations that came in since, with the `steps` that were done when their weights were published."""
        if not self._is_open:
            return []
        if version > self._versions[-1]:
            self._versions.append(version)
            self._steps.append(steps)
        found = []
        (member,) = self._worker_pool.members
        try:
            # A crew's clock counts the time for which it listens, so that nobody is blamed for a learner that rests.
            now = time.monotonic()
            self._worker_pool.clock += min(now - self._looked, LOOK_SECONDS)
            self._looked = now
            self._worker_pool.listen(0.0)
            self._worker_pool.expect(member, self._patience, "while it evaluated")
            if member.lost is not None:
                self._worker_pool.relaunch(member, self._was_useful)
                self._was_useful = False
            elif member.take("built") is not None:
                self._introduce()
            while (answer := member.take("notices")) is not None:
                self._reporter.report(answer["notices"])
            while (answer := member.take("unfilmed")) is not None:
                logger.warning("evaluations are no longer filmed: %s", answer["unfilmed"])
            while (answer := member.take("evaluated")) is not None:
                self._was_useful = True
                place = max(0, bisect_right(self._versions, answer["version"]) - 1)
                found.append({**answer["evaluated"], "steps": self._steps[place]})
                del self._versions[:place], self._steps[:place]  # what comes next is not older
        except RemudaError as error:
            logger.warning("the evaluator is given up, training goes on: %s", error)
            self.close()
        return found

    def _introduce(self) -> None:
        message, fds = self._weights.invitation()
        self._worker_pool.members[0].tell({"do": "attach", **message}, fds)

    def close(self) -> None:
        """Calling it again does nothing."""
        self._is_open = False
        self._worker_pool.close()


def main(fds: Sequence[int]) -> int:
    link = Link.from_fd(fds[0])
    return serving.serve(link, _Service(link))


class _Service:
    def __init__(self, link: Link) -> None:
        self._link, self._is_leaving = link, False
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._weights: SharedWeights | FileWeights | None = None
        self._version, self._rests_until, self._beaten = -1, 0.0, 0.0
        self._server = os.getppid()
        self._notices = collect_warnings()  # such as of envs that raised: the parent has the run's log

    def run(self) -> None:
        torch.set_num_threads(1)
        while not self._should_stop(LOOK_SECONDS):
            if self._weights is None or time.monotonic() < self._rests_until:
                continue
            version = self._weights.pull(self._version)
            if version == self._version:
                continue  # there is nothing new to look at
            self._version = version
            start = time.monotonic()
            try:
                self._evaluate()
            except Interrupted:
                return
            took = time.monotonic() - start
            self._rests_until = time.monotonic() + took * (1 / self._config.eval.cpu_fraction - 1)

    def close(self) -> None:
        """Nothing is left open between evaluations."""

    def _should_stop(self, seconds: float = 0.0) -> bool:
        """Obeys what has come in; asked at every step, so that the run hears of an env that hangs."""
        if time.monotonic() - self._beaten > BEAT_SECONDS:
            self._beaten = time.monotonic()
            self._link.send({"notices": self._notices} if self._notices else {"alive": True}, seconds=None)
            self._notices.clear()
        if self._poll.poll(seconds * 1000):
            messages, fds = self._link.receive()
            for message in messages:
                self._obey(message, fds)
            self._is_leaving |= self._link.has_ended
        return self._is_leaving or os.getppid() != self._server

    def _obey(self, message: Mapping[str, Any], fds: list[int]) -> None:
        match message["do"]:
            case "build":
                self._config = from_dict(message["config"])
                self._spec, self._video = EnvSpec.from_json(message["spec"]), message["video"]
                if self._video is not None:
                    draw_without_screen()
                self._info = probe(self._spec)
                seen = agent_view(self._config, self._info)
                net = find_net(self._config.agent, message["net"])
                self._agent: Any = make_algorithm(self._config, seen, net).agent
                self._link.send({"built": True})
            case "attach":
                self._weights = join_weights(self._agent, message, fds)
            case "leave":
                self._is_leaving = True

    def _evaluate(self) -> None:
        episodes = eval_episodes(self._config)
        asked = (self._config, self._spec, episodes, self._agent, self._should_stop)
        found = play_episodes(*asked, workers=0, threads=1)  # its share is of one core
        self._link.send({"evaluated": found.summary(), "version": self._version}, seconds=None)
        if self._video is not None:
            try:
                self._film(Path(self._video))
            except Interrupted:
                raise
            except Exception as error:  # no room, no screen, an env that fails: evaluations are worth more than films
                self._video = None
                self._link.send({"unfilmed": f"{type(error).__name__}: {error}"}, seconds=None)

    def _film(self, target: Path) -> None:
        limited = replace(self._spec, max_steps=self._config.eval.max_steps or None)
        policy = Policy(self._agent, self._info.observation)
        with closing(limited.build(render_mode="rgb_array")) as env, Film(target, self._info.fps) as film:
            if play(env, policy, eval_seed(self._config, 0), film, self._should_stop) is None:
                raise Interrupted("asked to leave while filming")
