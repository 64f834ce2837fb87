"""The shell command or Python call with which the user can resume a run, for use in messages.

    resume_advice("runs/x", config)     # 'remuda train --resume runs/x', or
                                        # 'remuda.resume("runs/x", env=MyEnv, net=MyNet) from Python'

An env or net that was defined in a script or notebook has no import path, so config.yaml contains only a label such
as <MyEnv>. A shell command cannot find such an env or net, and every later call from Python needs it as an argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

RESUME = "remuda.resume({})"


def resume_advice(path: Path | str, config: Mapping[str, object]) -> str:
    """Return the shell command, or else the Python call, that resumes the run at `path`."""
    needed = without_path(config)
    return f"{python_call(RESUME, path, needed)} from Python" if needed else f"remuda train --resume {path}"


def python_call(call: str, path: Path | str, needed: Mapping[str, str]) -> str:
    """Return `call` (a template such as RESUME) with the path of the run, and with the env and net from `needed`."""
    arguments = [json.dumps(str(path), ensure_ascii=False)]
    return call.format(", ".join([*arguments, *(f"{name}={as_written(label)}" for name, label in needed.items())]))


def without_path(config: Mapping[str, object]) -> dict[str, str]:
    """Return the labels of env and net, if they have no import path, as {"env": "<MyEnv>", "net": "<MyNet>"}."""
    options = config.get("options")
    agent = options.get("agent") if isinstance(options, Mapping) else None
    labels = {"env": config.get("env"), "net": agent.get("net") if isinstance(agent, Mapping) else None}
    return {name: label for name, label in labels.items() if isinstance(label, str) and label.startswith("<")}


def as_written(label: str, unnamed: str = "...") -> str:
    """Return the name in a label such as <MyEnv>, or `unnamed` if that is not a valid name, as for a lambda."""
    name = label[1:-1]
    return name if all(part.isidentifier() for part in name.split(".")) else unnamed
