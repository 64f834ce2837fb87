"""IMPALA on CartPole, from Remuda's parts: MonoBeast's idea on one page, and the file to copy for your own.

    python examples/impala.py

Workers act, each in envs of its own, and fill slots of shared memory; the learner takes what is full. Neither waits
for the other, and V-trace makes up for the age of what is learned from. It is what
`remuda train impala --env CartPole-v1 --scheme async --seed 1 --steps 100_000` does; with max_lag=0, where both wait,
the parameters are equal bit for bit (tests/equivalence/test_example_impala.py).
"""

from itertools import pairwise
from pathlib import Path

import torch

from remuda import fast
from remuda.agents import PolicyAgent
from remuda.algorithms import IMPALA
from remuda.envs import LocalEnvs, probe, resolve
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import SharedWeights
from remuda.nets import MLP
from remuda.sampling.exploration import Exploration
from remuda.sampling.rollout_queue import RolloutQueue
from remuda.sampling.sampler_worker import serve

MODULE = Path(__file__).stem if __name__ == "__main__" else __name__  # by which workers find this file


def make_agent(observation, action, seed):
    torch.manual_seed(seed)
    agent = PolicyAgent(observation, action, lambda shape: MLP(shape, (64, 64), "tanh"))
    agent.fast_policy = fast.find_policy(agent)  # for sampling; learning is by autograd
    return agent


def make_parts(order, beat, tell):
    """What a worker acts with; its weights are the learner's, which it copies before every rollout."""
    envs = LocalEnvs(
        resolve(order["env"]),
        order["last"] - order["first"],
        first_env=order["first"],
        should_stop=beat,  # asked at every step, so that the learner hears that this worker lives
        tell=tell,
    )
    return envs, make_agent(envs.observation, envs.action, order["seed"]), Exploration()


def main(fds):
    """What a worker runs."""
    return serve(fds, make_parts)


def train(env="CartPole-v1", steps=100_000, seed=1, workers=2, num_envs=8, num_steps=20, max_lag=None):
    torch.set_num_threads(1)  # small networks are fastest on one
    info = probe(resolve(env))
    agent = make_agent(info.observation, info.action, seed)
    impala = IMPALA(agent, num_envs, gamma=0.99, ent_coef=0.01)
    learner = Learner(
        impala, OptimizerOptions("adam", epsilon=1e-5), parse_schedule("linear(2e-3, 0)"), max_grad_norm=40.0
    )
    weights = SharedWeights(agent)  # the first actions come from these
    bounds = [worker * num_envs // workers for worker in range(workers + 1)]
    orders = [
        {"env": env, "first": first, "last": last, "groups": 1, "wait_reset": False}
        for first, last in pairwise(bounds)
    ]
    stream = RolloutQueue(
        MODULE, orders, agent, info.observation, weights, num_steps, per_round=workers, seed=seed, max_lag=max_lag
    )
    done, returns = 0, []
    try:
        stream.start(seed)
        while done < steps:
            rollout = stream.take(learner.version, should_stop=lambda: False)  # [T, B], of some earlier version
            learner.set_progress(done / steps)
            learner.step(learner.prepare(rollout))  # losses, gradients, update
            learner.finish(rollout)
            weights.publish(learner.version)
            stream.release(learner.version)  # its slots may be filled again
            done += int(rollout.steps.mask.sum())
            returns = (returns + [episode.values["ep_rew"] for episode in stream.episodes()])[-20:]
            if learner.version % 100 == 0 and returns:
                lag = learner.version - 1 - int(rollout.steps.version.min())
                print(f"{done:7,} steps   lag {lag}   mean return {sum(returns) / len(returns):6.1f}")
    finally:
        stream.close()
        weights.close()
    return impala


if __name__ == "__main__":
    train()
