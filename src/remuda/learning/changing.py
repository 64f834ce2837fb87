"""Change options of a learner while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from remuda.learning.schedules import parse_schedule

if TYPE_CHECKING:
    from remuda.learning.learner import Learner


def change_option(learner: Learner, name: str, value: str | float | None) -> None:
    """Use another value of an option of the algorithm in all later updates.

    `name` is "max_grad_norm", "learning_rate", "GROUP_learning_rate" for the parameter group GROUP, or the name
    of an attribute of the algorithm that is a schedule. A `max_grad_norm` of 0 or None turns clipping off. All other
    values are schedules: a number or a text for `parse_schedule`, or None for no schedule. A group without a schedule
    uses "learning_rate", which must not be None.
    """
    if name == "max_grad_norm":
        learner.max_grad_norm = float(value or 0.0) or None
        return
    schedule = None if value is None else parse_schedule(value, f"algo.{name}")
    group = name.removesuffix("_learning_rate")
    if name == "learning_rate":
        assert schedule is not None
        learner.learning_rate = schedule
    elif group != name and group in learner.parameters:
        others = {other: rate for other, rate in learner.own_rates.items() if other != group}
        learner.own_rates = others if schedule is None else {**others, group: schedule}
    else:
        setattr(learner.algorithm, name, schedule)
