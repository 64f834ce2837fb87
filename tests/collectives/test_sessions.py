"""Processes that find each other in a store that also holds what processes before them have left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from processes import wait_for
from torch.distributed import TCPStore

from remuda.collectives import sessions
from remuda.collectives.sessions import Session, publish_failure
from remuda.collectives.stores import StoreBoard, open_tcp_store, wait_for_keys
from remuda.errors import ConfigError, Interrupted, WorkerError


@pytest.fixture
def store() -> Any:
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)


class Member:
    """A rank that joins in a thread; the test may interrupt it, as its end would."""

    def __init__(self, store: Any, rank: int, size: int, seconds: float = 30.0) -> None:
        self.session: Session | None = None
        self.error: Exception | None = None
        self.must_stop = False
        self._arguments = (TCPStore("127.0.0.1", store.port, None, False), rank, size, f"host {rank}", self._check)
        self._seconds = seconds
        self._thread = threading.Thread(target=self._join, daemon=True)
        self._thread.start()

    def _check(self) -> None:
        if self.must_stop:
            raise Interrupted("stop")

    def _join(self) -> None:
        try:
            self.session = Session(*self._arguments, self._seconds)
        except Exception as error:
            self.error = error

    def end(self) -> None:
        self.must_stop = True
        self._thread.join()

    def result(self) -> Session:
        self._thread.join()
        assert self.session is not None, self.error
        return self.session

    def failure(self) -> Exception:
        self._thread.join()
        assert self.error is not None
        return self.error


def test_ranks_of_one_start_share_keys_and_those_of_the_next_start_see_none_of_them(store: Any) -> None:
    for _ in range(3):
        members = [Member(store, rank, 3) for rank in range(3)]
        joined = [member.result() for member in members]
        assert not joined[2].store.check(["key"])
        joined[0].store.set("key", "value")
        assert joined[2].store.get("key") == b"value"
        assert len(joined[1].machines) == 1
        for session in joined:
            session.check()


@pytest.mark.parametrize("replaced", [0, 1, 2])
def test_rank_that_is_started_again_while_others_join(replaced: int, store: Any) -> None:
    """Its first process had already written its entry, and perhaps had confirmed the list of ranks."""
    size = 3
    members = {rank: Member(store, rank, size) for rank in range(size) if rank != (replaced + 1) % size}
    time.sleep(0.5)
    members[replaced].end()
    members[replaced] = Member(store, replaced, size)
    members[(replaced + 1) % size] = Member(store, (replaced + 1) % size, size)
    joined = [members[rank].result() for rank in range(size)]
    joined[1].store.set("key", "value")
    assert all(session.store.check(["key"]) for session in joined)


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_of_a_rank_ends_the_wait_of_all_others(rank: int, store: Any) -> None:
    others = [Member(store, other, 3) for other in (0, 1) if other != rank]
    store.set(sessions.ENTRY.format(rank), '{"id": "1", "host": "h", "pid": 7, "machine": "m"}')
    time.sleep(0.5)
    start = time.monotonic()
    publish_failure(store, rank, "here", ConfigError("gamma=2: use at most 1."))
    for other in others:
        error = other.failure()
        assert type(error) is ConfigError
        assert str(error).startswith(f"rank {rank} (pid ")
        assert str(error).endswith("on here): gamma=2: use at most 1.")
    assert time.monotonic() - start < 2.0


def test_failure_before_the_others_have_started(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be that of an earlier start, whose next process is late."""
    monkeypatch.setattr(sessions, "STALE_SECONDS", 1.0)
    publish_failure(store, 1, "here", WorkerError("no memory."))
    first = Member(store, 0, 2)
    time.sleep(0.5)
    second = Member(store, 1, 2)
    first.result(), second.result()
    publish_failure(store, 1, "here", WorkerError("no memory."))
    assert str(Member(store, 0, 2).failure()).endswith("on here): no memory.")


def test_missing_ranks_are_named_and_waits_can_be_interrupted(store: Any) -> None:
    late = Member(store, 0, 3, seconds=0.5)
    assert str(late.failure()) == "ranks [1, 2] of 3 have not joined within 0.5 s."
    waiting = Member(store, 0, 3)
    start = time.monotonic()
    waiting.end()
    assert type(waiting.error) is Interrupted
    assert time.monotonic() - start < 1.0


# --- stores ---------------------------------------------------------------------------------------------------------


def raise_after(seconds: float) -> Callable[[], None]:
    deadline = time.monotonic() + seconds

    def check() -> None:
        if time.monotonic() > deadline:
            raise Interrupted("stop")

    return check


def test_waits_for_a_store_and_for_its_keys_can_be_interrupted(store: Any) -> None:
    with pytest.raises(Interrupted):
        open_tcp_store("127.0.0.1", 1, False, raise_after(0.2), 60.0)
    with pytest.raises(RuntimeError, match="Connection refused"):
        open_tcp_store("127.0.0.1", 1, False, raise_after(60.0), 0.2)
    with pytest.raises(Interrupted):
        wait_for_keys(store, ["missing"], raise_after(0.2), 60.0)
    with pytest.raises(RuntimeError, match=r"within 0\.2 s"):
        wait_for_keys(store, ["missing"], raise_after(60.0), 0.2)


class StuckStore:
    """A store whose host stops answering when the test says so."""

    def __init__(self, store: Any) -> None:
        self._store, self.answers = store, threading.Event()
        self.answers.set()

    def __getattr__(self, name: str) -> Any:
        self.answers.wait()
        return getattr(self._store, name)


def test_board_never_blocks_and_tells_that_its_store_does_not_answer(store: Any) -> None:
    stuck = StuckStore(store)
    board = StoreBoard(stuck, 0, 1, lambda: None)

    def answers() -> bool:
        board.beat(0, 7)
        time.sleep(0.02)
        try:
            return board.beats() == [7]
        except TimeoutError:
            return False

    wait_for(answers)
    stuck.answers.clear()
    time.sleep(0.1)
    start = time.monotonic()
    board.beat(0, 8)
    wait_for(lambda: not answers())
    board.ask_to_stop()
    board.pass_signal(15)
    assert time.monotonic() - start < 1.0
    stuck.answers.set()
    wait_for(lambda: board.is_asked_to_stop() and board.passed_signal() == 15)
    board.report(b"left")
    assert board.newest_reports() == [b"left"]
    board.close()
