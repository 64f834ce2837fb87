"""IMPALA on CartPole in one file, a loop like MonoBeast's, made of Remuda's parts: copy it to write your own loop.

    python examples/impala.py

Each worker acts in its own envs and fills slots of shared memory; the learner takes full slots. Workers and learner
do not wait for each other, so V-trace corrects for the age of the rollouts. The same training is done by
`remuda train impala --env CartPole-v1 --scheme async --seed 1 --steps 100_000`. With max_lag=0, workers and learner
wait. Then file and command give the same parameters, bit for bit (tests/equivalence/test_example_impala.py).
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

MODULE = Path(__file__).stem if __name__ == "__main__" else __name__  # the name under which workers import this file


def make_agent(observation, action, seed):
    torch.manual_seed(seed)
    agent = PolicyAgent(observation, action, lambda shape: MLP(shape, (64, 64), "tanh"))
    agent.fast_policy = fast.find_policy(agent)  # used for sampling only; learning uses autograd
    return agent


def make_parts(blueprint, heartbeat, notify):
    """Return the envs, the agent and the exploration of a worker, as its blueprint describes them."""
    envs = LocalEnvs(
        resolve(blueprint["env"]),
        blueprint["last"] - blueprint["first"],
        first_env=blueprint["first"],
        should_stop=heartbeat,  # called at every step; tells the learner that the worker is alive
        on_notice=notify,
    )
    return envs, make_agent(envs.observation, envs.action, blueprint["seed"]), Exploration()


def main(fds):
    """Run a worker process, which serves the requests of the learner."""
    return serve(fds, make_parts)


def train(env="CartPole-v1", steps=100_000, seed=1, workers=2, num_envs=8, num_steps=20, max_lag=None):
    torch.set_num_threads(1)  # small networks are fastest on one thread
    info = probe(resolve(env))
    agent = make_agent(info.observation, info.action, seed)
    impala = IMPALA(agent, num_envs, gamma=0.99, ent_coef=0.01)
    learner = Learner(
        impala, OptimizerOptions("adam", epsilon=1e-5), parse_schedule("linear(2e-3, 0)"), max_grad_norm=40.0
    )
    weights = SharedWeights(agent)
    bounds = [worker * num_envs // workers for worker in range(workers + 1)]
    blueprints = [
        {"env": env, "first": first, "last": last, "groups": 1, "wait_reset": False}
        for first, last in pairwise(bounds)
    ]
    queue = RolloutQueue(
        MODULE, blueprints, agent, info.observation, weights, num_steps, per_round=workers, seed=seed, max_lag=max_lag
    )
    done, returns = 0, []
    try:
        queue.start(seed)
        while done < steps:
            rollout = queue.take(learner.version, should_stop=lambda: False)  # [T, B], sampled by an earlier version
            learner.set_progress(done / steps)
            learner.step(learner.prepare(rollout))  # computes losses and gradients, and updates parameters
            learner.finish(rollout)
            weights.publish(learner.version)
            queue.release(learner.version)  # workers may now reuse the slots of the rollout
            done += int(rollout.steps.mask.sum())
            returns = (returns + [episode.values["ep_rew"] for episode in queue.episodes()])[-20:]
            if learner.version % 100 == 0 and returns:
                lag = learner.version - 1 - int(rollout.steps.version.min())
                print(f"{done:7,} steps   lag {lag}   mean return {sum(returns) / len(returns):6.1f}")
    finally:
        queue.close()
        weights.close()
    return impala


if __name__ == "__main__":
    train()
