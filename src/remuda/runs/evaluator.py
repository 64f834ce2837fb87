"""A process that evaluates the newest weights with greedy episodes while training continues.

    evaluator = EvaluatorProcess(config, spec, weights, version, steps, run / "videos" / "newest.mp4")
    while training:
        for found in evaluator.poll(learner.version, steps):     # new evaluations since the last call
            ...
    evaluator.close()

The process uses the fraction `eval.cpu_fraction` of one core: after an evaluation of t seconds it sleeps for
t * (1 / cpu_fraction - 1) seconds. If the process fails repeatedly, training continues without it.
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
from remuda.build.algorithm import make_agent
from remuda.build.blueprint import describe_algorithm
from remuda.build.envs import agent_view
from remuda.build.nets import describe_net, find_net
from remuda.config.run_config import RunConfig, from_dict, to_dict
from remuda.env_workers import ENV_WORKERS
from remuda.envs import EnvSpec, probe
from remuda.errors import Interrupted, RemudaError
from remuda.learning.weights import FileWeights, SharedWeights, join_weights
from remuda.processes import worker_main as serving
from remuda.processes.links import Link
from remuda.processes.notices import Reporter, collect_warnings
from remuda.processes.worker_pool import WorkerPool
from remuda.registry import register_reference
from remuda.runs.evaluation import eval_episodes, eval_seed, play_episodes
from remuda.runs.policy import Policy
from remuda.runs.video import VideoWriter, record_episode, use_headless_rendering

logger = logging.getLogger("remuda.runs")

POLL_SECONDS = 0.2  # interval at which an idle evaluator polls for messages and new weights
HEARTBEAT_SECONDS = 1.0  # interval at which the evaluator sends a message to show that it does not hang


class EvaluatorProcess:
    """Starts the evaluator process from the learner's process; `poll` returns new results.

    `poll` does not wait, with one exception: if the fork server was killed, it waits for some seconds until a new
    fork server has loaded torch.
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
        """Start the process.

        `version` is the version of the current `weights`, and `steps` is the number of env steps done so far.
        `should_stop` is polled until the process has built its env. `video` is the file to which an episode is
        recorded after each evaluation.
        """
        blueprint = {
            "config": to_dict(config),
            "spec": spec.to_json(),
            "net": describe_net(config, net),
            "algorithm": describe_algorithm(config),
            "video": None if video is None else str(video.resolve()),
        }
        self._weights = weights
        self._versions, self._steps = [version], [steps]  # published versions, and env steps when each was published
        self._was_useful, self._is_open, self._polled = False, True, time.monotonic()
        self._reporter = Reporter(logger)
        options = config.envs
        self._patience = max(options.step_timeout, options.build_timeout)
        self._worker_pool = WorkerPool(
            __name__, [blueprint], ENV_WORKERS, options.build_timeout, options.max_worker_restarts, should_stop
        )
        try:
            self._worker_pool.start()
            self._worker_pool.should_stop = None  # `poll` does not wait for workers, so it need not be interrupted
        except BaseException:
            self._worker_pool.close()
            raise
        self._send_weights()

    def poll(self, version: int, steps: int) -> list[dict[str, Any]]:
        """Record that `version`, if it is new, was published after `steps` env steps; return new evaluations.

        The entry `steps` of an evaluation is the number of env steps after which its weights were published.
        """
        if not self._is_open:
            return []
        if version > self._versions[-1]:
            self._versions.append(version)
            self._steps.append(steps)
        found = []
        (member,) = self._worker_pool.workers
        try:
            # The pool measures time-outs on its own clock. A call of `poll` advances this clock by at most
            # POLL_SECONDS, so that the rare calls of a slow learner cause no time-out.
            now = time.monotonic()
            self._worker_pool.clock += min(now - self._polled, POLL_SECONDS)
            self._polled = now
            self._worker_pool.listen(0.0)
            self._worker_pool.reap_if_silent(member, self._patience, "while it evaluated")
            if member.is_lost:
                self._worker_pool.relaunch(member, self._was_useful)
                self._was_useful = False
            elif member.take("built") is not None:
                self._send_weights()
            while (answer := member.take("notices")) is not None:
                self._reporter.report(answer["notices"])
            while (answer := member.take("video_failed")) is not None:
                logger.warning("evaluations are no longer recorded as video: %s", answer["video_failed"])
            while (answer := member.take("evaluated")) is not None:
                self._was_useful = True
                place = max(0, bisect_right(self._versions, answer["version"]) - 1)
                found.append({**answer["evaluated"], "steps": self._steps[place]})
                del self._versions[:place], self._steps[:place]  # results arrive in the order of versions
        except RemudaError as error:
            logger.warning("the evaluator process has failed, training continues without it: %s", error)
            self.close()
        return found

    def _send_weights(self) -> None:
        message, fds = self._weights.invitation()
        self._worker_pool.workers[0].send({"do": "attach", **message}, fds)

    def close(self) -> None:
        """End the process; calling this again has no effect."""
        self._is_open = False
        self._worker_pool.close()


def main(fds: Sequence[int]) -> int:
    """Run the evaluator in its own process and return the exit code."""
    link = Link.from_fd(fds[0])
    return serving.serve(link, _Service(link))


class _Service:
    """The work of the evaluator process: receives messages and evaluates new weights."""

    def __init__(self, link: Link) -> None:
        self._link, self._is_leaving = link, False
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._weights: SharedWeights | FileWeights | None = None
        self._version, self._idle_until, self._last_heartbeat = -1, 0.0, 0.0
        self._server = os.getppid()
        self._notices = collect_warnings()  # warnings for the learner's process, which logs them

    def run(self) -> None:
        """Evaluate new weights at the pace of eval.cpu_fraction, until the process is asked to exit."""
        torch.set_num_threads(1)
        while not self._should_stop(POLL_SECONDS):
            if self._weights is None or time.monotonic() < self._idle_until:
                continue
            version = self._weights.pull(self._version)
            if version == self._version:
                continue  # these weights have been evaluated already
            self._version = version
            start = time.monotonic()
            try:
                self._evaluate()
            except Interrupted:
                return
            took = time.monotonic() - start
            self._idle_until = time.monotonic() + took * (1 / self._config.eval.cpu_fraction - 1)

    def close(self) -> None:
        """Do nothing, because every evaluation closes its own envs."""

    def _should_stop(self, seconds: float = 0.0) -> bool:
        """Send a heartbeat if due, handle messages, and return whether to exit. Wait up to `seconds` for a message.

        This method is called at every env step, so that heartbeats stop when an env hangs.
        """
        if time.monotonic() - self._last_heartbeat > HEARTBEAT_SECONDS:
            self._last_heartbeat = time.monotonic()
            self._link.send({"notices": self._notices} if self._notices else {"alive": True}, seconds=None)
            self._notices.clear()
        if self._poll.poll(seconds * 1000):
            messages, fds = self._link.receive()
            for message in messages:
                self._handle(message, fds)
            self._is_leaving |= self._link.has_ended
        return self._is_leaving or os.getppid() != self._server

    def _handle(self, message: Mapping[str, Any], fds: list[int]) -> None:
        match message["do"]:
            case "build":
                register_reference(message["algorithm"])
                self._config = from_dict(message["config"])
                self._spec, self._video = EnvSpec.from_json(message["spec"]), message["video"]
                if self._video is not None:
                    use_headless_rendering()
                self._info = probe(self._spec)
                view = agent_view(self._config, self._info)
                net = find_net(self._config.agent, message["net"])
                self._agent: Any = make_agent(self._config, view, net)
                self._link.send({"built": True})
            case "attach":
                self._weights = join_weights(self._agent, message, fds)
            case "leave":
                self._is_leaving = True

    def _evaluate(self) -> None:
        episodes = eval_episodes(self._config)
        arguments = (self._config, self._spec, episodes, self._agent, self._should_stop)
        # Envs and inference stay in this thread, because eval.cpu_fraction is a fraction of one core.
        found = play_episodes(*arguments, workers=0, threads=1)
        self._link.send({"evaluated": found.summary(), "version": self._version}, seconds=None)
        if self._video is not None:
            try:
                self._record(Path(self._video))
            except Interrupted:
                raise
            except Exception as error:  # such as a full disk; evaluations continue without video
                self._video = None
                self._link.send({"video_failed": f"{type(error).__name__}: {error}"}, seconds=None)

    def _record(self, target: Path) -> None:
        limited = replace(self._spec, max_steps=self._config.eval.max_steps or None)
        policy = Policy(self._agent, self._info.observation)
        with closing(limited.build(render_mode="rgb_array")) as env, VideoWriter(target, self._info.fps) as video:
            if record_episode(env, policy, eval_seed(self._config, 0), video, self._should_stop) is None:
                raise Interrupted("asked to leave while recording")
