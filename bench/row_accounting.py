"""Check the row accounting of replays that other processes write to, by recorded sequences of events.

    python bench/row_accounting.py                       # names of all sequences
    python bench/row_accounting.py prioritized-2         # a line of JSON for each event, then the sha256 of them all

Runs under `async` are never the same twice, so bench/fingerprints.py cannot compare what they learn. Instead, this
script runs on both source trees and plays the same events in one process: writers append rows, die in the middle of
an append and are replaced; the reader synchronizes, commits a round, draws, gives feedback, pauses the writers, saves
and resumes. After every event all counts are recorded, and for every draw its keys and the sha256 of the batch.

A sequence depends on its name alone and not on what a replay returns. bench/row_accounting_names.py holds the names
of classes, methods, arguments and counts that differ between trees.
"""

import copy
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fingerprint_job import arrays_in, attempt, joined, sha256_of
from row_accounting_names import construct, counts_of, find_class, find_method, look_up

import remuda

# --- envs -------------------------------------------------------------------------------------------------------

GROUPS, WIDTH, CAPACITY = 3, 2, 40  # number of groups of envs, envs per group, rows stored per env
FRAMES, SIDE, INTERVAL = 3, 2, 5


class WriterDied(BaseException):
    """Raised in the middle of an append to simulate the death of the writer."""


class Fatal:
    """An array that raises WriterDied when it is copied, after the fields before it have been written."""

    def __init__(self, array: Any) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, index: Any) -> Any:
        return Fatal(self.array[index])

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise WriterDied


def rows_at(time: Any, env: Any, first: int) -> Any:
    """Return the rows of these envs at these times. The first episodes begin at time `first` and have 5 to 8 steps;
    every other episode terminates, the rest are truncated, and a reset row follows each."""
    time, env = np.broadcast_arrays(time, env)
    length = 5 + env % 4
    episode, age = np.divmod(time - first, length + 1)
    mask = age < length
    back = np.arange(FRAMES)[::-1]
    before = -10 * (time - age)[..., None] + age[..., None] - back  # frames before the first of an episode
    frame = np.where(back <= age[..., None], time[..., None] - back, before) * 16 + env[..., None]
    obs = np.broadcast_to(frame[..., None, None], (*frame.shape, SIDE, SIDE))
    is_end = mask & (age == length - 1) & (episode % 2 == 1)
    reward, discount = np.where(mask, (time * 31 + env * 17) % 101, 0), np.where(is_end, 0, 1)
    return find_class("Row")(obs, 7 * time + env + 1, reward.astype(np.float32), discount.astype(np.float32), mask)


def td_error_of(first: int, rows: int, group: int) -> np.ndarray[Any, Any]:
    """Return TD errors [rows, envs of the group]; nan stands for unknown ones."""
    number = np.arange(first, first + rows)[:, None] * 13 + np.arange(group * WIDTH, (group + 1) * WIDTH) * 7
    return np.where(number % 5 == 0, np.nan, number % 11 / 4).astype(np.float32)


# --- replays ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How to set up a replay. `options` replace those in BATCHES."""

    what: str  # uniform, prioritized or sequences
    has_frames: bool = False
    has_td_error: bool = False
    options: dict[str, Any] = field(default_factory=dict)


BATCHES = {"ratio": 0.7, "warm_up": 20, "most_per_round": 3}
KINDS = {
    "uniform": Kind("uniform"),
    "always-due": Kind("uniform", options={"ratio": None}),
    "throttled": Kind("uniform", options={"lead": 30, "ratio": 0.5}),
    "prioritized": Kind("prioritized"),
    "prioritized-frames": Kind("prioritized", has_frames=True),
    "prioritized-td-error": Kind("prioritized", has_td_error=True),
    "sequences": Kind("sequences"),
    "sequences-frames": Kind("sequences", has_frames=True, options={"most_per_round": None}),
    "sequences-throttled": Kind("sequences", options={"lead": 30}),
    "sequences-td-error": Kind("sequences", has_td_error=True),
}
SEEDS, EVENTS = 4, 250
SEQUENCES = [f"{kind}-{seed}" for kind in [*KINDS, "buffer", "buffer-prioritized"] for seed in range(SEEDS)]


def make_ring(kind: Kind, fds: Any = None) -> Any:
    number = np.zeros((), np.float32)
    example = find_class("Row")(
        np.zeros((FRAMES, SIDE, SIDE), np.int64), np.zeros((), np.int64), number, number, np.zeros((), bool)
    )
    size = (example, CAPACITY, GROUPS * WIDTH)
    if kind.has_frames:
        return construct("FrameRing", *size, FRAMES, GROUPS, fds)
    has_td_error = {"has_td_error": True} if kind.has_td_error and kind.what != "sequences" else {}
    return construct("Ring", *size, GROUPS, fds, **has_td_error)


def make_replay(kind: Kind) -> Any:
    ring, options = make_ring(kind), {**BATCHES, "n_step": 3, "gamma": 0.5, "is_shared": True, **kind.options}
    if kind.what == "sequences":
        options |= {"burn_in": 2, "length": 3, "interval": INTERVAL, "priorities": 0.9, "batch_size": 4, "seed": 2}
        options |= {"has_td_error": True} if kind.has_td_error else {}
        return construct("SequenceReplay", ring, state_of(0, [0]), **options)
    priorities = construct("Priorities", ring, 0.6, is_shared=True) if kind.what == "prioritized" else None
    return construct("TransitionReplay", ring, batch_size=12, seed=1, priorities=priorities, **options)


def state_of(time: int, env: Any) -> Any:
    """Return recurrent states whose values encode the time and the env that they belong to."""
    env = torch.as_tensor(env, dtype=torch.float32)
    return (torch.stack([torch.full_like(env, time), env], -1), env + time)


class Writer:
    """A worker's side of a replay: appends the rows of one group to the shared memory."""

    def __init__(self, kind: Kind, group: int, fds: Any, time: int) -> None:
        self.kind, self.group = kind, group
        self.time = self.first = time  # time of the next row, time at which the first episode began
        self.ring = make_ring(kind, fds)
        self.states: Any = None
        self.without_error: list[tuple[int, int]] = []  # appends without TD errors: (first row or state, number)
        if kind.what == "sequences":
            has_td_error = {"has_td_error": True} if kind.has_td_error else {}
            self.states = construct("States", self.ring, state_of(0, [0]), INTERVAL, fds[-1], **has_td_error)

    def append(self, rows: int, fatal: str | None = None) -> bool:
        """Append rows if the reader allows it. `fatal` is a field of the rows, at which the writer dies."""
        if not find_method("may_write", self.ring, look_up(self.ring, "counters"))():
            return False
        env, first = np.arange(self.group * WIDTH, (self.group + 1) * WIDTH), int(self.ring.written[self.group])
        if self.states is not None:
            stored = self.num_states()
            number = int(stored[self.group])
            self.states.store(state_of(self.time, env), self.group)
            if stored[self.group] > number:
                self.without_error.append((number, 1))
        else:
            self.without_error.append((first, rows))
        given = rows_at(np.arange(self.time, self.time + rows)[:, None], env, self.first)
        if fatal is not None:
            given = given.replace(**{fatal: Fatal(getattr(given, fatal))})
        self.ring.append(given, rows_at(self.time + rows, env, self.first).obs, self.group)
        self.time += rows
        return True

    def num_states(self) -> Any:
        """Return the number of states of each group, as an array that later calls of `store` update."""
        stored = look_up(self.states, "counters.written")
        return look_up(self.states, "stored") if stored is None else stored

    def set_td_error(self) -> bool:
        """Set the TD errors of the oldest append that has none yet."""
        if not self.kind.has_td_error or not self.without_error:
            return False
        first, rows = self.without_error.pop(0)
        errors = td_error_of(first, rows, self.group)
        if self.states is not None:
            find_method("set_td_error", self.states)(self.group, first, errors[0])
        else:
            find_method("set_td_error", self.ring)(self.group, first, errors)
        return True

    def close(self) -> None:
        self.ring.close()
        if self.states is not None:
            self.states.memory.close()


# --- events -----------------------------------------------------------------------------------------------------

Event = dict[str, Any]
ODDS = {
    "write": 30,
    "sync": 18,
    "batches": 14,
    "td_error": 12,
    "commit": 7,
    "draw": 5,
    "late_feedback": 4,
    "die": 4,
    "lose": 2,
    "hold": 2,
    "pause": 2,
    "statistics": 3,
    "save": 3,
    "resume": 2,
    "cut": 1,
}
NEEDS_ALL = ("save", "resume", "cut", "hold")  # events that wait for unfinished appends of all writers


def make_events(seed: int, count: int = EVENTS) -> Iterator[Event]:
    """Yield a sequence of events. A writer that died has no events until the reader has received its "lose"."""
    rng = np.random.default_rng((seed, 24))
    names, odds = list(ODDS), np.array(list(ODDS.values())) / sum(ODDS.values())
    dead: set[int] = set()
    for _ in range(count):
        name, group = str(rng.choice(names, p=odds)), int(rng.integers(GROUPS))
        rows, left = int(rng.choice([1, 2, 5, 5, 5, 9, 45])), int(rng.integers(10, 400))
        field, unlimited = str(rng.choice(["obs", "action", "reward", "discount"])), bool(rng.random() < 0.6)
        if dead and (name in NEEDS_ALL or name == "lose" or rng.random() < 0.2):
            group = min(dead)
            dead.remove(group)
            yield {"event": "lose", "group": group}
        if name == "lose":
            yield {"event": name, "group": group}
        elif name == "die" and group not in dead:
            dead.add(group)
            yield {"event": name, "group": group, "rows": rows, "field": field}
        elif name in ("write", "td_error") and group not in dead:
            yield {"event": name, "group": group, "rows": rows}
        elif name == "sync":
            yield {"event": name, "left": None if unlimited else left}
        elif name not in ("write", "td_error", "die") and not (dead and name in NEEDS_ALL):
            yield {"event": name}


class Player:
    """Plays events on a replay and its writers."""

    def __init__(self, kind: Kind, directory: Path) -> None:
        self.kind, self.directory, self.late = kind, directory, None
        self.replay, self.writers = make_replay(kind), list[Writer]()
        self.start_writers([0] * GROUPS)

    def start_writers(self, times: list[int]) -> None:
        fds = self.replay.fds
        self.writers = [Writer(self.kind, group, fds, time) for group, time in enumerate(times)]

    def play(self, event: Event) -> Any:
        """Play one event and return its result, which is "refused" if the replay raises an error."""
        try:
            return getattr(self, event["event"])(**{name: value for name, value in event.items() if name != "event"})
        except (ValueError, remuda.RemudaError):  # for example, nothing can be drawn; messages may differ
            return "refused"

    def write(self, group: int, rows: int) -> bool:
        return self.writers[group].append(rows)

    def td_error(self, group: int, rows: int) -> bool:
        return self.writers[group].set_td_error()

    def die(self, group: int, rows: int, field: str) -> Any:
        try:
            return self.writers[group].append(rows, fatal=field)
        except WriterDied:
            return "died"

    def lose(self, group: int) -> int:
        begins = int(find_method("on_writer_lost", self.replay)(group))
        time = self.writers[group].time + 50
        self.writers[group].close()
        self.writers[group] = Writer(self.kind, group, self.replay.fds, time)
        return begins

    def sync(self, left: int | None) -> Any:
        return [int(find_method("sync", self.replay)(left)), bool(self.replay.is_due)]

    def commit(self) -> None:
        find_method("commit", self.replay)()

    def batches(self) -> Any:
        found = []
        for batch in self.replay.batches():
            found.append(self._record(batch))
            if self.late is None:
                self.late = batch.key.copy()
            self._feed_back(batch.key, 0)
        return [*found, bool(self.replay.is_due)]

    def draw(self) -> Any:
        return self._record(self.replay.draw())

    def late_feedback(self) -> Any:
        """Give feedback for an earlier batch, some rows of which may have been overwritten since."""
        key, self.late = self.late, None
        if key is not None:
            self._feed_back(key, 3)
        return key is not None

    def _feed_back(self, key: Any, shift: int) -> None:
        error = (key @ np.array([5, 3]) + shift) % 17 / 8
        self.replay.feedback(key, torch.from_numpy(error.astype(np.float32)))

    def _record(self, batch: Any) -> Any:
        return {"key": batch.key.tolist(), "sha256": joined(sorted(map(sha256_of, arrays_in(batch))))}

    def hold(self) -> Any:
        ring, writer = self.replay.ring, self.writers[0].ring
        with find_method("pause_writers", ring, look_up(ring, "counters"))():
            may_write = find_method("may_write", writer, look_up(writer, "counters"))
            return [counts_of(self.replay), bool(may_write())]

    def pause(self) -> Any:
        with self.replay.paused():
            return [self.writers[0].append(5), counts_of(self.replay)]

    def statistics(self) -> Any:
        rollouts = find_method("fresh", self.replay)()
        return [joined(sorted(map(sha256_of, arrays_in(rollout)))) for rollout in rollouts]

    def cut(self) -> None:
        self.replay.cut()
        for writer in self.writers:
            writer.first = writer.time

    def save(self) -> Any:
        return len(self.replay.save(self.directory)["files"])

    def resume(self) -> None:
        """Continue with a new replay that loads what the old one saved."""
        state, old, writers = copy.deepcopy(self.replay.save(self.directory)), self.replay, self.writers
        self.replay = make_replay(self.kind)
        self.replay.load(self.directory, state)
        self.start_writers([writer.time for writer in writers])
        for each in (*writers, old):
            each.close()

    def close(self) -> None:
        for each in (*self.writers, self.replay):
            each.close()


def play_replay(kind: Kind, seed: int, directory: Path, events: int) -> Iterator[Any]:
    with ExitStack() as stack:
        player = Player(kind, directory)
        stack.callback(player.close)
        for event in [{"event": "sync", "left": None}, *make_events(seed, events)]:
            yield {**event, "result": player.play(event), **counts_of(player.replay)}


def play_buffer(prioritized: bool, seed: int, events: int) -> Iterator[Any]:
    """Add rows of all envs to a public `ReplayBuffer`, one time step at a time, and yield a line for each step."""
    from gymnasium import spaces

    rng, envs = np.random.default_rng((seed, 25)), 3
    space, actions = spaces.Box(-1e6, 1e6, (2,), np.float32), spaces.Discrete(3)
    options: dict[str, Any] = {"prioritized": prioritized, "n_step": 2, "gamma": 0.5, "seed": seed}
    with remuda.ReplayBuffer(50, space, actions, envs, **options) as buffer:
        obs = np.zeros((envs, 2), np.float32)
        for number in range(events):
            after = np.full((envs, 2), number + 1, np.float32) + np.arange(envs, dtype=np.float32)[:, None] / 8
            ends, action = rng.random((2, envs)) < 0.1, rng.integers(3, size=envs)
            buffer.add(obs, action, rng.integers(5, size=envs), *ends, after)
            obs = after if rng.random() < 0.95 else after + 100  # sometimes the env was reset
            line: dict[str, Any] = {"event": "add", "size": len(buffer)}
            if len(buffer) and rng.random() < 0.5:
                sample = buffer.sample(int(rng.choice([4, 8])))
                line |= {"key": sample.key.tolist(), "sha256": joined(sorted(map(sha256_of, arrays_in(sample))))}
                if prioritized:
                    buffer.update_priorities(sample.key, torch.from_numpy(sample.key @ np.array([5, -3]) % 17 / 8))
            yield line


def play(name: str, directory: Path, events: int = EVENTS) -> dict[str, Any]:
    """Play the sequence `name`; return a line for each event, and the sha256 of all lines."""
    kind, seed = name.rsplit("-", 1)
    if kind.startswith("buffer"):
        lines = list(play_buffer(kind == "buffer-prioritized", int(seed), events))
    else:
        lines = list(play_replay(KINDS[kind], int(seed), directory, events))
    text = "\n".join(json.dumps(line) for line in lines)
    return {"lines": lines, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:2] != ["--job"]:
        for name in sys.argv[1:]:
            folder = Path(f"row-accounting-{name}")
            found = play(name, folder)
            shutil.rmtree(folder, ignore_errors=True)
            print(*map(json.dumps, found["lines"]), found["sha256"], sep="\n")
        if not sys.argv[1:]:
            print(*SEQUENCES, sep="\n")
        return
    print(json.dumps({"package": str(Path(remuda.__file__).parent)}), flush=True)
    for case in sys.stdin.read().split():
        name = case.split("/")[-1]
        found = attempt(lambda name=name: play(name, Path(sys.argv[2]) / name))  # type: ignore[misc]
        print(json.dumps({"case": case, **found}), flush=True)


if __name__ == "__main__":
    main()
