"""PPO of Ray RLlib, in its current API.

.venv-rllib/bin/python bench/peers/rllib.py --job JOB.json --out OUT.json
"""

import logging
import os
import tempfile
from importlib.metadata import version

# Before Ray is imported: neither usage reports nor loggers that nobody reads.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"

import ray
import torch
from common import Meter, arguments, refuse, write
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.tune.trainable import trainable


def main():
    given, job = arguments(__doc__, ("this process", "subprocesses"))
    refuse(job, net=("mlp",), activation=("tanh", "relu"), normalize_obs=(False,), normalize_reward=(False,))
    refuse(job, normalize_advantage=(True,))
    envs_in = given.envs_in or "this process"
    runners = 0 if envs_in == "this process" else 2
    threads = given.threads or 1
    torch.set_num_threads(threads)
    rows = job["envs"] * job["n_steps"]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = (
        PPOConfig()
        .environment(job["env"])
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=job["envs"] // max(runners, 1),
            rollout_fragment_length=job["n_steps"],
            batch_mode="truncate_episodes",
        )
        .learners(num_learners=0)  # learns in this process
        .rl_module(
            model_config=DefaultModelConfig(
                fcnet_hiddens=job["hidden"], fcnet_activation=job["activation"], vf_share_layers=False
            )
        )
        .training(
            train_batch_size_per_learner=rows,
            minibatch_size=rows // job["minibatches"],
            num_epochs=job["epochs"],
            gamma=job["gamma"],
            lambda_=job["gae_lambda"],
            lr=job["learning_rate"],
            clip_param=job["clip"],
            vf_clip_param=float("inf"),
            entropy_coeff=job["ent_coef"],
            vf_loss_coeff=job["vf_coef"],
            grad_clip=job["max_grad_norm"],
            grad_clip_by="global_norm",
            use_kl_loss=False,
        )
        .evaluation(evaluation_interval=None)
        .debugging(seed=job["seed"], log_level="ERROR")
    )
    with tempfile.TemporaryDirectory() as directory:
        trainable.DEFAULT_STORAGE_PATH = directory  # instead of a new directory in the user's home for each run
        algorithm = config.build_algo()
        meter, steps = Meter(job), 0
        while not meter.round_ended(steps):
            steps = algorithm.train()["num_env_steps_sampled_lifetime"]
        algorithm.stop()
    ray.shutdown()

    notes = [f"torch threads {threads}"]
    notes.append("advantages normalized over the whole rollout, not per minibatch")
    notes.append("rollouts overshoot by a few rows, which makes one minibatch per round more")
    notes.append("env runner and learner in this process" if runners == 0 else f"{runners} env runners as actors")
    write(given, meter, "rllib", version("ray"), envs_in, notes)


if __name__ == "__main__":
    main()
