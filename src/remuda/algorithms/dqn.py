"""Deep Q-learning: DQN with any of its extensions, up to Rainbow, which combines all of them.

The extensions are double Q-learning, dueling and noisy networks, return distributions, prioritized replay and n-step
returns. The options of `QAgent` select dueling, noise and distributions; the replay implements prioritized draws and
n-step returns. `DQN.losses` computes the loss of every variant. docs/algorithms/dqn.md lists every detail with its
test.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from remuda.agents import QAgent
from remuda.agents.support import ClippedTargets, ReturnRange, clipped_share, derive_support
from remuda.algorithms.actor_critic import over_progress
from remuda.algorithms.off_policy import OffPolicy, Rows
from remuda.core import Clock, Losses
from remuda.data import Batch
from remuda.devices import send
from remuda.maths import huber, project


class DQN(OffPolicy):
    """Learns action values from returns that are bootstrapped with a target network."""

    def __init__(
        self,
        agent: QAgent,
        seed: int,
        *,
        double: bool = True,
        delta: float | None = 1.0,
        beta: float | Callable[[float], float] = 0.4,
        tau: float = 1.0,
        target_interval: int = 1000,
        clip_reward: bool = False,
        burn_in: int = 0,
        has_target: bool = True,
    ) -> None:
        """`delta` is the error above which the Huber loss is linear; if it is None, the loss is quadratic everywhere.

        `beta` is the exponent of importance weights. If `has_target` is False, the agent is used in place of the
        target network. This is enough for samplers, which call only `td_error`.
        """
        super().__init__(agent, seed, tau, target_interval, clip_reward, burn_in)
        self.is_double, self.delta, self.beta = double, delta, over_progress(beta)
        self.target = self.make_target(agent) if has_target else agent
        self.clipped: ClippedTargets | None = ClippedTargets()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        return {"q": list(self.agent.parameters())}

    def losses(self, batch: Batch, clock: Clock) -> Losses:
        if batch.returns is not None:
            self.choose_support(ReturnRange(*batch.returns))
        rows = self.rows(batch)
        mine, theirs = self._noises(clock, rows.reward)
        online, target = partial(self.agent.unroll, noise=mine), partial(self.target.unroll, noise=theirs)
        # Run the target network first, so that the online network's activations stay in the cache for the gradient.
        with torch.no_grad():
            later = self.after(batch, target, batch.state)
        if self.is_double:  # the online network selects the action that the target evaluates (arXiv 1509.06461)
            outputs, chooser = self.now_and_after(batch, online, batch.state)
        else:
            outputs, chooser = self.now(batch, online, batch.state), later
        with torch.no_grad():
            later = pick(later, self.agent.expected(chooser).argmax(-1))
        chosen = pick(outputs, rows.action)
        if len(self.agent.support) == 1:
            each, size = self.scalar_loss(chosen, later, rows)
        else:
            each, size = self.categorical_loss(chosen, later, rows)
        metrics = {} if len(self.agent.support) == 1 else self.support_metrics(later, rows)
        weight = rows.weight ** self.beta(clock.progress)
        loss = (weight * each).mean()
        with torch.no_grad():
            metrics |= {
                "loss": loss.detach(),
                "q_mean": self.agent.expected(outputs).amax(-1).mean(),
                "td_error": size.mean(),
            }
        return Losses({"q": loss}, metrics, self.priority(size, batch))

    def choose_support(self, seen: ReturnRange) -> None:
        """Derive the support from `seen`, the range of the returns of the rows stored before learning started.

        Do nothing if the support is not automatic, or if it has been derived already.
        """
        if not self.agent.is_auto or bool(self.agent.has_support):
            return
        low, high = derive_support(seen)
        for agent in (self.agent, self.target):
            agent.set_support(low, high)

    @torch.no_grad()
    def support_metrics(self, next_logits: Tensor, rows: Rows) -> dict[str, Tensor | float]:
        """Return the fraction of target probability beyond the support and, if `is_auto`, the support's bounds.

        Also pass the fraction to `self.clipped`, which logs a warning if the mean fraction is too large.
        """
        support = self.agent.support
        share, low, high = clipped_share(next_logits.softmax(-1), rows.reward, rows.discount, support)
        if self.clipped is not None:
            self.clipped.add(share, low, high, support)
        bounds = {"v_min": support[0], "v_max": support[-1]} if self.agent.is_auto else {}
        return {"clipped_targets": share, **bounds}

    @torch.no_grad()
    def td_error(self, batch: Batch) -> Tensor:
        """Return the priority of each row or sequence, for samplers.

        Any target network is first set to the agent's parameters.
        """
        self.clipped = None  # only the learner warns of clipped targets
        self.move_targets(1.0)
        priority = self.losses(batch, Clock()).priority
        assert priority is not None
        return priority

    def scalar_loss(self, q: Tensor, next_q: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the loss and the absolute TD error of every row."""
        error = self.target_value(rows, next_q) - q
        each = 0.5 * error.square() if self.delta is None else huber(error, self.delta)
        return each, error.detach().abs()

    def target_value(self, rows: Rows, next_q: Tensor) -> Tensor:
        return rows.reward + rows.discount * next_q

    def categorical_loss(self, logits: Tensor, next_logits: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Return the loss and the error of every row.

        The loss is the cross-entropy between the projected target (arXiv 1707.06887) and the distribution of
        `logits`. The error is the KL divergence between these two distributions.
        """
        goal = project(next_logits.softmax(-1), rows.reward, rows.discount, self.agent.support)
        each = -(goal * logits.log_softmax(-1)).sum(-1)
        own = -(goal * goal.clamp(min=1e-38).log()).sum(-1)
        return each, (each.detach() - own).clamp(min=0.0)

    def _noises(self, clock: Clock, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return weight noise for the online and for the target network, or (None, None) if no layers are noisy."""
        if not self.agent.noise_width:
            return None, None
        mine, theirs = torch.randn(2, self.agent.noise_width, generator=self.generator(clock))
        return send(mine, like.device), send(theirs, like.device)


def pick(outputs: Tensor, action: Tensor) -> Tensor:
    """Select the outputs of one action per row, from [N, A] or [N, A, atoms]."""
    return outputs[torch.arange(len(action), device=action.device), action]
