"""Requests and answers in shared memory, where each slot belongs to one worker."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from remuda.processes.requests import ANY, Answers, Requests, layout, server_of


def both_sides(slots: int, workers: int) -> tuple[Requests, list[Answers]]:
    arrays: dict[str, Any] = {name: np.zeros(*entry) for name, entry in layout(slots, workers, stats_bytes=8).items()}
    return Requests(arrays, exclusive=True), [Answers(arrays, worker, exclusive=True) for worker in range(workers)]


@pytest.mark.parametrize(("slots", "workers"), [(1, 1), (3, 3), (5, 3), (10, 4), (7, 2)])
def test_every_slot_has_one_server_and_every_worker_a_slot(slots: int, workers: int) -> None:
    requests, answers = both_sides(slots, workers)
    owners = [server_of(slot, slots, workers) for slot in range(slots)]
    assert owners == sorted(owners), "a worker must have neighboring slots"
    assert set(owners) == set(range(workers))
    assert max(map(owners.count, owners)) - min(map(owners.count, owners)) <= 1, "shares must be equal"
    assert [list(of) for of in requests.servers] == [[owner] for owner in owners]
    assert [own.slots for own in answers] == [
        [slot for slot, owner in enumerate(owners) if owner == worker] for worker in range(workers)
    ]


def test_only_the_owner_of_a_slot_receives_its_request() -> None:
    requests, answers = both_sides(5, 3)  # slots 0 1, 2 3, 4
    for own in answers:
        assert own.sleep(), "there is no request, so the worker may sleep"
    assert requests.ask(2, 8) == [1]
    assert [own.is_asked() for own in answers] == [False, True, False]
    assert [own.oldest() for own in answers] == [None, (8, 2), None]
    assert requests.pending(2, 8) == [1]
    assert [requests.unanswered(worker) for worker in range(3)] == [[], [2], []]
    assert not requests.is_done(2, 8)
    assert not answers[1].give(2, 8, 0.5, b""), "the parent is awake and must not be woken"
    assert requests.is_done(2, 8)
    assert (requests.pending(2, 8), requests.unanswered(1), requests.busy(2)) == ([], [], 0.5)
    assert not answers[1].is_asked()


def test_worker_answers_the_oldest_request_of_its_slots_first() -> None:
    requests, answers = both_sides(5, 3)
    for slot, number in ((1, 4), (4, 8), (0, 12)):
        requests.ask(slot, number)
    assert answers[0].oldest() == (4, 1)
    answers[0].give(1, 4, 0.0, b"")
    assert answers[0].oldest() == (12, 0)
    assert answers[2].oldest() == (8, 4)


def test_parent_that_waits_for_any_request_is_woken_by_the_first_answer() -> None:
    requests, answers = both_sides(3, 3)
    for slot in range(3):
        requests.ask(slot, 4 * (slot + 1))
    requests.sleep(ANY)
    assert answers[2].give(2, 12, 0.0, b"")
    requests.wake()
    assert not answers[0].give(0, 4, 0.0, b"")
    requests.sleep(8)
    assert answers[1].give(1, 8, 0.0, b"")


def test_statistics_belong_to_a_slot_and_its_owner() -> None:
    requests, answers = both_sides(5, 3)
    requests.ask(3, 4)
    assert answers[1].has_room(3, b"12345678")
    assert not answers[1].has_room(3, b"123456789")
    answers[1].give(3, 4, 0.0, b"stats")
    assert requests.has_stats(3, 4)
    assert not requests.has_stats(2, 4)
    assert requests.stats(1, 3, 4) == b"stats"
    assert requests.stats(1, 3, 8) == b"", "there are no statistics for that number"
    requests.discard_stats(1, 3)
    assert not requests.has_stats(3, 4)
    requests.ask(3, 8)
    answers[1].give(3, 8, 0.0, None)
    assert requests.stats(1, 3, 8) is None, "these statistics are sent through the link"


def test_replacement_begins_with_unanswered_requests() -> None:
    """The answers of the lost worker are in shared memory and are not repeated."""
    slots, workers = 4, 2
    arrays: dict[str, Any] = {name: np.zeros(*entry) for name, entry in layout(slots, workers, stats_bytes=8).items()}
    requests, lost = Requests(arrays, exclusive=True), Answers(arrays, 1, exclusive=True)
    requests.ask(2, 4)
    requests.ask(3, 8)
    lost.give(2, 4, 0.0, b"")
    assert Answers(arrays, 1, exclusive=True).oldest() == (8, 3)
