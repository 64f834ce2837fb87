"""Env workers on a machine where some forks fail: SCARCE_FORKS lists the numbers of these forks, starting at 1."""

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
