"""Runs that are divided into equal parts (remuda.parts): the configuration of a part, and checks of the division."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from remuda.errors import ConfigError

if TYPE_CHECKING:
    from remuda.config.run_config import RunConfig


def share_of(config: RunConfig) -> RunConfig:
    """Return the configuration of one part of the run: its share of envs, of every minibatch and of the replay."""
    parts, replay = config.num_parts, config.replay
    return replace(
        config,
        algo_options=config.algo_options.share(parts),
        sampler=replace(config.sampler, envs=config.sampler.envs // parts),
        replay=replace(replay, capacity=replay.capacity // parts) if config.algo_options.uses_replay else replay,
        scheme_options=replace(config.scheme_options, parts=1, ranks=0),
    )


def check_parts(config: RunConfig) -> None:
    """Check that a run can be divided evenly among its parts, and that the share of each is a valid configuration."""
    has_ranks, parts = config.scheme_entry.has_ranks, config.num_parts
    option, sampler = "scheme.ranks" if has_ranks else "scheme.parts", config.sampler
    if parts > 1:
        check_division(config, option)
    per_slot = sampler.envs // parts // sampler.slots
    if has_ranks and sampler.workers > per_slot:
        raise ConfigError(
            f"sampler.workers={sampler.workers} for each rank is more than the {per_slot} envs of a slot there: "
            f"use at most {per_slot}, or raise sampler.envs."
        )
    if parts > 1:
        try:
            share_of(config)
        except ConfigError as error:
            raise ConfigError(f"{option}={parts} leaves too little to each, because in a share {error}") from None


def check_division(config: RunConfig, option: str) -> None:
    """Check that envs and minibatches can be divided evenly among the run's parts, and that inference is central.

    `option` is the name of the option that sets the number of parts.
    """
    parts = config.num_parts
    minibatch = config.algo_options.minibatch_size or parts
    for name, count in (("sampler.envs", config.sampler.envs), ("algo.batch_size", minibatch)):
        if count < parts:
            raise ConfigError(f"{option}={parts} is more than {name}={count}: use at most {count}, or raise {name}.")
        if count % parts:
            low = count // parts * parts
            raise ConfigError(
                f"{option}={parts} does not divide {name}={count}: set {name} to {low} or {low + parts}."
            )
    if (envs := config.sampler.envs // parts) % (slots := config.sampler.slots):
        raise ConfigError(
            f"{option}={parts} leaves {envs} envs to each, which sampler.slots={slots} does not divide."
        )
    if config.sampler.inference == "workers":
        raise ConfigError(f"{option}={parts} with sampler.inference=workers: use sampler.inference=central.")
