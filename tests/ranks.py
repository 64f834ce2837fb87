"""Processes that take part in a collective, for tests: each connects, runs one program, and sends back its result.

    ranks = Ranks(server, "shared", 3, tmp_path, "check_sums", {"lengths": [7]})     # server: a ForkServer("ranks")
    assert ranks.results() == [1, 1, 1]
    ranks.close()

Every program of `PROGRAMS` gets the collective, a function that sends an event to the test, and the options. A rank
whose program raises an error publishes it to the other ranks, as the scheme `replicas` does.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from parted import counting_sampler, run_updates
from processes import all_gone, wait_for
from torch.distributed import FileStore

from remuda import errors
from remuda.collectives import Collective, GlooCollective, SharedCollective, gloo, health, shared
from remuda.data.packing import pack
from remuda.errors import Interrupted, RemudaError
from remuda.logs.notices import warnings_go_to
from remuda.parts import PartedSampler, RankGroup, attempt
from remuda.processes.fork_server import ForkServer
from remuda.processes.links import Link

MODULES: dict[str, ModuleType] = {"gloo": gloo, "health": health, "shared": shared}
RESULT_SECONDS = 120.0  # time limit for all ranks to answer, on a machine with other processes
Event = Callable[[str], None]


class Ranks:
    """The processes of all ranks of one collective, as the test that started them sees them."""

    def __init__(
        self,
        server: ForkServer,
        kind: str,
        size: int,
        directory: Path,
        program: str,
        options: Mapping[str, Any] | None = None,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        """Start the ranks. `kind` is "shared" or "gloo"; `constants` replaces constants by module and name."""
        self._server = server
        self._links: list[Link] = []
        self.pids: list[int] = []
        self._messages: list[list[Mapping[str, Any]]] = [[] for _ in range(size)]
        order = {"kind": kind, "size": size, "path": os.path.join(tempfile.mkdtemp(dir=directory), "address")}
        order |= {"program": program, "options": dict(options or {}), "constants": dict(constants or {})}
        for rank in range(size):
            ours, theirs = Link.pair()
            self._links.append(ours)
            try:
                self.pids.append(server.fork([theirs.fileno()]))
            finally:
                theirs.close()
            ours.send({**order, "rank": rank})
        self.processes = [psutil.Process(pid) for pid in self.pids]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def wait_for(self, rank: int, name: str) -> Any:
        """Wait for a message with this entry from a rank, and return the entry."""
        deadline = time.monotonic() + RESULT_SECONDS
        link, found = self._links[rank], self._messages[rank]
        while True:
            found += link.receive()[0]
            for message in found:
                if name in message:
                    return message[name]
                if "error" in message:
                    raise AssertionError(f"rank {rank}: {message['error']}: {message['text']}{message['notes']}")
            assert not link.has_ended, f"rank {rank} ended without {name}"
            assert time.monotonic() < deadline, f"rank {rank} has not sent {name}"
            link.wait(1.0)

    def wait_for_all(self, name: str) -> list[Any]:
        return [self.wait_for(rank, name) for rank in range(len(self.pids))]

    def results(self) -> list[Any]:
        """Return the results of all ranks; fail if a rank raised an error."""
        return self.wait_for_all("result")

    def wait_for_end(self, rank: int) -> float:
        """Return the time at which a rank raised its error; call `error` before."""
        return next(message["at"] for message in self._messages[rank] if "at" in message)

    def error(self, rank: int) -> Exception:
        """Return the error that ended a rank; fail if there was none."""
        deadline = time.monotonic() + RESULT_SECONDS
        link, found = self._links[rank], self._messages[rank]
        while True:
            found += link.receive()[0]
            for message in found:
                assert "result" not in message, f"rank {rank} has ended without an error"
                if "error" in message:
                    kind: type[Exception] = vars(errors).get(message["error"], AssertionError)
                    error = kind(message["text"])
                    error.__notes__ = message["notes"]
                    return error
            assert not link.has_ended, f"rank {rank} ended without an answer"
            assert time.monotonic() < deadline, f"rank {rank} has not ended"
            link.wait(1.0)

    def signal(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self.processes[rank].send_signal(number)  # psutil sends nothing to a new process with the same pid

    def exit_reason(self, rank: int) -> str:
        return self._server.exit_reason(self.pids[rank], RESULT_SECONDS)

    def close(self) -> None:
        """Kill the ranks that still run, and wait until all have ended."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for link in self._links:
            link.close()
        deadline = time.monotonic() + RESULT_SECONDS
        while not all_gone(self.processes):
            assert time.monotonic() < deadline, "a rank survives SIGKILL"
            time.sleep(0.005)


@contextlib.contextmanager
def leaves_nothing(server: ForkServer) -> Iterator[ForkServer]:
    """Check at the end that the fork server has no children, and that there is no new named shared memory."""
    before = set(os.listdir("/dev/shm"))
    yield server
    wait_for(lambda: psutil.Process(server.pid).children() == [])
    wait_for(lambda: set(os.listdir("/dev/shm")) <= before)


# --- in the process of a rank ---------------------------------------------------------------------------------------


def main(fds: Sequence[int]) -> int:
    """Receive the order, connect, run the program, and send its result or its error."""
    torch.set_num_threads(1)
    link = Link.from_fd(fds[0])
    messages, _ = link.receive()
    while not messages:
        if link.has_ended:
            return 1
        link.wait(1.0)
        messages, _ = link.receive()
    order = messages[0]
    for name, value in order["constants"].items():
        module, constant = name.split(".")
        assert hasattr(MODULES[module], constant)
        setattr(MODULES[module], constant, value)
    collective: Collective | None = None
    try:
        collective = connect(order["kind"], order["rank"], order["size"], Path(order["path"]))
        program = PROGRAMS[order["program"]]
        link.send(
            {"result": program(collective, lambda event: link.send({event: time.monotonic()}), **order["options"])}
        )
    except Exception as error:
        if collective is not None:
            collective.health.fail(error)
        notes = getattr(error, "__notes__", [])
        link.send({"error": type(error).__name__, "text": str(error), "notes": notes, "at": time.monotonic()})
    finally:
        if collective is not None:
            collective.close()
    return 0


def connect(kind: str, rank: int, size: int, path: Path) -> Collective:
    """Join the collective of this kind. The ranks find each other by a file."""
    host = f"host-{kind}"
    if kind == "gloo":
        return GlooCollective(FileStore(str(path), size), rank, size, host, "127.0.0.1")
    if rank == 0:
        return SharedCollective.create(size, host, lambda address: write_whole(path, json.dumps(address)))
    while not path.exists():
        time.sleep(0.01)
    return SharedCollective.join(json.loads(path.read_text()), rank, host)


def write_whole(path: Path, text: str) -> None:
    """Write a file that no reader sees before it is complete."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.rename(path)


# --- programs: sums and messages ------------------------------------------------------------------------------------


def numbers(seed: int, operation: int, rank: int, length: int) -> NDArray[np.float32]:
    """Return the vector of a rank. Its numbers have many magnitudes, so that sums depend on the order of addition."""
    rng = np.random.default_rng([seed, operation, rank])
    return rng.standard_normal(length, np.float32) * np.exp2(rng.integers(-12, 12, length)).astype(np.float32)


def left_to_right(seed: int, operation: int, ranks: Sequence[int], length: int) -> NDArray[np.float32]:
    """Return the float32 sum of the vectors of these ranks, added in this order."""
    total = numbers(seed, operation, ranks[0], length)
    for rank in ranks[1:]:
        total = total + numbers(seed, operation, rank, length)
    return total


def text_of(seed: int, operation: int, rank: int, longest: int) -> bytes:
    """Return the message of a rank: empty, short, or of any length up to `longest`."""
    rng = np.random.default_rng([seed, operation, rank, 1])
    return rng.bytes(int(rng.choice([0, 1, int(rng.integers(longest + 1)), longest])))


def check_sum(collective: Collective, seed: int, operation: int, length: int) -> None:
    vector = collective.vector(length)
    assert vector.shape == (length,)
    vector[:] = torch.from_numpy(numbers(seed, operation, collective.rank, length))
    found, expected = collective.sum().numpy(), left_to_right(seed, operation, range(collective.size), length)
    assert np.array_equal(found.view(np.int32), expected.view(np.int32)), f"sum {operation} of {length} numbers"


def check_gather(collective: Collective, seed: int, operation: int, longest: int) -> None:
    found = collective.gather(text_of(seed, operation, collective.rank, longest))
    expected = [text_of(seed, operation, rank, longest) for rank in range(collective.size)]
    assert found == expected, f"messages {operation}: {[len(each) for each in found]} bytes"


def check_sums(collective: Collective, event: Event, lengths: Sequence[int]) -> int:
    """Sum vectors of these lengths one after another, and return their number."""
    for operation, length in enumerate(lengths):
        check_sum(collective, 0, operation, length)
    return len(lengths)


def check_messages(collective: Collective, event: Event, lengths: Sequence[Sequence[int]]) -> int:
    """Exchange messages; `lengths` holds the length of the message of each rank."""
    for operation, each in enumerate(lengths):
        messages = [np.random.default_rng([operation, rank]).bytes(length) for rank, length in enumerate(each)]
        assert collective.gather(messages[collective.rank]) == messages, each
    return len(lengths)


def check_mixture(
    collective: Collective, event: Event, seed: int, count: int, lengths: Sequence[int], longest: int, pauses: float
) -> int:
    """Exchange messages and sum vectors in a random sequence, and lose time at random in all places where that hurts.

    With `pauses`, a rank sleeps before it contributes, and between the arrival of all ranks and its reading.
    """
    common, own = random.Random(seed), random.Random(seed * 100 + collective.rank)

    def pause() -> None:
        if own.random() < pauses:
            time.sleep(own.random() * 0.002)

    if isinstance(collective, SharedCollective):
        wait = collective._wait

        def slow_wait(seconds: float | None = None) -> None:
            wait(seconds)
            pause()

        collective._wait = slow_wait  # type: ignore[method-assign]
    for operation in range(count):
        pause()
        if common.random() < 0.3:
            check_gather(collective, seed, operation, longest)
        else:
            check_sum(collective, seed, operation, common.choice(lengths))
    return count


# --- programs: health -----------------------------------------------------------------------------------------------


def gather_forever(collective: Collective, event: Event) -> None:
    event("ready")
    while True:
        collective.gather(b"here")


def hold_interpreter(collective: Collective, event: Event, ranks: Sequence[int], seconds: float) -> int:
    """Let some ranks stay in native code that holds the interpreter lock, so that none of their threads can run."""
    collective.gather(b"")
    time.sleep(0.5)
    if collective.rank in ranks:
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    return len(collective.gather(b""))


def hang(collective: Collective, event: Event, rank: int, is_limited: bool) -> None:
    """Let the main thread of one rank hang, while its heartbeats continue."""
    collective.gather(b"")
    collective.health.is_limited = is_limited
    if collective.rank == rank:
        threading.Event().wait()
    while True:
        collective.gather(b"")


def gather_until(collective: Collective, event: Event, path: str) -> int:
    """Exchange messages until a file exists, and return how many."""
    event("ready")
    count = 0
    while b"end" not in collective.gather(b"end" if os.path.exists(path) else b""):
        count += 1
        time.sleep(0.01)
    return count


def fail_in(
    collective: Collective, event: Event, rank: int, error: str, text: str, in_sum: bool, operations: int
) -> None:
    """Let one rank raise an error after some operations, while the others wait for it."""
    for operation in range(operations):
        check_gather(collective, 1, operation, 100)
    if collective.rank == rank:
        raise {**vars(errors), "KeyError": KeyError}[error](text)
    if in_sum:
        check_sum(collective, 1, operations, 50)
    else:
        collective.gather(b"")


def leave_first(collective: Collective, event: Event, late: int, slow: int) -> bool:
    """Let rank `slow` look after the others only when all of them have left after the last operation.

    Rank `late` arrives last, so the slow rank waits before. All others leave at once. The messages are empty, because
    gloo exchanges others in two operations. Returns whether this rank looked after the others.
    """
    check, has_checked = collective.health.check, list[bool]()
    collective.gather(b"")

    def slow_check() -> None:
        has_checked.append(True)
        time.sleep(1.0)
        check()

    if collective.rank == slow:
        collective.health.check = slow_check  # type: ignore[method-assign]
    if collective.rank == late:
        time.sleep(0.5)
    assert collective.gather(b"") == [b""] * collective.size
    return bool(has_checked)


def leave_too_early(collective: Collective, event: Event, rank: int) -> None:
    collective.gather(b"")
    if collective.rank == rank:
        event("left")
        return
    collective.gather(b"")


def ask_to_stop(collective: Collective, event: Event, rank: int) -> int:
    """Let one rank ask all to stop; return in how many exchanges all ranks knew of it."""
    assert collective.gather(b"1" if collective.health.is_asked_to_stop() else b"0") == [b"0"] * collective.size
    if collective.rank == rank:
        collective.health.ask_to_stop()
    deadline, count = time.monotonic() + 60.0, 1
    while b"0" in collective.gather(b"1" if collective.health.is_asked_to_stop() else b"0"):
        assert time.monotonic() < deadline
        count += 1
        time.sleep(0.01)
    return count


def name_late(collective: Collective, event: Event) -> str:
    """Let rank 0 name the ranks for which it waits, while the last rank is late on purpose."""
    found: list[str] = []
    collective.gather(b"")
    if collective.rank == 0:
        collective.while_waiting = lambda: found.append(collective.late())
    if collective.rank == collective.size - 1:
        time.sleep(0.5)
    collective.gather(b"")
    return found[-1] if found else ""


# --- programs: groups -----------------------------------------------------------------------------------------------


def lead_and_follow(collective: Collective, event: Event) -> list[Any]:
    """Let rank 0 call a function of all ranks before each of two rounds; return what every rank has seen."""
    group, seen = RankGroup(collective), list[Any]()
    group.serve("place", lambda argument: [f"{argument} {collective.rank}"])
    if group.is_leader:
        for round in range(2):
            group.expect_followers()
            assert not collective.health.is_limited, "between rounds, the leader may take any time"
            seen.append(group.call("place", f"round {round}"))
            seen.append(group.call("place", "again"))
            group.begin_round()
            group.begin_round()  # does nothing, because no follower waits
            assert collective.health.is_limited
            seen.append(group.gather([round]))
        group.expect_followers()
        group.end()
        group.end()
    else:
        while group.follow():
            group.begin_round()  # does nothing in a follower
            assert collective.health.is_limited
            seen.append(group.gather([-collective.rank]))
    seen.append([group.count, list(group.local), len(group.vectors(5))])
    return seen


def interrupt_sampling(collective: Collective, event: Event, rank: int) -> list[Any]:
    """Interrupt the sampler of one rank in its third rollout; return how the sampling ended in this rank."""
    group, asked = RankGroup(collective), list[bool]()
    own = counting_sampler(2, collective.rank * 2, lambda: bool(asked) and collective.rank == rank)
    sampler = PartedSampler([own], 2, group)
    assert sampler.reset(11) == 0
    steps = [sampler.collect().num_real for _ in range(2)]
    asked.append(True)
    try:
        sampler.collect()
    except Interrupted as error:
        return [steps, str(error), group.is_asked_to_stop(), group.gather([collective.rank])]
    finally:
        sampler.close()
    raise AssertionError("not interrupted")


def interrupt_loading(collective: Collective, event: Event, rank: int) -> list[Any]:
    """Interrupt one rank while all restore the states of their samplers; return how this ended in this rank."""
    group, asked = RankGroup(collective), list[bool]()
    own = counting_sampler(1, collective.rank, lambda: bool(asked) and collective.rank == rank, workers=1)
    sampler = PartedSampler([own], 1, group)
    sampler.reset(11)
    sampler.collect()
    states = pack(group.gather([own.get_state()]))
    asked.append(True)
    try:
        sampler.set_state(states)
    except Interrupted as error:
        return [str(error), group.gather([collective.rank])]
    finally:
        sampler.close()
    raise AssertionError("not interrupted")


def fail_in_calls(collective: Collective, event: Event, rank: int) -> list[Any]:
    """Let one rank raise errors in the functions that rank 0 calls; return what every rank has seen."""
    group, seen = RankGroup(collective), list[Any]()

    def fail(kind: str) -> list[str]:
        if collective.rank != rank:
            return ["done"]
        raise {
            "full": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
            "damaged": errors.DamagedReplay("a file is missing."),
            "unexpected": KeyError("nothing"),
        }[kind]

    group.serve("fail", fail)
    if not group.is_leader:
        while group.follow():
            seen.append(group.gather([collective.rank]))
        return seen
    for kind in ("full", "damaged", "unexpected"):
        group.expect_followers()
        try:
            group.call("fail", kind)
        except (OSError, RemudaError, KeyError) as error:
            seen.append([type(error).__name__, str(error)])
        group.begin_round()
        seen.append(group.gather([0]))
    group.expect_followers()
    group.end()
    return seen


def fail_together(collective: Collective, event: Event, ranks: Sequence[int]) -> str:
    """Let some ranks fail in work that all do, and return the error that this rank sees."""
    group = RankGroup(collective)

    def work() -> str:
        if collective.rank in ranks:
            raise errors.DamagedReplay(f"file {collective.rank} is missing.")
        return f"result {collective.rank}"

    assert group.gather_outcomes(attempt(lambda: collective.rank)) == list(range(collective.size))
    try:
        group.gather_outcomes(attempt(work))
    except errors.DamagedReplay as error:
        assert group.gather([collective.rank]) == list(range(collective.size))
        return str(error)
    raise AssertionError("no error")


def log_warnings(collective: Collective, event: Event, rounds: int) -> list[str]:
    """Log a warning in every rank before each rollout; return the warnings that are new in this rank's log."""
    group, lines = RankGroup(collective), list[str]()
    with warnings_go_to(lambda text, trace: (lines if group.is_leader else group.lines).append(text)):
        sampler = PartedSampler([counting_sampler(1, collective.rank)], 1, group)
        sampler.reset(11)
        for round in range(rounds):
            logging.getLogger("remuda.tests").warning("round %d of rank %d", round, collective.rank)
            sampler.collect()
        sampler.close()
    return lines if group.is_leader else group.take_lines()


def exchange_gradients(collective: Collective, event: Event) -> list[Any]:
    return run_updates(RankGroup(collective))


PROGRAMS: dict[str, Callable[..., Any]] = {
    program.__name__: program
    for program in (
        check_sums,
        check_messages,
        check_mixture,
        gather_forever,
        gather_until,
        hold_interpreter,
        hang,
        fail_in,
        leave_first,
        leave_too_early,
        ask_to_stop,
        name_late,
        lead_and_follow,
        interrupt_sampling,
        interrupt_loading,
        fail_in_calls,
        fail_together,
        log_warnings,
        exchange_gradients,
    )
}
