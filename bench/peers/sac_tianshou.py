"""SAC of Tianshou: its Collector and `algorithm.update` in turns, or with --trainer its OffPolicyTrainer.

echo 2 | .venv-tianshou/bin/python bench/peers/sac_tianshou.py --threads 1

By hand is the faster way: after each collection the trainer looks through all that is stored for missing values,
which took 1.5 ms of CPU with 1,300 rows and 17 ms with 20,000.
"""

from importlib.metadata import version

import gymnasium
import numpy as np
import sac_common as common
import torch
from tianshou.algorithm import SAC
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, TorchOptimizerFactory
from tianshou.data import Collector, ReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainer, OffPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.torch_utils import policy_within_training_step


def make_algorithm(env, fused):
    shape, action = env.observation_space.shape, env.action_space.shape

    def adam():
        if fused:
            return TorchOptimizerFactory(torch.optim.Adam, lr=common.RATE, fused=True)
        return AdamOptimizerFactory(lr=common.RATE)

    def critic():
        body = Net(state_shape=shape, action_shape=action, hidden_sizes=common.HIDDEN, concat=True)
        return ContinuousCritic(preprocess_net=body)

    actor = ContinuousActorProbabilistic(
        preprocess_net=Net(state_shape=shape, hidden_sizes=common.HIDDEN),
        action_shape=action,
        unbounded=True,
        conditioned_sigma=True,
    )
    return SAC(
        policy=SACPolicy(actor=actor, action_space=env.action_space, observation_space=env.observation_space),
        policy_optim=adam(),
        critic=critic(),
        critic_optim=adam(),
        critic2=critic(),
        critic2_optim=adam(),
        tau=common.TAU,
        gamma=common.GAMMA,
        alpha=AutoAlpha(target_entropy=-float(np.prod(action)), log_alpha=0.0, optim=adam()),
    )


def by_hand(algorithm, collector):
    def run(steps):
        with policy_within_training_step(algorithm.policy):
            for _ in range(steps):
                collector.collect(n_step=1)
                algorithm.update(buffer=collector.buffer, sample_size=common.BATCH)

    return run


def by_trainer(algorithm, collector):
    """One epoch of its trainer is a chunk; without a test collector nothing is tested."""
    params = OffPolicyTrainerParams(
        max_epochs=10**9,
        epoch_num_steps=common.CHUNK,
        training_collector=collector,
        collection_step_num_env_steps=1,
        update_step_num_gradient_steps_per_sample=1.0,
        batch_size=common.BATCH,
        test_collector=None,
        verbose=False,
        show_progress=False,
    )
    trainer = OffPolicyTrainer(algorithm, params)
    trainer.reset(reset_collectors=False)

    def run(steps):
        for _ in range(-(-steps // common.CHUNK)):
            trainer.execute_epoch()

    return run


def main():
    given = common.arguments(
        __doc__, ("--trainer", "let OffPolicyTrainer do it"), ("--fused", "Adam in one kernel, if asked to")
    )
    common.require_mujoco()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)
    np.random.seed(1)
    envs = DummyVectorEnv([lambda: gymnasium.make(common.ENV)])
    envs.seed(1)
    algorithm = make_algorithm(gymnasium.make(common.ENV), given.fused)
    collector = Collector(algorithm, envs, ReplayBuffer(common.REPLAY))
    collector.reset()
    collector.collect(n_step=common.RANDOM, random=True)
    run = (by_trainer if given.trainer else by_hand)(algorithm, collector)
    run(common.WARM_UP)

    wrapped = [algorithm.policy_optim, algorithm.critic_optim, algorithm.critic2_optim]
    optimizers = [*(each._optim for each in wrapped), algorithm.alpha._optim]
    note = f"tianshou {version('tianshou')}, torch threads {given.threads}"
    note += ", by its OffPolicyTrainer" if given.trainer else ", Collector and update without a trainer"
    note += ", fused Adam" if given.fused else ""
    common.take_turns(run, lambda: collector.collect_step, optimizers, note)


if __name__ == "__main__":
    main()
