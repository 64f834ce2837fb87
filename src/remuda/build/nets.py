"""Find the net of a run's agent: by the option `agent.net` or, in other processes, by a description of the net."""

from __future__ import annotations

from collections.abc import Mapping

from remuda.agents import NetFactory
from remuda.config.run_config import RunConfig
from remuda.config.run_options import AgentOptions
from remuda.envs.import_paths import Unreachable, describe, find, import_named
from remuda.errors import ConfigError
from remuda.nets import NETS, Bfloat16, make_net
from remuda.runs.advice import as_written


def find_net(
    options: AgentOptions, reference: Mapping[str, str] | None = None, given: NetFactory | None = None
) -> NetFactory:
    """Return the factory of the run's net, which computes with the precision that the options ask for.

    The factory is `given`, if this is not None. Otherwise, `reference` describes the factory (see `describe_net`). If
    both are None, the option `agent.net` names the factory.
    """
    made = given or find_plain_net(options, reference)
    return made if options.precision == "fp32" else lambda shape: Bfloat16(made(shape))


def find_plain_net(options: AgentOptions, reference: Mapping[str, str] | None) -> NetFactory:
    """Return the factory that `reference` describes or, without a reference, that `options.net` names.

    The option `precision` is ignored.
    """
    if reference is not None:
        found: NetFactory = find(reference)
        return found
    if options.net in NETS:
        return lambda shape: make_net(shape, options.net, options.hidden, options.activation, options.orthogonal_init)
    if options.net.startswith("<"):
        raise ConfigError(
            f"agent.net={options.net} has no import path: pass net={as_written(options.net)} from Python."
        )
    if ":" not in options.net:
        raise ConfigError(f"agent.net={options.net!r} is not known: use {', '.join(NETS)}, or package.module:Name.")
    made: NetFactory = import_named(options.net, "agent.net")
    return made


def describe_net(config: RunConfig, net: NetFactory | None) -> dict[str, str] | None:
    """Return a description by which other processes find `net`, or None if the option `agent.net` names the net."""
    if not config.agent.net.startswith("<"):
        return None
    remedy = "--scheme parallel" if config.is_asynchronous else "sampler.inference=central"
    try:
        return describe(net)
    except Unreachable as error:
        raise ConfigError(
            f"agent.net={config.agent.net} cannot be used in other processes, as {error.reason}: define it in a "
            f"module file, e.g. nets.py, and pass net=nets.{as_written(config.agent.net, 'Net')}, or use {remedy}."
        ) from None
