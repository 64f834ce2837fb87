"""PPO on CartPole in one loop, built from Remuda's parts: copy this file to write your own loop.

    python examples/ppo.py

It computes the same parameters, bit for bit, as
`remuda train ppo --env CartPole-v1 --seed 1 --steps 50_000` (tests/equivalence/test_example.py).
"""

import torch

from remuda import fast
from remuda.agents import PolicyAgent
from remuda.algorithms import PPO
from remuda.envs import make_envs, probe, resolve
from remuda.learning.learner import Learner
from remuda.learning.optimizers import OptimizerOptions
from remuda.learning.schedules import parse_schedule
from remuda.learning.weights import LocalWeights
from remuda.nets import MLP
from remuda.replay import RolloutBuffer
from remuda.sampling.sampler import EnvSampler


def main(env: str = "CartPole-v1", steps: int = 50_000, seed: int = 1, num_envs: int = 8, num_steps: int = 32) -> PPO:
    torch.set_num_threads(1)  # small networks are fastest on one thread
    torch.manual_seed(seed)
    spec = resolve(env)
    info = probe(spec)
    agent = PolicyAgent(info.observation, info.action, lambda shape: MLP(shape, (64, 64), "tanh"))
    ppo = PPO(agent, num_envs, gamma=0.98, gae_lambda=0.8, clip_range=parse_schedule("linear(0.2, 0)"))
    agent.fast_policy = fast.find_policy(agent)  # optional, like fast.find() below; halves the time
    learner = Learner(
        ppo,
        OptimizerOptions("adam", epsilon=1e-5),
        parse_schedule("linear(2e-3, 0)"),
        max_grad_norm=0.5,
        fast_path=fast.find(ppo),
    )
    replay = RolloutBuffer(num_epochs=20, batch_size=256, seed=seed)
    weights = LocalWeights()

    envs = make_envs(spec, num_envs, num_workers=0, gamma=0.98)  # num_workers=2 gives the same result on two cores
    sampler = EnvSampler(envs, agent, weights, num_steps, seed)
    done, returns = 0, []
    sampler.reset(seed)
    while done < steps:
        rollout = sampler.collect()  # [T, B]: T rows of B envs
        learner.set_progress(done / steps)
        replay.add(learner.prepare(rollout))  # computes advantages
        for batch in replay.batches():  # epochs x minibatches
            learner.step(batch)  # computes losses and gradients, and updates parameters
        learner.finish(rollout)
        weights.publish(learner.version)
        done += int(rollout.steps.mask.sum())
        returns = (returns + [episode.values["ep_rew"] for episode in envs.episodes()])[-20:]
        if learner.version % 400 == 0 and returns:
            print(f"{done:7,} steps   mean return of the last episodes {sum(returns) / len(returns):6.1f}")
    envs.close()
    return ppo


if __name__ == "__main__":
    main()
