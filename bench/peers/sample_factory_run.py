"""PPO of Sample Factory (APPO). (Not named sample_factory.py: that would shadow the package.)

.venv-sample-factory/bin/python bench/peers/sample_factory_run.py --job JOB.json --out OUT.json
"""

import logging
import tempfile
from importlib.metadata import version

import gymnasium
import torch
from common import Meter, arguments, refuse, write
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner


def make_env(name, cfg=None, env_config=None, render_mode=None):
    return gymnasium.make(name, render_mode=render_mode)


class Watch(AlgoObserver):
    """Reads the clock after each round of the learner, whose rounds have a fixed size."""

    def __init__(self, meter, rows):
        self.meter, self.rows = meter, rows

    def on_training_step(self, runner, training_iteration_since_resume):
        if self.meter.round_ended(training_iteration_since_resume * self.rows):
            runner.cfg.train_for_env_steps = 0  # the runner stops itself at its next look


def main():
    given, job = arguments(__doc__, ("this process", "subprocesses"))
    refuse(job, net=("mlp",), activation=("tanh", "relu"), normalize_obs=(False,), normalize_reward=(False,))
    refuse(job, normalize_advantage=(True,))
    envs_in = given.envs_in or "subprocesses"
    serial = envs_in == "this process"
    torch.set_num_threads(given.threads or 1)  # for the serial mode; its processes set 1 themselves
    rows = job["envs"] * job["n_steps"]
    logging.getLogger("rl").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        settings = {
            "env": job["env"],
            "train_dir": directory,
            "experiment": "peer",
            "device": "cpu",
            "seed": job["seed"],
            "serial_mode": serial,
            "async_rl": not serial,
            "num_workers": 1,  # beside the learner, on two cores
            "num_envs_per_worker": job["envs"],
            "worker_num_splits": 1,
            "batched_sampling": True,
            "set_workers_cpu_affinity": False,
            "rollout": job["n_steps"],
            "recurrence": 1,
            "batch_size": rows // job["minibatches"],
            "num_batches_per_epoch": job["minibatches"],
            "num_epochs": job["epochs"],
            "shuffle_minibatches": True,
            "gamma": job["gamma"],
            "gae_lambda": job["gae_lambda"],
            "learning_rate": job["learning_rate"],
            "ppo_clip_ratio": job["clip"],
            "ppo_clip_value": 1e9,  # no clipping of values
            "exploration_loss_coeff": job["ent_coef"],
            "value_loss_coeff": job["vf_coef"],
            "max_grad_norm": job["max_grad_norm"],
            "normalize_input": False,
            "normalize_returns": False,
            "value_bootstrap": True,
            "use_rnn": False,
            "nonlinearity": job["activation"],
            "actor_critic_share_weights": False,
            "with_wandb": False,
            "log_to_file": False,
            "save_every_sec": 10**6,
            "save_best_every_sec": 10**6,
            "experiment_summaries_interval": 10**6,
            "flush_summaries_interval": 10**6,
        }
        argv = [f"--{name}={value}" for name, value in settings.items()]
        argv += ["--encoder_mlp_layers", *map(str, job["hidden"])]
        register_env(job["env"], make_env)
        parser, _ = parse_sf_args(argv)
        _, runner = make_runner(parse_full_cfg(parser, argv))
        meter = Meter(job)
        runner.register_observer(Watch(meter, rows))
        runner.init()
        runner.run()

    notes = ["clips the ratio to [1/(1+c), 1+c]", "torch threads 1 in each process"]
    if serial:
        notes.append("serial mode, synchronous")
    else:
        notes.append("one rollout worker, one inference and one learner process; asynchronous, with policy lag")
    write(given, meter, "sample-factory", version("sample-factory"), envs_in, notes)


if __name__ == "__main__":
    main()
