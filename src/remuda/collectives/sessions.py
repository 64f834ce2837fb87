"""Sessions: how the processes of all ranks find each other in a store that outlives them.

    session = Session(store, rank, size, host, while_waiting)
    session.check()             # raises an error if another rank has failed or was started again
    session.store               # the store, with keys of this session only

torchrun keeps one store while it starts the ranks again, so the store also holds keys of processes that have ended.
Their restart counts cannot tell the starts apart, because every torchrun agent counts for itself. Instead, every
process writes an entry with a new random id. Rank 0 lists the entries of all ranks under a new random name of the
session, and lists them anew under another name whenever an entry changes. A process confirms a list that contains its
own id, and the session begins once all ranks have confirmed the same list. Processes that have ended confirm nothing.

A rank that fails before the session begins writes its error into its entry (`publish_failure`), so that others do not
wait for it.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from remuda.collectives.health import RankInfo, error_of, report_of
from remuda.errors import WorkerError
from remuda.processes.identity import machine_id

POLL_SECONDS = 0.1
# An error that was in the store before this process began may be that of a process which has been replaced by now,
# and whose successor has not yet written its entry. It counts after this time.
STALE_SECONDS = 6.0
ENTRY, SESSION = "remuda/rank/{}", "remuda/session"


def publish_failure(store: Any, rank: int, host: str, error: BaseException) -> None:
    """Tell all ranks that wait for this rank, or will, that it has failed."""
    report = report_of(error, named=False).decode()
    store.set(ENTRY.format(rank), json.dumps({**entry(host), "error": report}))


def entry(host: str) -> dict[str, Any]:
    return {"id": uuid.uuid4().hex, "host": host, "pid": os.getpid(), "machine": machine_id()}


class Session:
    """The processes of all ranks, each of which knows that all others are there."""

    def __init__(
        self, store: Any, rank: int, size: int, host: str, while_waiting: Callable[[], object], seconds: float
    ) -> None:
        """Wait until the session has begun; raise WorkerError after `seconds`, or the error of a rank that failed."""
        self._store, self._rank, self._while_waiting = store, rank, while_waiting
        self._keys = [ENTRY.format(each) for each in range(size)]
        self._entries: list[Mapping[str, Any] | None] = [None] * size
        self._failed_at: dict[int, float] = {}  # when this process first saw the error of a rank, if it is in doubt
        self._members: list[Mapping[str, Any]] | None = None
        self._read_at, self._name, self._is_complete = 0.0, "", False
        self._own = entry(host)
        store.set(self._keys[rank], json.dumps(self._own))
        deadline = time.monotonic() + seconds
        while not self._has_begun():
            if time.monotonic() > deadline:
                missing = [number for number, found in enumerate(self._entries) if found is None]
                which = f"ranks {missing} of {size} have" if missing else "some of the ranks have"
                raise WorkerError(f"{which} not joined within {seconds:g} s.")
            self.check()
            time.sleep(POLL_SECONDS)
        self._is_complete = True
        self.store = self.part_of(store)

    def part_of(self, store: Any) -> PrefixStore:
        """Return the keys of this session in the store, given any connection to it."""
        return PrefixStore(self._name, store)

    @property
    def machines(self) -> set[str]:
        """The machines on which the ranks run (see `machine_id`)."""
        assert self._members is not None
        return {member["machine"] for member in self._members}

    def check(self) -> None:
        """Raise the error of a rank that has failed, or WorkerError if a rank of the session was started again."""
        self._while_waiting()
        now = time.monotonic()
        if now < self._read_at + POLL_SECONDS:
            return
        is_first, self._read_at, before = not self._read_at, now, self._entries
        self._entries = [json.loads(text) if text else None for text in values_of(self._store, self._keys)]
        for rank, (old, new) in enumerate(zip(before, self._entries, strict=True)):
            if rank != self._rank and new is not None:
                is_new = not is_first and (old is None or old["id"] != new["id"])
                self._check_entry(rank, new, is_new, now)

    def _check_entry(self, rank: int, new: Mapping[str, Any], is_new: bool, now: float) -> None:
        info = RankInfo(rank, new["host"], new["pid"])
        if "error" not in new:
            self._failed_at.pop(rank, None)
            if self._is_complete and self._members is not None and self._members[rank]["id"] != new["id"]:
                raise WorkerError(f"{info} was started again while the other ranks were joining.")
            return
        if is_new or now > self._failed_at.setdefault(rank, now) + STALE_SECONDS:
            raise error_of(info, new["error"].encode())

    def _has_begun(self) -> bool:
        """Take the next step towards the beginning of the session; return whether it has begun."""
        if self._rank == 0:
            return self._lead()
        (text,) = values_of(self._store, [SESSION])
        found = json.loads(text) if text else None
        if found is not None and found["name"] != self._name:
            members = found["members"]
            if len(members) == len(self._keys) and members[self._rank]["id"] == self._own["id"]:
                self._members, self._name = members, found["name"]
                self._store.set(f"{self._name}/confirmed/{self._rank}", "1")
        return bool(self._name) and bool(self._store.check([f"{self._name}/begun"]))

    def _lead(self) -> bool:
        members = [each for each in self._entries if each is not None and "error" not in each]
        if len(members) < len(self._keys):
            return False
        if members != self._members:
            self._members, self._name = members, f"remuda/{uuid.uuid4().hex}"
            self._store.set(SESSION, json.dumps({"name": self._name, "members": members}))
        if not self._store.check([f"{self._name}/confirmed/{rank}" for rank in range(1, len(self._keys))]):
            return False
        self._store.set(f"{self._name}/begun", "1")
        return True


def values_of(store: Any, keys: list[str]) -> list[bytes]:
    """Return the values of these keys, b"" for those that are not in the store, without waiting for any."""
    if not store.check(keys):
        for key in keys:
            store.compare_set(key, "", "")  # writes nothing if the key exists
    found: list[bytes] = store.multi_get(keys)
    return found
