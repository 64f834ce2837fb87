"""Failures, departures and stop requests of ranks that are real processes: all other ranks notice, and no wait hangs.

Most tests shorten the time limit for heartbeats, in all ranks. The last ones, which are long, use the real limit.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from processes import is_alive, wait_for
from ranks import Ranks, leaves_nothing
from torch.distributed import FileStore

from remuda import errors
from remuda.collectives import GlooCollective, Health, RankInfo, SharedCollective, gloo, health, shared
from remuda.collectives.health import MAX_ERROR_BYTES, SILENT_SECONDS, error_of, report_of
from remuda.errors import ConfigError, TrainingError, WorkerError
from remuda.processes.fork_server import ForkServer

KINDS = pytest.mark.parametrize("kind", ["shared", "gloo"])
# A rank that is well must not count as silent on a busy machine, so the limit is not much shorter than the real one.
SHORT = {"health.SILENT_SECONDS": 4.0, "health.BEAT_SECONDS": 0.1}


@pytest.fixture(scope="module")
def server(shared_servers: Any) -> Iterator[ForkServer]:
    with leaves_nothing(shared_servers("ranks")) as server:
        yield server


def open_files() -> list[str]:
    """Return what the descriptors of this process refer to, except the one that is opened for listing them."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        except FileNotFoundError:
            continue
    return sorted(names)


# --- ranks that fail ------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize(
    ("error", "kind_of_others", "text"),
    [
        (ConfigError, ConfigError, "gamma=2: use at most 1."),
        (TrainingError, TrainingError, "gradients were not finite."),
        (KeyError, WorkerError, "KeyError: 'gamma=2: use at most 1.'"),
    ],
)
def test_all_other_ranks_raise_the_error_of_a_rank(
    kind: str, error: type[Exception], kind_of_others: type[Exception], text: str, server: ForkServer, tmp_path: Path
) -> None:
    """The message names rank, process and host, and a note holds the traceback."""
    given = "gamma=2: use at most 1." if error is KeyError else text
    options = {"rank": 1, "error": error.__name__, "text": given, "in_sum": error is TrainingError, "operations": 5}
    with Ranks(server, kind, 3, tmp_path, "fail_in", options) as ranks:
        for rank in (0, 2):
            found = ranks.error(rank)
            assert type(found) is kind_of_others
            # A rank may learn of the failure from the other one, which then is named first.
            assert str(found).endswith(f"rank 1 (pid {ranks.pids[1]} on host-{kind}): {text}")
            assert any("in fail_in" in note for note in found.__notes__)


def test_silent_rank_is_noticed_by_all_others_and_killed(server: ForkServer, tmp_path: Path) -> None:
    """Several runs are tested at the same time, because the test mostly waits."""
    with ExitStack() as stack:
        runs = []
        for kind in ("shared", "gloo"):
            for number in (signal.SIGKILL, signal.SIGSTOP):
                ranks = Ranks(server, kind, 3, tmp_path, "gather_forever", constants=SHORT)
                runs.append((kind, number, stack.enter_context(ranks)))
        for _, number, ranks in runs:
            ranks.wait_for_all("ready")
            ranks.signal(number, [1])
        for kind, _, ranks in runs:
            sentence = f"rank 1 (pid {ranks.pids[1]} on host-{kind}) has "  # ... no sign of life, or ended
            for rank in (0, 2):
                found = ranks.error(rank)
                assert type(found) is WorkerError
                assert sentence in str(found)
                assert str(found).endswith("Continue from the last checkpoint with --resume.")
            assert ranks.exit_reason(1) == "was killed by SIGKILL"


@pytest.mark.long
@KINDS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_silent_rank_ends_all_others_within_the_time_limit(
    kind: str, number: signal.Signals, server: ForkServer, tmp_path: Path
) -> None:
    with Ranks(server, kind, 4, tmp_path, "gather_forever") as ranks:
        ranks.wait_for_all("ready")
        time.sleep(1.0)
        start = time.monotonic()
        ranks.signal(number, [2])
        for rank in (0, 1, 3):
            assert f"rank 2 (pid {ranks.pids[2]} on host-{kind})" in str(ranks.error(rank))
            seconds = ranks.wait_for_end(rank) - start
            assert seconds < SILENT_SECONDS + 3
            if number == signal.SIGSTOP:  # a killed process is noticed at once, a stopped one only by its silence
                assert seconds > SILENT_SECONDS - 1
        assert ranks.exit_reason(2) == "was killed by SIGKILL"


def test_suspending_all_ranks_is_no_failure(server: ForkServer, tmp_path: Path) -> None:
    """As by Ctrl-Z: no rank runs for longer than the time limit, and then all continue."""
    suspend(5.1, server, tmp_path, SHORT)


@pytest.mark.long
def test_suspending_all_ranks_for_longer_than_the_real_limit(server: ForkServer, tmp_path: Path) -> None:
    suspend(8.0, server, tmp_path, {})


def suspend(seconds: float, server: ForkServer, tmp_path: Path, constants: dict[str, float]) -> None:
    assert seconds > constants.get("health.SILENT_SECONDS", SILENT_SECONDS) + 1
    end = tmp_path / "end"
    with ExitStack() as stack:
        runs = [
            stack.enter_context(Ranks(server, kind, 3, tmp_path, "gather_until", {"path": str(end)}, constants))
            for kind in ("shared", "gloo")
        ]
        for ranks in runs:
            ranks.wait_for_all("ready")
        time.sleep(0.3)
        for ranks in runs:
            ranks.signal(signal.SIGSTOP, range(3))
        time.sleep(seconds)
        for members in ([0], [1, 2]):  # rank 0 finds that the others are not yet running
            for ranks in runs:
                ranks.signal(signal.SIGCONT, members)
            time.sleep(0.4)
        end.touch()
        for ranks in runs:
            counts = ranks.results()
            assert len(set(counts)) == 1
            assert counts[0] > 0


@KINDS
@pytest.mark.parametrize("ranks", [[1], [0, 2]])
def test_native_code_that_holds_the_interpreter_is_no_failure(
    kind: str, ranks: list[int], server: ForkServer, tmp_path: Path
) -> None:
    """Other ranks on the machine see that the process is running, and vouch for it."""
    options = {"ranks": ranks, "seconds": SHORT["health.SILENT_SECONDS"] + 2}
    with Ranks(server, kind, 3, tmp_path, "hold_interpreter", options, SHORT) as running:
        assert running.results() == [3] * 3


@KINDS
def test_main_thread_that_hangs_ends_all_ranks(kind: str, server: ForkServer, tmp_path: Path) -> None:
    """The error holds the stack of the main thread."""
    options, constants = {"rank": 1, "is_limited": True}, {"health.STALL_SECONDS": 2.0}
    with Ranks(server, kind, 3, tmp_path, "hang", options, constants) as ranks:
        for rank in (0, 2):
            found = ranks.error(rank)
            sentence = f"rank 1 (pid {ranks.pids[1]} on host-{kind}): its main thread has made no progress for 2 s"
            assert sentence in str(found)
            assert any("in hang" in note for note in found.__notes__)
        assert ranks.exit_reason(1) == "exited with code 1"


def test_main_thread_may_wait_between_rounds(server: ForkServer, tmp_path: Path) -> None:
    """The leader may evaluate there, or run the user's own code."""
    options, constants = {"rank": 1, "is_limited": False}, {"health.STALL_SECONDS": 0.5}
    with Ranks(server, "shared", 3, tmp_path, "hang", options, constants) as ranks:
        time.sleep(3.0)
        assert all(map(is_alive, ranks.processes))


# --- ranks that leave -----------------------------------------------------------------------------------------------


def test_rank_that_leaves_after_the_last_operation_is_no_failure(server: ForkServer, tmp_path: Path) -> None:
    """Rank 0 finds that the others have left while it still waits for an operation in which they have taken part."""
    with ExitStack() as stack:
        runs = [
            stack.enter_context(Ranks(server, kind, 3, tmp_path, "leave_first", {"late": 2, "slow": 0}))
            for kind in ("shared", "gloo")
        ]
        for ranks in runs:
            assert ranks.results()[1:] == [False, False]


@KINDS
def test_rank_that_leaves_before_an_operation_fails_it_for_all_others(
    kind: str, server: ForkServer, tmp_path: Path
) -> None:
    with Ranks(server, kind, 3, tmp_path, "leave_too_early", {"rank": 2}) as ranks:
        ranks.wait_for(2, "left")
        for rank in (0, 1):
            found = ranks.error(rank)
            assert type(found) is WorkerError
            assert f"rank 2 (pid {ranks.pids[2]} on host-{kind}) has left the run while others were training." in str(
                found
            )


# --- stop requests and waits ----------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("rank", [0, 2])
def test_stop_request_reaches_all_ranks(kind: str, rank: int, server: ForkServer, tmp_path: Path) -> None:
    with Ranks(server, kind, 3, tmp_path, "ask_to_stop", {"rank": rank}) as ranks:
        assert len(set(ranks.results())) == 1


def test_rank_that_waits_names_those_that_are_late(server: ForkServer, tmp_path: Path) -> None:
    with Ranks(server, "shared", 3, tmp_path, "name_late") as ranks:
        assert ranks.results() == [f"rank 2 (pid {ranks.pids[2]} on host-shared)", "", ""]


def test_rank_of_gloo_that_waits_names_all_others(server: ForkServer, tmp_path: Path) -> None:
    with Ranks(server, "gloo", 3, tmp_path, "name_late") as ranks:
        first, second = (f"rank {rank} (pid {ranks.pids[rank]} on host-gloo)" for rank in (1, 2))
        assert ranks.results() == [f"{first} or {second}", "", ""]


# --- joining --------------------------------------------------------------------------------------------------------


def text_of_error(work: Callable[[], object]) -> str:
    """Return the text of a WorkerError, and nothing that refers to the frames in which it was raised."""
    try:
        work()
    except WorkerError as error:
        return str(error)
    raise AssertionError("no error")


def test_joining_fails_if_a_rank_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 of 3 join in this process; the memory of the collective is freed."""
    monkeypatch.setattr(shared, "JOIN_SECONDS", 1.0)
    gc.collect()
    before, found, joining = open_files(), list[str](), list[threading.Thread]()

    def start(address: Any) -> None:
        join = partial(SharedCollective.join, address, 1, "here")
        joining.append(threading.Thread(target=lambda: found.append(text_of_error(join))))
        joining[0].start()

    found.append(text_of_error(lambda: SharedCollective.create(3, "here", start)))
    joining[0].join()
    assert found == ["ranks [2] of 3 have not joined within 1 s."] * 2
    gc.collect()
    assert open_files() == before


def test_joining_by_gloo_fails_if_a_rank_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gloo, "JOIN_SECONDS", 0.5)
    store, before = FileStore(str(tmp_path / "store"), 2), threading.active_count()
    with pytest.raises(WorkerError, match=r"^rank 0 could not connect to the 1 other ranks \(.*\)\.$") as caught:
        GlooCollective(store, 0, 2, "here", "127.0.0.1")
    assert "\n" not in str(caught.value)
    assert threading.active_count() == before


def test_memory_is_freed_if_the_address_cannot_be_announced() -> None:
    before = open_files()

    def announce(address: Any) -> None:
        raise ConfigError("no such host.")

    with pytest.raises(ConfigError, match="no such host"):
        SharedCollective.create(2, "here", announce)
    assert open_files() == before


# --- boards and reports ---------------------------------------------------------------------------------------------


class MemoryBoard:
    """A `Board` for the thread of one `Health` and for the test, which plays the other ranks."""

    def __init__(self, size: int) -> None:
        self.own_beats: list[int] = []
        self.found_beats, self.found_reports, self.stop = [0] * size, [b""] * size, False
        self.is_broken, self.signal = False, 0

    def beat(self, rank: int, count: int) -> None:
        if self.is_broken:
            raise TimeoutError("the store is gone")
        self.own_beats.append(count)

    def beats(self) -> list[int]:
        return list(self.found_beats)

    def report(self, text: bytes) -> None:
        self.found_reports[0] = text

    def reports(self) -> list[bytes]:
        return list(self.found_reports)

    def newest_reports(self) -> list[bytes]:
        return self.reports()

    def ask_to_stop(self) -> None:
        self.stop = True

    def is_asked_to_stop(self) -> bool:
        return self.stop

    def pass_signal(self, number: int) -> None:
        self.signal = number

    def passed_signal(self) -> int:
        return self.signal

    def close(self) -> None: ...


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> MemoryBoard:
    monkeypatch.setattr(health, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(health, "SILENT_SECONDS", 1e9)
    return MemoryBoard(3)


INFOS = [RankInfo(rank, f"host {rank}", 0) for rank in range(3)]  # on different hosts, so that no process is killed


def beats_of(board: MemoryBoard, count: int) -> None:
    """Wait until the thread has written this number of further heartbeats."""
    before = len(board.own_beats)
    wait_for(lambda: len(board.own_beats) >= before + count)


def test_only_the_first_report_of_a_rank_counts(board: MemoryBoard) -> None:
    found = Health(board, 0, INFOS)
    found.fail(ConfigError("the cause"))
    found.fail(TrainingError("a consequence"))
    found.close()
    assert json.loads(board.found_reports[0])["text"] == "the cause"
    assert len(board.found_reports[0]) < MAX_ERROR_BYTES


def test_rank_that_closes_without_an_error_reports_that_it_has_left(board: MemoryBoard) -> None:
    found = Health(board, 0, INFOS)
    beats_of(board, 2)
    found.check()
    found.close()
    assert board.found_reports[0] == b"left"
    assert board.own_beats == list(range(1, len(board.own_beats) + 1))


def test_stop_requests_of_others_are_seen_by_the_thread(board: MemoryBoard) -> None:
    found = Health(board, 0, INFOS)
    beats_of(board, 2)
    assert not found.is_asked_to_stop()
    board.stop = True
    wait_for(found.is_asked_to_stop)
    board.stop = False
    beats_of(board, 3)
    assert found.is_asked_to_stop()
    found.close()


def test_store_that_is_gone_is_noticed_and_blamed_on_no_rank(
    board: MemoryBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_SECONDS", 0.3)
    found = Health(board, 1, INFOS)
    board.is_broken = True
    wait_for(lambda: found._is_cut_off)
    sentence = r"^rank 1 \(pid 0 on host 1\) has had no answer from the store of the run on host 0 for 0.3 s: .*\.$"
    with pytest.raises(WorkerError, match=sentence):
        found.check()
    found.close()


def test_silence_ends_with_the_next_heartbeat(board: MemoryBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "SILENT_SECONDS", 0.3)
    found = Health(board, 0, INFOS)
    wait_for(lambda: found._silent is not None)

    def is_well() -> bool:
        board.found_beats = [beat + 1 for beat in board.found_beats]
        return found._silent is None

    wait_for(is_well)
    found.close()


@pytest.mark.parametrize("name", sorted(name for name, kind in vars(errors).items() if isinstance(kind, type)))
def test_errors_of_other_ranks_keep_their_class(name: str) -> None:
    report = json.dumps({"error": name, "text": "the text.", "traceback": "the trace"}).encode()
    found = error_of(INFOS[1], report)
    kind = vars(errors)[name]
    if issubclass(kind, errors.RemudaError) and kind is not errors.Interrupted:
        assert (type(found), str(found)) == (kind, "rank 1 (pid 0 on host 1): the text.")
    else:
        assert (type(found), str(found)) == (WorkerError, f"rank 1 (pid 0 on host 1): {name}: the text.")
    assert found.__notes__ == ["the trace"]


def test_reports_that_cannot_be_read_are_worker_errors() -> None:
    for name in ("RemudaErrorX", "annotations", "nearest", "difflib"):
        report = json.dumps({"error": name, "text": "t", "traceback": ""}).encode()
        assert str(error_of(INFOS[1], report)).endswith(f"): {name}: t")


@pytest.mark.parametrize("text", ["é", "日本", "\\", "\ud800"])
def test_reports_of_any_length_and_script_can_be_read(text: str) -> None:
    """The traceback loses its beginning, never a part of a character."""
    report = report_of(ConfigError(f"{text}: the value. " + text * 40_000), named=False)
    assert len(report) <= MAX_ERROR_BYTES
    found = error_of(INFOS[1], report)
    assert type(found) is ConfigError
    assert f"): {text.encode(errors='replace').decode()}: the value." in str(found)
