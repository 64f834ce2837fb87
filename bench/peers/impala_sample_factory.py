"""Sample Factory's APPO on Pong, asynchronous, one pass over every batch.

echo 5 | .venv-sample-factory/bin/python bench/peers/impala_sample_factory.py --workers 2 --envs 8
"""

import argparse
import logging
import tempfile
from importlib.metadata import version

from ale_py.registration import register_v0_v4_envs
from common import WARM_UP, Turns
from sample_factory.algo.runners.runner import AlgoObserver
from sample_factory.envs.env_utils import register_env
from sample_factory.train import make_runner
from sf_examples.atari.atari_utils import make_atari_env
from sf_examples.atari.train_atari import parse_atari_args


def make_env(*words, **settings):
    register_v0_v4_envs()  # by hand, in each process: ale-py gives it up beside so old a Gymnasium
    return make_atari_env(*words, **settings)


class Watch(AlgoObserver):
    """Told of each round of the learner, all of one size."""

    def __init__(self, turns, rows):
        self.turns, self.rows = turns, rows

    def on_training_step(self, runner, training_iteration_since_resume):
        if self.turns.round_ended(training_iteration_since_resume * self.rows):
            runner.cfg.train_for_env_steps = 0  # it stops itself at its next look


def settings(given, directory):
    """What differs from its own settings for Atari."""
    return {
        "env": "atari_pong",
        "train_dir": directory,
        "experiment": "peer",
        "device": "cpu",
        "seed": 1,
        "serial_mode": False,
        "async_rl": True,
        "num_workers": given.workers,
        "num_envs_per_worker": given.envs,
        "worker_num_splits": given.splits,
        "policy_workers_per_policy": 1,
        "batched_sampling": given.batched,
        "set_workers_cpu_affinity": False,
        "decorrelate_envs_on_one_worker": False,  # it would take minutes before the first step
        "rollout": given.rollout,
        "batch_size": given.batch,
        "num_batches_per_epoch": 1,
        "num_epochs": 1,  # as IMPALA, which learns from a step once
        "normalize_input": False,  # the obs are divided by 255, as everywhere
        "normalize_returns": False,
        "train_for_env_steps": 10**9,
        "with_wandb": False,
        "log_to_file": False,
        "save_every_sec": 10**6,
        "save_best_every_sec": 10**6,
        "experiment_summaries_interval": 10**6,
        "flush_summaries_interval": 10**6,
        "heartbeat_reporting_interval": 10**6,  # while others have their turn it is stopped, not stuck
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8, help="of each worker")
    parser.add_argument("--splits", type=int, default=1, help="groups of a worker's envs, stepped in turns")
    parser.add_argument("--rollout", type=int, default=32)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--batched", action="store_true", help="whole groups of envs at once to inference")
    given = parser.parse_args()
    logging.getLogger("rl").setLevel(logging.ERROR)
    note = f"sample-factory {version('sample-factory')}, {given.workers} workers of {given.envs} envs"
    note += f" in {given.splits} groups, rollouts of {given.rollout}, batches of {given.batch}"
    with tempfile.TemporaryDirectory() as directory:
        words = [f"--{name}={value}" for name, value in settings(given, directory).items()]
        register_env("atari_pong", make_env)
        _, runner = make_runner(parse_atari_args(words))
        runner.register_observer(Watch(Turns(WARM_UP, {"counts": "learned", "note": note}), given.batch))
        runner.init()
        runner.run()


if __name__ == "__main__":
    main()
