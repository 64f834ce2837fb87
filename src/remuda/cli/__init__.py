"""The `remuda` command: finds the subcommand's module and turns errors into one sentence and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from remuda.errors import EnvError, Interrupted, RemudaError, UsageError, nearest

COMMANDS = {  # name: (module, what it does)
    "train": ("train", "train an agent, or go on with a run"),
    "eval": ("evaluate", "play greedy episodes with a run's newest weights"),
    "record": ("record", "make a video of a run's agent"),
    "plot": ("plot", "draw learning curves of one or many runs"),
    "doctor": ("doctor", "say what this machine or an env offers, and what is wrong"),
    "bench": ("bench", "measure speed, side by side with other ways and other libraries"),
    "algos": ("tables", "list the algorithms"),
    "schemes": ("tables", "list the ways to run them"),
    "envs": ("tables", "list the environments that are registered"),
}

USAGE = """\
usage: remuda COMMAND [ARGUMENTS]     remuda COMMAND --help tells more

{commands}

first steps:
  remuda train ppo --env CartPole-v1                      learns, and leaves runs/ppo-CartPole-v1-...
  remuda train ppo --env CartPole-v1 --scheme parallel    the same on every core
  remuda train --resume runs/latest                       goes on where a run was stopped
  remuda eval runs/latest --episodes 100
  remuda plot runs/latest --out curve.png"""


def main(argv: Sequence[str] | None = None) -> int:
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where it can be caught, and not in the interpreter's last breath
        return code
    except RemudaError as error:
        print(f"remuda: {error}", file=sys.stderr)
        if isinstance(error, Interrupted):
            return 128 + error.signal
        return 2 if isinstance(error, (UsageError, EnvError)) else 1
    except KeyboardInterrupt:
        print("remuda: stopped at once; nothing was saved after the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away: | head
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # for what is still in the buffer
        os.close(nowhere)
        return 0
    except OSError as error:  # a full or failing disk, a lost directory
        if error.errno in (errno.EMFILE, errno.ENFILE):
            print(f"remuda: {error.strerror}: raise the limit (ulimit -n), or use fewer workers.", file=sys.stderr)
            return 2
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"remuda: {where}{error.strerror or error}: make room, or choose another place.", file=sys.stderr)
        return 2 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  {name:<9} {what}" for name, (_, what) in COMMANDS.items())
        print(USAGE.format(commands=lines))
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"remuda {version('remuda')}")
        return 0
    if arguments[0] not in COMMANDS:
        raise UsageError(f"{arguments[0]!r} is not a command: {nearest(arguments[0], COMMANDS)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the user's own envs and nets, as `python` would find them
    # Imported only now: `remuda --help` must not wait for torch.
    module = importlib.import_module(f"remuda.cli.{COMMANDS[arguments[0]][0]}")
    return int(module.run(arguments[0], arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
