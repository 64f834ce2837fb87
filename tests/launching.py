"""Start the ranks of a run as torchrun does, but without its launcher, which imports torch for seconds."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import prestarted


def launch(ranks: int, command: list[str], log: Path) -> tuple[list[int], str]:
    """Run `command` once per rank, with the variables of torchrun; return exit codes and all that was printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with log.open("w") as file:
        processes = [
            prestarted.Popen(
                command,
                env={**os.environ, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=prestarted.STDOUT,
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return codes, log.read_text()
