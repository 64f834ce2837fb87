"""The `remuda` command: runs the module of a subcommand, and turns errors into one sentence and an exit code."""
# PYTHON_ARGCOMPLETE_OK (the mark by which argcomplete's global completion finds this command)

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Sequence

from remuda.errors import EnvError, Interrupted, RemudaError, UsageError, nearest

COMMANDS = {  # name of a command: (its module in remuda.cli, description)
    "train": ("train", "train an agent, or resume a run"),
    "eval": ("evaluate", "evaluate the newest weights of a run"),
    "record": ("record", "record a video of a run's agent"),
    "plot": ("plot", "plot learning curves of one or more runs"),
    "doctor": ("doctor", "check this machine or an environment for problems"),
    "bench": ("bench", "measure speed, alternating with other libraries"),
    "algos": ("tables", "list the algorithms"),
    "schemes": ("tables", "list the schemes: how a run uses processes"),
    "envs": ("tables", "list the registered environments"),
}

USAGE = """\
usage: remuda COMMAND [ARGUMENTS]

Train reinforcement-learning agents, then evaluate, film and plot them. Each run
leaves a directory in runs/, and runs/latest links to the newest.

commands:
{commands}

`remuda COMMAND --help` explains a command, `remuda --version` is the version.

examples:
  remuda train ppo --env CartPole-v1       train with preset hyperparameters
  remuda eval runs/latest --episodes 100   evaluate the trained agent
  remuda train --resume runs/latest        continue a run that was interrupted"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 (failed), 2 (wrong usage, env or run), or 128 + N (signal N)."""
    if "_ARGCOMPLETE" in os.environ and argv is None:  # the shell sets this variable to get completions
        from remuda.cli.completion import complete

        complete()
    try:
        code = run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # flush here, because a BrokenPipeError at interpreter exit cannot be caught
        return code
    except RemudaError as error:
        print(f"remuda: {error}", file=sys.stderr)
        if isinstance(error, Interrupted):
            return 128 + error.signal
        return 2 if isinstance(error, (UsageError, EnvError)) else 1
    except KeyboardInterrupt:
        print("remuda: stopped at once; nothing was saved after the last checkpoint", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of standard output has exited, as in `remuda algos | head`
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())  # the output that is still in the buffer goes to /dev/null
        os.close(devnull)
        return 0
    except MemoryError:
        print("remuda: out of memory: use fewer envs, smaller batches or a smaller net.", file=sys.stderr)
        return 1
    except OSError as error:  # such as a full disk, a missing directory or too many open files
        if error.errno in (errno.EMFILE, errno.ENFILE):
            print(f"remuda: {error.strerror}: raise the limit (ulimit -n), or use fewer workers.", file=sys.stderr)
            return 2
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"remuda: {where}{error.strerror or error}: free some space, or use another path.", file=sys.stderr)
        return 2 if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        lines = "\n".join(f"  {name:<9} {description}" for name, (_, description) in COMMANDS.items())
        print(USAGE.format(commands=lines))
        return 0
    if arguments[0] in ("--version", "-V"):
        from importlib.metadata import version

        print(f"remuda {version('remuda')}")
        return 0
    if arguments[0] not in COMMANDS:
        raise UsageError(f"{arguments[0]!r} is not a command: {nearest(arguments[0], COMMANDS)}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python` does, so that the user's own envs and nets can be imported
    # The import is here, because `remuda --help` must not wait for torch.
    module = importlib.import_module(f"remuda.cli.{COMMANDS[arguments[0]][0]}")
    return int(module.run(arguments[0], arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
