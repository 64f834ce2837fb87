"""The program of an env worker: build the envs, then answer requests for slots, the oldest first.

    number, slot = answers.oldest()       # the actions are in shared memory
    env_groups[slot].step(actions[slot])  # writes the rows to shared memory
    if answers.give(slot, number, seconds, stats):
        parent_bell.ring()

The last two bits of a request's number are its kind: STEP, HOLD (step, but do not reset envs whose episode has ended)
or RENEW (start the next episode of the envs that HOLD did not reset). Shared memory carries steps and short
statistics (finished episodes, notices of rebuilt envs). The link carries everything else: commands to the worker, and
spaces, errors and long statistics back to the parent.
"""

from __future__ import annotations

import os
import random
import resource
import select
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypedDict

import numpy as np

from remuda.core import derive_seed
from remuda.data.packing import pack, unpack
from remuda.data.shared import SharedArrays
from remuda.envs.env_group import EnvGroup, build_all, slice_rows
from remuda.envs.episodes import EpisodeStats
from remuda.envs.import_paths import GUARD, find
from remuda.envs.single import SingleEnv
from remuda.envs.spaces import space_to_wire
from remuda.envs.spec import EnvSpec
from remuda.envs.worker_stats import encode
from remuda.errors import EnvSpecError, NoState
from remuda.processes import worker_main as serving
from remuda.processes.links import Bell, Link
from remuda.processes.requests import Answers, SpinWait

STEP, HOLD, RENEW = 0, 1, 2  # kinds of requests, described at the top of this file
KINDS = 4  # a kind takes two bits, so the number of a request is a multiple of 4, plus its kind
POLL_SECONDS = 1.0  # interval at which an idle worker checks whether its fork server has died


class WorkerInfo(TypedDict):
    """What a worker reports about its process."""

    pid: int
    torch: bool  # whether the worker has imported torch
    peak_rss: int  # the largest resident memory so far, in bytes


def refuse_in_worker() -> None:
    """Raise EnvSpecError if this process is a worker, which may load the user's script but must not start a run."""
    if serving.IN_WORKER:
        raise EnvSpecError(
            f"an env worker that loaded the user's script tried to start a run: put that under {GUARD}"
        )


def main(fds: Sequence[int]) -> int:
    """Answer requests until the parent ends this worker or is gone; return the exit code of the process.

    `fds` are the descriptor of the link, then those of this worker's bell, then as many of the parent's bell.
    """
    half = 1 + (len(fds) - 1) // 2
    link, bell, parent_bell = Link.from_fd(fds[0]), Bell(fds[1:half]), Bell(fds[half:])
    return serving.serve(link, _Service(link, bell, parent_bell))


class _Service:
    """Owns the env groups of one worker and answers its requests."""

    def __init__(self, link: Link, bell: Bell, parent_bell: Bell) -> None:
        self._link, self._bell, self._parent_bell = link, bell, parent_bell
        self._env_groups: list[EnvGroup] = []
        self._answers: Answers | None = None  # None until shared memory is attached
        self._is_leaving = False

    def run(self) -> None:
        """Answer requests and run commands until the parent ends this worker, or parent or fork server is gone."""
        fork_server = os.getppid()
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while not self._is_leaving:
            answers = self._answers
            if answers is not None:
                while (asked := answers.oldest()) is not None:
                    self._answer(answers, *asked)
                if self._spin_wait.poll(answers.is_asked) or not answers.sleep():
                    continue
            events = poll.poll(POLL_SECONDS * 1000)
            if answers is not None:
                answers.wake()
            for fd, _ in events:
                if fd == self._bell.fileno():
                    self._bell.clear()
                else:
                    self._run_commands()
            if not events and os.getppid() != fork_server:
                return

    def close(self) -> None:
        for env_group in self._env_groups:
            env_group.close()

    def _run_commands(self) -> None:
        """Read the link and run the commands that arrived."""
        messages, fds = self._link.receive()
        for message in messages:
            match message["do"]:
                case "build":
                    self._build(message)
                case "attach":
                    self._attach(message, fds.pop(0))
                case "reset":
                    self._reset(message["seed"], message["warm_up"])
                case "save":
                    self._save()
                case "load":
                    self._load(message["states"], message["libraries"])
                case "inspect":
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                    has_torch = any(name.split(".")[0] == "torch" for name in sys.modules)
                    self._link.send({"inspected": WorkerInfo(pid=os.getpid(), torch=has_torch, peak_rss=peak)})
                case "leave":
                    self._is_leaving = True
        self._is_leaving |= self._link.has_ended

    def _build(self, order: Mapping[str, Any]) -> None:
        """Build this worker's envs and send their spaces to the parent."""
        self._index, self._blocks, self._info = order["worker"], order["blocks"], order["info"]
        self._first_env = order["first_env"]
        spec = EnvSpec.from_json(order["spec"])
        stats = EpisodeStats if order["stats"] is None else find(order["stats"])

        def make(index: int) -> SingleEnv:
            self._report_progress()
            seeds = None if order["seeds"] is None else order["seeds"][str(index)]
            return SingleEnv(
                spec, self._first_env + index, order["gamma"], stats, seeds, order["levels"], order["max_restarts"]
            )

        envs = build_all([partial(make, index) for block in self._blocks for index in range(*block)])
        for first, last in self._blocks:
            self._env_groups.append(EnvGroup(envs[: last - first]))
            envs = envs[last - first :]
        first_env = self._env_groups[0].envs[0]
        self._link.send({"built": [space_to_wire(first_env.observation), space_to_wire(first_env.action)]})

    def _report_progress(self) -> None:
        """Send a message, because every message from a worker restarts the parent's time limit for that worker."""
        self._link.send({"alive": True}, seconds=None)

    def _attach(self, order: Mapping[str, Any], fd: int) -> None:
        """Map the shared memory `fd`; if `order` has a seed, prepare all envs so that their next step resets them."""
        memory = SharedArrays.attach(fd, order["layout"])
        os.close(fd)
        arrays = {name: memory[name] for name in memory.layout}
        self._actions = []
        for env_group, (first, last) in zip(self._env_groups, self._blocks, strict=True):
            env = env_group.envs[0]
            rows, actions = slice_rows(arrays, slice(first, last), env.observation, env.action, self._info)
            env_group.attach(rows)
            self._actions.append(actions)
        self._restarts = memory["restarts"]
        self._answers = Answers(arrays, self._index, order["alone"])
        own = zip(self._env_groups, self._actions, strict=True)
        self._group_and_actions = dict(zip(self._answers.slots, own, strict=True))
        self._spin_wait = SpinWait(self._answers.num_workers)
        if order["seed"] is not None:
            self._seed_libraries(order["seed"])
            for env_group in self._env_groups:
                env_group.prepare(order["seed"])

    def _seed_libraries(self, seed: int) -> None:
        """Seed the global random generators of Python and numpy.

        Forked workers inherit identical generators, so without this they would all draw the same numbers.
        """
        first = self._blocks[0][0]
        own = derive_seed(seed, self._first_env + first, int(self._restarts[first]))
        random.seed(own)
        np.random.seed(own)

    def _reset(self, seed: int, warm_up: int) -> None:
        """Reset all envs; send the number of random steps taken and the envs' notices to the parent."""
        self._seed_libraries(seed)
        taken = sum(env_group.reset(seed, warm_up, self._report_progress) for env_group in self._env_groups)
        notices = [notice for env_group in self._env_groups for notice in env_group.rows.notices]
        for env_group in self._env_groups:
            env_group.rows.notices.clear()
        self._link.send({"ready": taken, "notices": notices}, seconds=None)

    def _save(self) -> None:
        """Send the states of all envs and of the global random generators, or why they cannot be saved."""
        try:
            states = [state for env_group in self._env_groups for state in env_group.get_state()]
        except NoState as error:
            self._link.send({"saved": None, "why": str(error)})
            return
        libraries = pack((random.getstate(), np.random.get_state(legacy=False)))
        # This is sent without a time limit, because the states may take megabytes and the parent may be busy.
        self._link.send({"saved": states, "libraries": libraries}, seconds=None)

    def _load(self, states: Sequence[tuple[int, bytes]], libraries: bytes | None) -> None:
        """Restore the states of all envs and, if given, of the global random generators."""
        for env_group in self._env_groups:
            own, states = states[: len(env_group.envs)], states[len(env_group.envs) :]
            env_group.set_state(own)
        if libraries is not None:
            of_python, of_numpy = unpack(libraries)
            random.setstate(of_python)
            np.random.set_state(of_numpy)
        self._link.send({"loaded": True})

    def _answer(self, answers: Answers, number: int, slot: int) -> None:
        """Step or renew the envs of a slot, and mark the request as done."""
        env_group, actions = self._group_and_actions[slot]
        start = time.perf_counter()
        kind = number % KINDS
        if kind == RENEW:
            env_group.renew()
        else:
            env_group.step(actions, kind == HOLD)
        seconds = time.perf_counter() - start
        stats: bytes | None = encode(env_group.rows)
        if stats and not answers.has_room(slot, stats):
            # There is no time limit, because the parent may run the learner for minutes before it reads this message.
            self._link.send({"slot": slot, "number": number, "worker_stats": stats}, seconds=None)
            stats = None
        if answers.give(slot, number, seconds, stats):
            self._parent_bell.ring()
