"""Run the service of a worker process, and send the parent the error that ends the service, if there is one.

def main(fds):                               # in the module that the fork server imports; called in each worker
    link = Link.from_fd(fds[0])
    return serve(link, MyService(link))      # calls `run` of the service, which returns when the worker is to exit
"""

from __future__ import annotations

import traceback
from typing import Protocol

from remuda.processes.links import Link

IN_WORKER = False  # True in worker processes, which must not start a training run


class Service(Protocol):
    """The work of one kind of worker: `serve` calls run(), and then close() even if run() raised an error."""

    def run(self) -> None: ...
    def close(self) -> None: ...


def serve(link: Link, service: Service) -> int:
    """Run the service until it returns, fails, or finds that the parent is gone.

    Returns the exit code of the process: 1 after an error, which is sent to the parent, and otherwise 0.
    """
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
