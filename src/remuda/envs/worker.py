"""What runs in a worker process: builds its envs, then answers whatever slot is asked for, oldest first.

    todo[worker, slot] = 7        # the parent: actions lie in shared memory, request 7
    bell.ring()
    ...                           # here: lane.step, rows are written, news go through the link
    done[worker, slot] = 7
    parent_bell.ring()

Shared memory carries steps, the link everything else: orders down; news, spaces and errors up. A request's news are
sent before it is done, and `said` tells the parent that there are some to wait for.
"""

from __future__ import annotations

import os
import random
import resource
import select
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from remuda.core import Step, env_seed
from remuda.data.shared import SharedArrays
from remuda.envs.episodes import EpisodeStats
from remuda.envs.lane import Lane, build_all
from remuda.envs.paths import GUARD, find
from remuda.envs.single import Rows, SingleEnv
from remuda.envs.spaces import space_to_wire
from remuda.envs.spec import EnvSpec
from remuda.errors import EnvSpecError
from remuda.transport.wire import Bell, Link

IN_WORKER = False  # True in worker processes: whoever starts workers or training refuses to do so there
LOOK_SECONDS = 1.0  # how often an idle worker looks whether its fork server lives, where the kernel does not tell


def refuse_in_worker() -> None:
    """For whoever starts runs or workers: a worker only looks for its env in the user's script."""
    if IN_WORKER:
        raise EnvSpecError(
            f"an env worker that loaded the user's script was told to start a run: put that under {GUARD}"
        )


def main(fds: Sequence[int]) -> int:
    """Serve until told to leave or the parent is gone; returns the exit code."""
    global IN_WORKER
    IN_WORKER = True
    half = 1 + (len(fds) - 1) // 2
    link, bell, parent_bell = Link.from_fd(fds[0]), Bell(fds[1:half]), Bell(fds[half:])
    service = _Service(link, bell, parent_bell)
    try:
        service.run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the parent is gone
    except BaseException as error:
        link.send({"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()})
        return 1
    finally:
        service.close()
    return 0


class _Service:
    def __init__(self, link: Link, bell: Bell, parent_bell: Bell) -> None:
        self._link, self._bell, self._parent_bell = link, bell, parent_bell
        self._lanes: list[Lane] = []
        self._todo = self._done = self._said = np.zeros(0, np.int64)  # until memory is attached: nothing to do
        self._fence = threading.Lock()  # taking it orders memory between processes: 50 ns
        self._is_leaving = False

    def run(self) -> None:
        server = os.getppid()
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        poll.register(self._bell, select.POLLIN)
        while not self._is_leaving and os.getppid() == server:
            for fd, _ in poll.poll(LOOK_SECONDS * 1000):
                if fd == self._bell.fileno():
                    self._bell.clear()
                else:
                    self._obey()
            while self._answer_oldest():
                pass

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def _obey(self) -> None:
        messages, fds = self._link.receive()
        for message in messages:
            match message["do"]:
                case "build":
                    self._build(message)
                case "attach":
                    self._attach(message, fds.pop(0))
                case "reset":
                    self._reset(message["seed"], message["warm_up"])
                case "inspect":
                    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                    has_torch = any(name.split(".")[0] == "torch" for name in sys.modules)
                    self._link.send({"inspected": {"pid": os.getpid(), "torch": has_torch, "peak_rss": peak}})
                case "leave":
                    self._is_leaving = True
        self._is_leaving |= self._link.has_ended

    def _build(self, order: Mapping[str, Any]) -> None:
        self._index, self._blocks = order["worker"], order["blocks"]
        spec = EnvSpec.from_json(order["spec"])
        stats = EpisodeStats if order["stats"] is None else find(order["stats"])

        def make(index: int) -> SingleEnv:
            self._alive()
            seeds = None if order["seeds"] is None else order["seeds"][str(index)]
            return SingleEnv(spec, index, order["gamma"], stats, seeds, order["max_restarts"])

        envs = build_all([partial(make, index) for block in self._blocks for index in range(*block)])
        for first, last in self._blocks:
            self._lanes.append(Lane(envs[: last - first]))
            envs = envs[last - first :]
        first_env = self._lanes[0].envs[0]
        self._link.send({"built": [space_to_wire(first_env.observation), space_to_wire(first_env.action)]})

    def _alive(self) -> None:
        self._link.send({"alive": True}, seconds=None)

    def _attach(self, order: Mapping[str, Any], fd: int) -> None:
        memory = SharedArrays.attach(fd, order["layout"])
        os.close(fd)
        for lane, (first, last) in zip(self._lanes, self._blocks, strict=True):
            own = slice(first, last)
            lane.attach(Rows(Step(*(memory[name][own] for name in Step._fields)), memory["restarts"][own]))
        self._restarts = memory["restarts"]
        self._actions = [memory["action"][first:last] for first, last in self._blocks]
        self._todo, self._done, self._said = (memory[name][self._index] for name in ("todo", "done", "said"))
        self._busy = memory["busy"][self._index]
        self._all_done = memory["done"]
        if order["seed"] is not None:  # in place of a lost worker
            self._seed_libraries(order["seed"])
            for lane in self._lanes:
                lane.prepare(order["seed"])

    def _seed_libraries(self, seed: int) -> None:
        # forked processes share the state of these generators, and envs that use them would run in step
        first = self._blocks[0][0]
        own = env_seed(seed, first, int(self._restarts[first]))
        random.seed(own)
        np.random.seed(own)

    def _reset(self, seed: int, warm_up: int) -> None:
        self._seed_libraries(seed)
        taken = sum(lane.reset(seed, warm_up, self._alive) for lane in self._lanes)
        notices = [notice for lane in self._lanes for notice in lane.rows.notices]
        for lane in self._lanes:
            lane.rows.notices.clear()
        self._link.send({"ready": taken, "notices": notices}, seconds=None)

    def _answer_oldest(self) -> bool:
        todo, done = self._todo.tolist(), self._done.tolist()
        asked = [(number, slot) for slot, number in enumerate(todo) if number != done[slot]]
        if not asked:
            return False
        number, slot = min(asked)
        lane = self._lanes[slot]
        start = time.perf_counter()
        lane.step(self._actions[slot])
        self._busy[slot] = time.perf_counter() - start
        rows = lane.rows
        if rows.episodes or rows.notices:
            episodes = [(episode.env, episode.values) for episode in rows.episodes]
            news = {"slot": slot, "number": number, "episodes": episodes, "notices": rows.notices}
            self._link.send(news, seconds=None)  # the parent may learn for minutes before it reads
            self._said[slot] = number
            rows.episodes.clear()
            rows.notices.clear()
        with self._fence:
            self._done[slot] = number  # after the rows
        with self._fence:
            is_last = bool((self._all_done[:, slot] == number).all())
        if is_last:  # waking the parent for every worker would take a core from those that still step
            self._parent_bell.ring()
        return True
