"""Build the replay of a run from its configuration, or refuse it before allocation if memory is too small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from remuda.config.run_config import RunConfig
from remuda.core import DivisibleReplay, Space
from remuda.data import Tree, leaves
from remuda.envs import EnvInfo, is_atari
from remuda.errors import ConfigError
from remuda.machine import free_memory
from remuda.replay import FrameRing, Priorities, Ring, RolloutBuffer, Row, SequenceReplay, TransitionReplay

# The ring checks in this number of first rows of each env that observations are stacks of frames.
CHECKED_ROWS = 100
SPARE = 0.9  # largest fraction of the free memory that a replay may take


def make_replay(config: RunConfig, info: EnvInfo, state: Tree, first_round: int, writers: int = 0) -> DivisibleReplay:
    """Return the replay of a run.

    `state` is the agent's state in one env, or None if the agent has no state. `first_round` is the number of rounds
    that the run has completed. If other processes write the rows, `writers` is the number of env groups. Otherwise,
    `writers` is 0.
    """
    if config.algo_options.uses_replay:
        return make_ring_replay(config, info, state, writers)
    epochs, size = config.rollout_options.minibatches
    return RolloutBuffer(epochs, size, config.seed, first_round, whole=config.algo_options.data == "sequences")


def make_ring_replay(
    config: RunConfig, info: EnvInfo, state: Tree, writers: int
) -> SequenceReplay | TransitionReplay:
    """Return a replay of sequences or of single transitions. The arguments are those of `make_replay`."""
    options, replay = config.replay_algo_options, config.replay
    settings: dict[str, Any] = {
        "batch_size": options.batch_size,
        "ratio": ratio(config),
        "warm_up": options.learning_starts,
        "n_step": replay.n_step,
        "gamma": options.gamma,
        "seed": config.seed,
    }
    if writers:
        scheme = config.scheme_options
        lead = max_lead(config) if scheme.throttle and replay.ratio is not None else 0
        settings |= {"is_shared": True, "max_batches_per_round": scheme.publish_every, "max_lead": lead}
    ring = make_ring(config, info, state, writers or 1)
    try:
        if replay.sequence:
            settings |= {"burn_in": replay.burn_in, "length": replay.sequence}
            settings |= {"interval": options.rows_per_round, "has_td_error": has_td_error(config)} if writers else {}
            alpha = replay.alpha if replay.prioritized else None
            made: SequenceReplay | TransitionReplay = SequenceReplay(ring, state, **settings, priorities=alpha)
        else:
            priorities = Priorities(ring, replay.alpha, is_shared=writers > 0) if replay.prioritized else None
            made = TransitionReplay(ring, **settings, priorities=priorities)
        made.reports_returns = options.needs_returns
        return made
    except BaseException:
        ring.close()
        raise


def max_lead(config: RunConfig) -> int:
    """Return by how many steps throttled samplers may be ahead of the learner.

    The number is large enough that neither the samplers nor the learner has to wait within one round.
    """
    options, replay = config.replay_algo_options, config.replay
    assert replay.ratio is not None
    rows = config.sampler.envs * options.rows_per_round
    learned = options.batch_size * max(1, replay.sequence)
    return 4 * rows + int(2 * config.scheme_options.publish_every * learned / replay.ratio)


def ratio(config: RunConfig) -> float | None:
    """Return the number of rows drawn per env step: replay.ratio, unless algo.gradient_steps determines it."""
    options = config.replay_algo_options
    if options.gradient_steps is None:
        return config.replay.ratio
    drawn = options.gradient_steps * options.batch_size * max(1, config.replay.sequence)
    return drawn / (options.train_freq * config.sampler.envs)


def make_ring(
    config: RunConfig, info: EnvInfo, state: Tree, groups: int = 1, fds: Sequence[int] | None = None
) -> Ring:
    """Return the ring of a replay, in new memory or, if `fds` is given, in memory that another process allocated."""
    if not fds:
        refuse_too_large(config, info, state)
    envs, frames = config.sampler.envs, num_frames(config, info.observation)
    rows = -(-config.replay.capacity // envs) + 1  # one extra row, for the observation after the newest row
    example = example_row(info)
    # The ring stores TD errors only for single rows. The TD error of a sequence is stored with its recurrent state.
    td_errors = has_td_error(config) and not config.replay.sequence
    if frames > 1:
        ring: Ring = FrameRing(example, rows, envs, frames, groups, fds, td_errors, CHECKED_ROWS)
    else:
        ring = Ring(example, rows, envs, groups, fds, td_errors)
    # A pause times out later than a step of an env, so that a hanging writer is replaced before the pause fails.
    ring.counters.pause_timeout += config.envs.step_timeout
    return ring


def has_td_error(config: RunConfig) -> bool:
    """Return whether samplers compute the TD errors of the rows that they sample."""
    return config.replay.initial_priority == "error"


def bytes_per_step(config: RunConfig, info: EnvInfo, state: Tree) -> int:
    """Return the number of bytes that one step of one env takes in the replay."""
    example, frames = example_row(info), num_frames(config, info.observation)
    per_step: int = sum(array.nbytes for _, array in leaves(example))
    if frames > 1:
        per_step -= example.obs.nbytes * (frames - 1) // frames - 8
    if config.replay.prioritized:
        per_step += 16
    if config.replay.sequence:  # the replay stores one recurrent state per rollout
        per_step += sum(tensor.nbytes for _, tensor in leaves(state)) // config.algo_options.rows_per_round
    return per_step


def example_row(info: EnvInfo) -> Row:
    """Return a row of zeros for one env, in the form in which samplers store rows: Box actions are flattened."""
    action = info.action
    is_box = action.kind == "box"
    return Row(
        obs=info.observation.tree(lambda _, leaf: np.zeros(leaf.shape, leaf.dtype)),
        action=np.zeros(math.prod(action.shape), np.float32) if is_box else np.zeros((), np.int64),
        reward=np.zeros((), np.float32),
        discount=np.zeros((), np.float32),
        mask=np.zeros((), bool),
    )


def num_frames(config: RunConfig, observation: Space) -> int:
    """Return the number of images stacked in an observation, or 1 if the replay stores whole observations.

    Consecutive observations share all images except the newest, so a replay of images stores each image only once.
    """
    asked, stack = config.replay.frames, config.envs.frame_stack
    is_stack = observation.kind == "box" and len(observation.shape) == 3
    if asked == 0:
        return stack if is_atari(config.env) and is_stack and observation.shape[0] == stack else 1
    if asked > 1 and observation.kind != "box":
        raise ConfigError(
            f"replay.frames={asked} is for observations that are images alone, and these have entries (shown actions "
            "and rewards are some, too: agent.prev_action, agent.prev_reward): leave it out."
        )
    if asked > 1 and (not is_stack or observation.shape[0] % asked):
        raise ConfigError(
            f"replay.frames={asked} does not divide the first axis of observations of shape {observation.shape}: "
            "leave it out, or use 1 to keep them whole."
        )
    return asked


def refuse_too_large(config: RunConfig, info: EnvInfo, state: Tree) -> None:
    """Raise ConfigError if the replay would take more than the fraction SPARE of the free memory.

    The allocation itself would succeed without enough memory, because the system provides a page of shared memory
    only when a process writes to it.
    """
    if not config.algo_options.uses_replay:
        return
    per_step, free = bytes_per_step(config, info, state), free_memory()
    needed = config.replay.capacity * per_step
    if needed > SPARE * free:
        most = int(SPARE * free / per_step)
        raise ConfigError(
            f"replay.capacity={config.replay.capacity} takes {needed / 1e9:.1f} GB, more than {100 * SPARE:.0f} % of "
            f"the {free / 1e9:.1f} GB of free memory: use at most {most}."
        )
