"""Communication with worker processes: `Link` carries messages and file descriptors, `Bell` wakes a process.

    ours, theirs = Link.pair()
    ours.send({"reset": 1}, fds=[memory.fd])          # encoded as msgpack, after a length header
    messages, fds = theirs.receive()                  # does not wait; sets theirs.has_ended if `ours` was closed
    bell = Bell()
    bell.ring()                                       # never blocks; makes bell.fileno() readable
    bell.clear()

Large arrays are not sent over links but kept in shared memory.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, Self

import msgspec

HEADER = struct.Struct("<I")
CHUNK = 1 << 16
MAX_FDS = 8  # the most file descriptors that one message may carry
SEND_SECONDS = 10.0
Message = dict[str, Any]  # a decoded msgpack map
ONE = (1).to_bytes(8, sys.byteorder)  # `Bell.ring` writes 8 bytes, because an eventfd accepts nothing else


class Link:
    """One end of a socket pair that carries messages. `receive` sets `has_ended` if the other end was closed."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.has_ended = False
        self._buffer = bytearray()

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        ours, theirs = socket.socketpair()
        return cls(ours), cls(theirs)

    @classmethod
    def from_fd(cls, fd: int) -> Self:
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: object, fds: Sequence[int] = (), seconds: float | None = SEND_SECONDS) -> None:
        """Send one message, together with file descriptors.

        Raises TimeoutError if the other process does not read, so that the socket has no room for the message within
        `seconds` (None: no limit). Raises another OSError if the other process is gone.
        """
        payload = msgspec.msgpack.encode(message)
        data = HEADER.pack(len(payload)) + payload
        self.sock.settimeout(seconds)
        sent = socket.send_fds(self.sock, [data], list(fds)) if fds else 0
        self.sock.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[list[Message], list[int]]:
        """Return all complete messages that have arrived, and their file descriptors, without waiting."""
        fds: list[int] = []
        self.sock.setblocking(False)
        while not self.has_ended:
            try:
                data, more, _, _ = socket.recv_fds(self.sock, CHUNK, MAX_FDS)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data, more = b"", []
            for fd in more:
                os.set_inheritable(fd, False)  # programs started by a worker must not inherit the descriptor
            fds += more
            self._buffer += data
            self.has_ended = not data
        return self._whole_messages(), fds

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for data or for the other end to close; return whether either has happened."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def expect(self, seconds: float) -> tuple[Message, list[int]]:
        """Wait for the answer to a request; raise TimeoutError if none arrives, EOFError if the other end closes."""
        deadline = time.monotonic() + seconds
        while True:
            messages, fds = self.receive()
            if messages:
                assert len(messages) == 1, "more answers than requests"
                return messages[0], fds
            if self.has_ended:
                raise EOFError("the other process is gone")
            if not self.wait(deadline - time.monotonic()):
                raise TimeoutError(f"no answer within {seconds:g} s")

    def _whole_messages(self) -> list[Message]:
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(msgspec.msgpack.decode(self._buffer[start + HEADER.size : end]))
            start = end
        del self._buffer[:start]
        return messages

    def close(self) -> None:
        self.sock.close()


class Bell:
    """Wakes the process that polls it: an eventfd on Linux, elsewhere a pipe with both ends open in all processes."""

    def __init__(self, fds: Sequence[int] | None = None) -> None:
        if fds is not None:
            self.fds = tuple(fds)
        elif hasattr(os, "eventfd"):
            self.fds = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),)
        else:
            self.fds = os.pipe()
            for fd in self.fds:
                os.set_blocking(fd, False)

    def fileno(self) -> int:
        return self.fds[0]

    def ring(self) -> None:
        try:  # noqa: SIM105  # contextlib.suppress costs as much as the write
            os.write(self.fds[-1], ONE)
        except BlockingIOError:
            pass  # the pipe is full, so the bell has been rung already

    def clear(self) -> None:
        try:
            while len(self.fds) == 2 and len(os.read(self.fds[0], CHUNK)) == CHUNK:
                pass
            if len(self.fds) == 1:
                os.read(self.fds[0], 8)
        except BlockingIOError:
            pass  # there is nothing to read, because the bell was not rung

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def die_with_parent(parent: int) -> None:
    """Ask the system to kill this process when the thread that created it ends; exit if the parent is gone already.

    Only Linux offers this (PR_SET_PDEATHSIG). On other systems a process exits when it finds its link closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
