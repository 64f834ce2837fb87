"""Env workers on a machine that sometimes refuses to fork: SCARCE_FORKS lists the forks that fail, counted from 1."""

import errno
import os

from remuda.envs.worker import main as main

fork, count = os.fork, 0
refused = [int(number) for number in os.environ.get("SCARCE_FORKS", "").split()]


def scarce() -> int:
    global count
    count += 1
    if count in refused:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()


os.fork = scarce
