"""Hand-written gradients of `SAC.losses` in two threads: one for the critics, one for actor and temperature.

Products of small matrices gain little from several threads of torch. The two threads of this module compute about
half of the losses each, and wait for each other only once per update. Other processes that use the cores therefore
slow these threads down less.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from remuda.agents import ActorAgent
from remuda.algorithms import SAC
from remuda.core import Clock
from remuda.data import Batch
from remuda.fast.agreement import GradientFunction
from remuda.fast.registry import register
from remuda.fast.relu_net import FEW_ROWS
from remuda.fast.sac import FastSAC, RowResults, Sample, Transitions, in_pieces, make_fast
from remuda.learning.gradients import Gradients


class SideBySideSAC(FastSAC):
    """A gradient function that computes the actor's gradients in a thread, which `open` starts and `close` ends."""

    def __call__(self, batch: Batch, clock: Clock) -> Gradients | None:
        return self.gradients(batch, clock)

    def compute(self, drawn: Transitions, alpha: float) -> RowResults:
        actor = self._pool.submit(self._of_actor, drawn, alpha)
        try:
            q, error = in_pieces(partial(self._of_critics, alpha=alpha), drawn)
        finally:
            log_prob, best = actor.result()
        return RowResults(log_prob, best, q, error)

    @torch.no_grad()  # needed, because autograd is switched off separately in each thread
    def _of_actor(self, drawn: Transitions, alpha: float) -> tuple[Tensor, ...]:
        return tuple(in_pieces(partial(self._actor_piece, alpha=alpha), drawn))

    def _actor_piece(self, drawn: Transitions, alpha: float, count: int, accumulate: bool) -> tuple[Tensor, Tensor]:
        """Write the actor's gradient for a piece of a batch; return `log_prob` and `best` as in `RowResults`."""
        obs, n = drawn.obs, len(drawn.obs)
        outputs = self.actor.forward(obs)
        sample = Sample.of(outputs[-1], drawn.noise[0])
        critic_outputs = [critic.forward(torch.cat([obs, sample.action], -1)) for critic in self.critics]
        best, lower = torch.cat([each[-1] for each in critic_outputs], -1).min(-1, keepdim=True)
        by_chosen = torch.zeros(n, len(self.critics)).scatter_(1, lower, -1 / count)
        by_action = self._through(critic_outputs, by_chosen, slice(obs.shape[1], None))
        self.actor.backward(outputs, sample.backward(by_action, alpha, count), n, accumulate)
        return sample.log_prob, best.squeeze(-1)

    def _through(self, outputs: list[list[Tensor]], by_chosen: Tensor, actions: slice) -> Tensor:
        """Return the gradient [N, A] with respect to the new actions, passed back through the critics."""
        pairs = list(zip(self.critics, outputs, strict=True))
        if len(by_chosen) <= FEW_ROWS:
            first, second = (
                critic.to_input(critic.to_first(each[1:-1], by), actions)
                for (critic, each), by in zip(pairs, torch.split(by_chosen, 1, -1), strict=True)
            )
            return first.add_(second)
        by_action = torch.empty(len(by_chosen), outputs[0][0].shape[1] - actions.start)
        for index, (critic, each) in enumerate(pairs):  # each row's loss uses only the critic with the lower value
            rows = by_chosen[:, index].nonzero().squeeze(-1)
            hidden = [x.index_select(0, rows) for x in each[1:-1]]
            by_action[rows] = critic.to_input(critic.to_first(hidden, by_chosen[rows, index : index + 1]), actions)
        return by_action

    def _of_critics(self, drawn: Transitions, alpha: float, count: int, accumulate: bool) -> tuple[Tensor, Tensor]:
        """Write the critics' gradient for a piece of a batch; return `q` and `error` as in `RowResults`."""
        after = Sample.of(self.actor.forward(drawn.next_obs)[-1], drawn.noise[1])
        following = torch.cat([drawn.next_obs, after.action], -1)
        next_q = torch.minimum(*(target.forward(following)[-1] for target in self.targets)).squeeze(-1)
        goal = torch.addcmul(drawn.reward, drawn.discount, next_q.sub_(after.log_prob, alpha=alpha))
        taken = torch.cat([drawn.obs, drawn.action], -1)
        outputs = [critic.forward(taken) for critic in self.critics]
        q = torch.cat([each[-1] for each in outputs], -1)
        error = q - goal.unsqueeze(-1)
        by_taken = error * (drawn.weight / count).unsqueeze(-1)
        for index, (critic, each) in enumerate(zip(self.critics, outputs, strict=True)):
            critic.backward(each, by_taken[:, index : index + 1], len(taken), accumulate)
        return q[:, 0], error

    def open(self) -> GradientFunction:
        """Start the actor's thread; return this object, which is the gradient function."""
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="remuda-actor")
        return self

    def close(self) -> None:
        self._pool.shutdown()


@register(SAC, ActorAgent, side_by_side=True)
def side_by_side_gradients(sac: SAC) -> GradientFunction | None:
    found = make_fast(sac, SideBySideSAC)
    return None if found is None else found.open()
