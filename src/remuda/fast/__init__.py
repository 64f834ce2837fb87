"""Hand-written code for actions and gradients of small fully connected networks, about twice as fast as autograd.

    agent.fast_policy = fast.find_policy(agent)                  # None if the agent is not supported
    learner = Learner(ppo, ..., fast_path=fast.find(ppo))        # None if the algorithm is not supported

For a network of two layers of 64 units, the overhead of torch calls is far larger than the arithmetic. This package
makes fewer calls. The rest of the library does not depend on this package, because every algorithm also defines its
loss for autograd. With `agent.fast_path=false`, or if this directory is deleted, only autograd is used. During a run,
results of the fast path are compared with those of autograd and of `Agent.act`. If they differ, the fast path is
dropped with a warning.

To add gradients for an algorithm of your own, see `register` in registry.py.
"""

from remuda.fast import policy_losses, sac, sac_side_by_side  # noqa: F401  (the import registers their functions)
from remuda.fast.agreement import CheckedGradients
from remuda.fast.policy_agent import FastPolicyAgent
from remuda.fast.registry import find, find_policy, register, register_policy

__all__ = ["CheckedGradients", "FastPolicyAgent", "find", "find_policy", "register", "register_policy"]
