"""The configuration of a run as a frozen dataclass of option groups, and its conversion to and from plain dicts.

The command line (`--algo.learning_rate 3e-4`), `config.yaml` and `remuda.train(algo={"learning_rate": 3e-4})` are
three ways to set the same fields. Presets (config/presets.py) change defaults and never override what the user set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from remuda.config.algo_base import AlgoOptions
from remuda.config.algo_options import OffPolicyOptions, OnPolicyOptions
from remuda.config.checks import check_run
from remuda.config.fields import Checked, fill
from remuda.config.run_options import (
    AgentOptions,
    CheckpointOptions,
    EnvsOptions,
    EvalOptions,
    LogOptions,
    ReplayOptions,
    SamplerOptions,
    SchemeOptions,
)
from remuda.registry import SchemeEntry, find_algorithm, find_scheme


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run. The constructor raises ConfigError if options do not fit together."""

    algo: str
    env: str
    steps: int
    seed: int
    scheme: str
    algo_options: AlgoOptions
    replay: ReplayOptions = field(default_factory=ReplayOptions)
    sampler: SamplerOptions = field(default_factory=SamplerOptions)
    envs: EnvsOptions = field(default_factory=EnvsOptions)
    agent: AgentOptions = field(default_factory=AgentOptions)
    scheme_options: SchemeOptions = field(default_factory=SchemeOptions)
    eval: EvalOptions = field(default_factory=EvalOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    log: LogOptions = field(default_factory=LogOptions)
    device: str = "cpu"  # device of the learner and of central inference, as PyTorch names it

    def __post_init__(self) -> None:
        check_run(self)

    @property
    def scheme_entry(self) -> SchemeEntry:
        """The registry entry of the scheme."""
        return find_scheme(self.scheme)

    @property
    def is_asynchronous(self) -> bool:
        """Whether samplers and learner run asynchronously."""
        return self.scheme_entry.is_asynchronous

    @property
    def has_workers(self) -> bool:
        """Whether envs are stepped in worker processes."""
        return self.scheme_entry.has_workers

    @property
    def sampler_device(self) -> str:
        """The device that runs the policy for sampling: by default the learner's device, but the CPU in workers."""
        if self.sampler.device != "auto":
            return self.sampler.device
        return self.device if self.sampler.inference == "central" else "cpu"

    @property
    def num_parts(self) -> int:
        """Number of equal parts into which envs, minibatches and replay are divided (remuda.parts)."""
        return self.scheme_options.parts * max(1, self.scheme_options.ranks)

    @property
    def has_replay_writers(self) -> bool:
        """Whether samplers write to the replay themselves, from their own processes."""
        return self.is_asynchronous and self.algo_options.uses_replay

    @property
    def rollout_options(self) -> OnPolicyOptions:
        """`algo_options`, if the algorithm learns from fresh rollouts; otherwise an assertion fails."""
        assert isinstance(self.algo_options, OnPolicyOptions), f"{self.algo} learns from a replay"
        return self.algo_options

    @property
    def replay_algo_options(self) -> OffPolicyOptions:
        """`algo_options`, if the algorithm learns from a replay; otherwise an assertion fails."""
        assert isinstance(self.algo_options, OffPolicyOptions), f"{self.algo} learns from fresh rollouts"
        return self.algo_options


# The dataclass of each group of options except `algo`, whose dataclass depends on the algorithm.
KINDS: dict[str, type[Checked]] = {
    "replay": ReplayOptions,
    "sampler": SamplerOptions,
    "envs": EnvsOptions,
    "agent": AgentOptions,
    "scheme": SchemeOptions,
    "eval": EvalOptions,
    "checkpoint": CheckpointOptions,
    "log": LogOptions,
}
# The field of RunConfig that holds each group. The fields `algo` and `scheme` hold names, so the options of these two
# groups are in `algo_options` and `scheme_options`.
GROUPS = {group: f"{group}_options" if group in ("algo", "scheme") else group for group in ("algo", *KINDS)}


SETTINGS = ("algo", "env", "steps", "seed", "scheme", "device")


def to_dict(config: RunConfig) -> dict[str, object]:
    """Return the configuration in the form of config.yaml: the settings and, under `options`, a mapping per group."""
    out: dict[str, object] = {name: getattr(config, name) for name in SETTINGS}
    out["options"] = {group: _plain(getattr(config, attribute)) for group, attribute in GROUPS.items()}
    return out


def _plain(options: Any) -> dict[str, object]:
    values = {item.name: getattr(options, item.name) for item in fields(options)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def from_dict(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration that `to_dict` converted to `values`. No preset is applied and no env is probed."""
    settings = {name: values[name] for name in SETTINGS if name in values}
    kinds: dict[str, type[Checked]] = {"algo": find_algorithm(values["algo"]).options, **KINDS}
    groups = {GROUPS[group]: fill(kinds[group](), values["options"].get(group, {}), group) for group in GROUPS}
    return RunConfig(**settings, **groups)
