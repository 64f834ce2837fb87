"""The frame of every worker process: mark the process as a worker, and send its parent the error that ended it.

def main(fds):                               # of the module that a fork server loads
    link = Link.from_fd(fds[0])
    return serve(link, Service(link))        # service.run() until the parent asks it to leave, then service.close()
"""

from __future__ import annotations

import traceback
from typing import Protocol

from remuda.processes.links import Link

IN_WORKER = False  # True in worker processes, where functions that start workers or a training run refuse to do so


class Service(Protocol):
    """What one kind of worker does."""

    def run(self) -> None: ...
    def close(self) -> None: ...


def serve(link: Link, service: Service) -> int:
    """Run the service until it returns or the parent is gone; return the exit code of the process."""
    global IN_WORKER
    IN_WORKER = True
    try:
        service.run()
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the parent is gone
    except BaseException as error:
        link.send({"error": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()})
        return 1
    finally:
        service.close()
    return 0
