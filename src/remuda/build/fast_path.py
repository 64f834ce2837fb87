"""The only module that imports `remuda.fast`. Without that package, all gradients are computed by autograd."""

from __future__ import annotations

from importlib.util import find_spec

from remuda.config.run_options import AgentOptions
from remuda.core import Agent, Algorithm, FastPath, FastPolicy


def find_fast_policy(options: AgentOptions, agent: Agent) -> FastPolicy | None:
    """Return a faster form of `agent.act`, or None if the options switch it off or the agent is not supported."""
    if not options.fast_path or options.precision != "fp32" or find_spec("remuda.fast") is None:
        return None
    from remuda import fast

    return fast.find_policy(agent)


def find_fast_path(options: AgentOptions, algorithm: Algorithm, side_by_side: bool = False) -> FastPath | None:
    """Return hand-written gradients for the algorithm, or None if there are none or the options switch them off.

    The options switch them off if `agent.fast_path` is false, or if nets are compiled or compute in bfloat16. With
    `side_by_side`, the gradients of actor and critics are computed at the same time.
    """
    is_wanted = options.fast_path and not options.compile and options.precision == "fp32"
    if not is_wanted or find_spec("remuda.fast") is None:
        return None
    from remuda import fast

    return fast.find(algorithm, side_by_side)
