"""What every worker process does around its own work: knows that it is one, and tells its parent how it failed.

def main(fds):                               # of a module that a fork server loads
    link = Link.from_fd(fds[0])
    return serve(link, Service(link))        # service.run() until told to leave, then service.close()
"""

from __future__ import annotations

import traceback
from typing import Protocol

from remuda.processes.links import Link

IN_WORKER = False  # True in worker processes: whoever starts workers or training refuses to do so there


class Service(Protocol):
    def run(self) -> None: ...
    def close(self) -> None: ...


def serve(link: Link, service: Service) -> int:
    """Until the service has run its course or the parent is gone; returns the exit code."""
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
