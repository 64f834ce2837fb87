"""PPO of Tianshou. (Not named tianshou.py: that would shadow the package.)

.venv-tianshou/bin/python bench/peers/tianshou_run.py --job JOB.json --out OUT.json
"""

import functools
from importlib.metadata import version

import gymnasium
import numpy as np
import torch
from common import Meter, arguments, refuse, write
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import DiscreteActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv, SubprocVectorEnv
from tianshou.trainer import OnPolicyTrainer, OnPolicyTrainerParams
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic

VEC_ENVS = {
    "this process": DummyVectorEnv,
    "subprocesses": functools.partial(SubprocVectorEnv, share_memory=True),
}


def main():
    given, job = arguments(__doc__, tuple(VEC_ENVS))
    refuse(job, net=("mlp",), activation=("tanh", "relu"), normalize_obs=(False,), normalize_reward=(False,))
    envs_in = given.envs_in or "this process"
    threads = given.threads or 1
    torch.set_num_threads(threads)
    torch.manual_seed(job["seed"])
    np.random.seed(job["seed"])

    make = functools.partial(gymnasium.make, job["env"])
    envs = VEC_ENVS[envs_in]([make] * job["envs"])
    envs.seed(job["seed"])
    one = make()
    rows = job["envs"] * job["n_steps"]

    def body():
        activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[job["activation"]]
        return Net(state_shape=one.observation_space.shape, hidden_sizes=job["hidden"], activation=activation)

    actor = DiscreteActor(preprocess_net=body(), action_shape=one.action_space.n, softmax_output=False)
    algorithm = PPO(
        policy=DiscreteActorPolicy(
            actor=actor, action_space=one.action_space, observation_space=one.observation_space
        ),
        critic=DiscreteCritic(preprocess_net=body()),
        optim=AdamOptimizerFactory(lr=job["learning_rate"]),
        eps_clip=job["clip"],
        advantage_normalization=job["normalize_advantage"],
        vf_coef=job["vf_coef"],
        ent_coef=job["ent_coef"],
        max_grad_norm=job["max_grad_norm"],
        gae_lambda=job["gae_lambda"],
        max_batchsize=rows,  # values of the whole rollout in one call: faster than the default 256
        gamma=job["gamma"],
    )
    collector = Collector(algorithm, envs, VectorReplayBuffer(rows, job["envs"]))
    # One trainer epoch = one round, so that the clock is read after each; without a test collector nothing is tested.
    params = OnPolicyTrainerParams(
        max_epochs=10**9,
        epoch_num_steps=rows,
        training_collector=collector,
        collection_step_num_env_steps=rows,
        batch_size=rows // job["minibatches"],
        update_step_num_repetitions=job["epochs"],
        test_collector=None,
        verbose=False,
        show_progress=False,
    )
    trainer = OnPolicyTrainer(algorithm, params)
    trainer.reset()
    meter, steps = Meter(job), 0
    while not meter.round_ended(steps):
        steps = trainer.execute_epoch().info_stat.train_step
    envs.close()

    notes = [
        f"torch threads {threads}",
        "values and log-probabilities computed again after each rollout",
    ]
    write(given, meter, "tianshou", version("tianshou"), envs_in, notes)


if __name__ == "__main__":
    main()
