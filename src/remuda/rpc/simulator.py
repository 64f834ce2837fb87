"""Simulation of a group with a virtual clock and network: many peers, any mixture of faults, the same for every seed.

    simulation = Simulation(seed=7, peers=4, faults=Faults(loss=0.05, crashes=3))
    simulation.run(seconds=30.0)                 # raises Violation; its text contains the last events
    print(simulation.committed)

The simulator drives the state machines of `remuda.rpc.core` that production uses, and checks their invariants
(docs/rpc/protocol.md) whenever an update is committed or applied. A reduction is simulated in its plainest form:
every member sends its contribution to all others.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from remuda.rpc.core.accumulator import OPEN, Accumulator
from remuda.rpc.core.broker import Broker, BrokerState, Timing
from remuda.rpc.core.contributions import Held
from remuda.rpc.core.messages import (
    BROKER,
    Abandon,
    Contribute,
    Effects,
    Header,
    Install,
    Message,
    Send,
    Store,
    TakeState,
)

TICK = 0.05  # seconds between two ticks of a machine
EVENTS_SHOWN = 60  # number of events in the text of a Violation
SETTLE = 20.0  # seconds without faults at the end of a run, in which the group must make progress


class Faults(msgspec.Struct, frozen=True):
    """Rates of faults. Each number of events is spread over the run at random."""

    delay: float = 0.002  # mean of a message's delay, in seconds
    loss: float = 0.0  # fraction of messages that are lost
    duplication: float = 0.0  # fraction of messages that arrive twice
    crashes: int = 0  # peers that die; some return as new processes
    pauses: int = 0  # peers that do nothing for up to 3 s
    partitions: int = 0  # times that some nodes are cut off from the others for up to 5 s
    clock_jumps: int = 0  # times that the clock of a peer jumps forwards by up to 5 s
    broker_crashes: int = 0  # times that the broker dies and returns from its file after up to 3 s
    joins: int = 0  # peers that join during the run


class Violation(AssertionError):
    """An invariant did not hold, or the group made no progress without faults."""


class Contribution(Message, frozen=True):
    """What a member contributes to the reduction of an update, sent to every other member until it is committed."""

    peer: str
    version: int
    held: Held | None


class SimulatedPeer:
    """A process with an accumulator, a main loop and its part of the reductions."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name
        setting = simulation.setting
        self.machine = Accumulator(name, simulation.timing, setting.virtual_batch, setting.window)
        self.speed = simulation.random.uniform(0.02, 0.3)  # mean seconds between two gradients
        self.offset = 0.0  # of the peer's clock
        self.is_alive = True
        self.paused_until = 0.0
        self.digests = [0]  # digest of the state after every version that the main loop has applied
        self.received: dict[tuple[int, int], dict[str, Held | None]] = {}  # contributions by (epoch, version)
        self._last_sent = 0.0

    @property
    def now(self) -> float:
        return self.simulation.now + self.offset

    def receive(self, message: Message, payload: object) -> None:
        if isinstance(message, Contribution):
            if message.epoch >= self.machine.epoch:
                self.received.setdefault((message.epoch, message.version), {})[message.peer] = message.held
                self._reduce()
        else:
            self.do(self.machine.on_message(self.now, message, payload))

    def tick(self) -> None:
        self.do(self.machine.on_tick(self.now))
        if self.now - self._last_sent > self.simulation.timing.resend:
            self._last_sent = self.now
            self._send_contributions()

    def compute(self) -> None:
        """Let the main loop apply what is ready, and contribute a gradient if one is wanted."""
        while self.machine.ready:
            version, result = self.machine.ready[0]
            self.digests.append(hash((self.digests[-1], result)))
            self.simulation.check_applied(self, version, result)
            self.do(self.machine.on_applied())
        if self.machine.wants_gradients:
            given = ((self.name, self.machine.own.sequence + 1),)
            samples = self.simulation.random.randint(1, self.simulation.setting.contribution)
            self.simulation.samples[given[0]] = samples
            self.do(self.machine.give(given, samples, self.machine.applied))

    def do(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.simulation.send(self.name, effect.to, effect.message, effect.payload)
            elif isinstance(effect, Contribute):
                found = self.received.setdefault((effect.epoch, effect.version), {})
                found[self.name] = effect.held  # type: ignore[assignment]
                self._send_contributions()
                self._reduce()
            elif isinstance(effect, Abandon):
                self.received = {key: value for key, value in self.received.items() if key[0] >= effect.epoch}
            elif isinstance(effect, TakeState):
                state = (list(self.digests), self.machine.applied)
                self.do(self.machine.on_state(effect.version, state))
            elif isinstance(effect, Install):
                assert isinstance(effect.state, tuple)
                digests, version = effect.state
                self.digests = list(digests)
                self.simulation.check_installed(self, version)

    def _send_contributions(self) -> None:
        machine = self.machine
        for (epoch, version), found in self.received.items():
            if epoch == machine.epoch and self.name in found:
                message = Contribution(epoch, self.name, version, found[self.name])
                for peer in machine.members:
                    if peer != self.name:
                        self.simulation.send(self.name, peer, message)

    def _reduce(self) -> None:
        """Complete reductions to which all members have contributed, and forget those that are long committed."""
        machine = self.machine
        if machine.phase != OPEN:
            return
        for (epoch, version), found in sorted(self.received.items()):
            if epoch != machine.epoch or version in machine.prepared or not set(machine.members) <= set(found):
                continue
            present = [(peer, held) for peer in machine.members if (held := found[peer]) is not None]
            result = tuple(one for _, held in present for one in held.gradient)
            header = Header(
                version,
                epoch,
                hash(result),
                sum(held.gradients for _, held in present),
                len(machine.members) - len(present),
                sum(held.samples for _, held in present),
                tuple((peer, held.last) for peer, held in present),
            )
            self.do(machine.on_reduced(header, result))
        oldest = machine.version - 2 * machine.window - 1
        self.received = {key: value for key, value in self.received.items() if key[1] > oldest}


class Setting(msgspec.Struct, frozen=True):
    """What the group does."""

    peers: int = 3
    virtual_batch: int = 8
    contribution: int = 4  # largest number of samples of one contribution
    window: int = 1


class Simulation:
    """A group, its broker, its network and its faults."""

    def __init__(
        self,
        seed: int,
        setting: Setting | None = None,
        faults: Faults | None = None,
        timing: Timing | None = None,
    ) -> None:
        self.setting, self.faults, self.timing = setting or Setting(), faults or Faults(), timing or Timing()
        self.seed, self.random = seed, random.Random(seed)
        self.now = 0.0
        self.file: BrokerState | None = None  # the broker's file
        self.broker: Broker | None = Broker(self.timing, 0.0)
        self.peers: dict[str, SimulatedPeer] = {}
        self.samples: dict[object, int] = {}  # by contribution
        self.history: dict[tuple[int, int], object] = {}  # content of every committed version, by (lineage, version)
        self.digests: dict[tuple[int, int], int] = {}
        self.committed = 0
        self.has_faults = True
        self.events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._cut_off: set[str] = set()  # nodes that the others cannot reach

    def run(self, seconds: float) -> None:
        """Run with faults for `seconds`, and then without, and check that all peers that live make progress."""
        for index in range(self.setting.peers):
            self.start_peer(f"p{index}")
        self.after(0.0, self._tick_broker)
        self._plan_faults(seconds)
        self._run_until(seconds)
        self.has_faults, before = False, self.committed
        self._cut_off = set()
        self._run_until(seconds + SETTLE)
        living = [peer for peer in self.peers.values() if peer.is_alive]
        if not living or not any(peer.name in self._carriers() for peer in living):
            return  # all carriers are dead: the group waits for them, as it must
        if self.committed <= before:
            self.fail("no update was committed after the faults had ended")
        for peer in living:
            if peer.machine.phase != OPEN or peer.machine.version < self.committed - 2 * self.setting.window:
                self.fail(f"{peer.name} is at version {peer.machine.version} ({peer.machine.phase})")

    # --- events -----------------------------------------------------------------------------------------------------

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + seconds, self._count, call))

    def _run_until(self, end: float) -> None:
        while self._queue and self._queue[0][0] <= end:
            self.now, _, call = heapq.heappop(self._queue)
            call()
        self.now = end

    def send(self, source: str, to: str, message: Message, payload: object = None) -> None:
        copies = 1
        if self.has_faults:
            copies -= self.random.random() < self.faults.loss
            copies += self.random.random() < self.faults.duplication
        for _ in range(copies):
            self.after(
                self.random.expovariate(1 / self.faults.delay), lambda: self._deliver(source, to, message, payload)
            )

    def _deliver(self, source: str, to: str, message: Message, payload: object) -> None:
        if (source in self._cut_off) != (to in self._cut_off):
            return
        if to == BROKER:
            if self.broker is not None:
                self._do_broker(self.broker.on_message(self.now, message))
            return
        peer = self.peers.get(to)
        if peer is None or not peer.is_alive:
            return
        if peer.paused_until > self.now:  # the message waits in the process's buffers
            self.after(peer.paused_until - self.now, lambda: self._deliver(source, to, message, payload))
            return
        self.note(f"{source} -> {to}: {message}")
        peer.receive(message, payload)

    def start_peer(self, name: str) -> None:
        peer = self.peers[name] = SimulatedPeer(self, name)
        self.note(f"{name} starts")
        self._repeat(peer, lambda: TICK, peer.tick)
        self._repeat(peer, lambda: self.random.expovariate(1 / peer.speed), peer.compute)

    def _repeat(self, peer: SimulatedPeer, pause: Callable[[], float], call: Callable[[], None]) -> None:
        def again() -> None:
            if not peer.is_alive:
                return
            if peer.paused_until > self.now:
                self.after(peer.paused_until - self.now, again)
                return
            call()
            self.after(pause(), again)

        self.after(pause(), again)

    def _tick_broker(self) -> None:
        if self.broker is not None:
            self._do_broker(self.broker.on_tick(self.now))
        self.after(TICK, self._tick_broker)

    def _do_broker(self, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Store):
                assert self.broker is not None
                self.file = self.broker.state
                self.check_carriers()
            elif isinstance(effect, Send):
                self.send(BROKER, effect.to, effect.message, effect.payload)

    # --- faults -----------------------------------------------------------------------------------------------------

    def _plan_faults(self, seconds: float) -> None:
        plans: list[tuple[int, Callable[[], None]]] = [
            (self.faults.crashes, self._crash),
            (self.faults.pauses, self._pause),
            (self.faults.partitions, self._partition),
            (self.faults.clock_jumps, self._jump),
            (self.faults.broker_crashes, self._crash_broker),
            (self.faults.joins, self._join),
        ]
        for count, call in plans:
            for _ in range(count):
                self.after(self.random.uniform(0.5, seconds), call)

    def _any_peer(self) -> SimulatedPeer | None:
        living = [peer for peer in self.peers.values() if peer.is_alive]
        return self.random.choice(living) if living else None

    def _crash(self) -> None:
        if peer := self._any_peer():
            peer.is_alive = False
            self.note(f"{peer.name} crashes")
            if self.random.random() < 0.7:
                self.after(self.random.uniform(0.1, 3.0), self._join)

    def _join(self) -> None:
        self.start_peer(f"p{len(self.peers)}")

    def _pause(self) -> None:
        if peer := self._any_peer():
            peer.paused_until = self.now + self.random.uniform(0.1, 3.0)
            self.note(f"{peer.name} pauses until {peer.paused_until:.2f}")

    def _partition(self) -> None:
        nodes = [BROKER, *self.peers]
        self._cut_off = set(self.random.sample(nodes, self.random.randint(1, len(nodes) // 2)))
        self.note(f"partition: {sorted(self._cut_off)}")
        self.after(self.random.uniform(0.2, 5.0), self._heal)

    def _heal(self) -> None:
        self._cut_off = set()
        self.note("the partition ends")

    def _jump(self) -> None:
        if peer := self._any_peer():
            peer.offset += self.random.uniform(0.1, 5.0)
            self.note(f"the clock of {peer.name} jumps")

    def _crash_broker(self) -> None:
        self.broker = None
        self.note("the broker crashes")
        self.after(self.random.uniform(0.1, 3.0), self._restart_broker)

    def _restart_broker(self) -> None:
        if self.broker is None:
            self.broker = Broker(self.timing, self.now, self.file)
            self.note("the broker returns")

    # --- invariants -------------------------------------------------------------------------------------------------

    def note(self, text: str) -> None:
        self.events.append(f"{self.now:9.4f} {text}")

    def fail(self, text: str) -> None:
        trace = "\n".join(self.events)
        raise Violation(f"seed {self.seed}, {self.setting}, {self.faults}: {text}\n{trace}")

    def _carriers(self) -> frozenset[str]:
        return self.file.carriers if self.file is not None else frozenset()

    def check_applied(self, peer: SimulatedPeer, version: int, result: Any) -> None:
        """Check I1, I6 and I7 for an update that a peer applies."""
        key = peer.machine.lineage, version
        if version != len(peer.digests) - 1:
            self.fail(f"I7: {peer.name} applies version {version} after {len(peer.digests) - 2}")
        if self.history.setdefault(key, result) != result:
            self.fail(f"I1: {peer.name} applies {result} as version {version}, others {self.history[key]}")
        if self.digests.setdefault(key, peer.digests[-1]) != peer.digests[-1]:
            self.fail(f"I1: {peer.name} has another state after version {version} than others")
        if version > self.committed:
            self.committed = version
            self._check_counted(version, result)

    def _check_counted(self, version: int, result: Any) -> None:
        for one in result:
            if one not in self.samples:
                self.fail(f"I7: {one} of version {version} was counted before, or was never contributed")
        total = sum(self.samples.pop(one) for one in result)
        if total < self.setting.virtual_batch:
            self.fail(f"I6: version {version} has {total} samples")

    def check_installed(self, peer: SimulatedPeer, version: int) -> None:
        """Check I5: a state that is sent is that of one version, between two updates."""
        key = peer.machine.lineage, version
        if version != len(peer.digests) - 1 or self.digests.get(key, peer.digests[-1]) != peer.digests[-1]:
            self.fail(f"I5: {peer.name} installs a state that is not the one of version {version}")

    def check_carriers(self) -> None:
        """Check I3: every carrier that lives has committed or prepared what any peer has applied."""
        for name in self._carriers():
            peer = self.peers[name]
            if peer.is_alive and peer.machine.version + len(peer.machine.prepared) < self.committed:
                self.fail(f"I3: {name} is a carrier at version {peer.machine.version}, another at {self.committed}")
