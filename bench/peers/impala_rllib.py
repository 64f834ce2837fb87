"""IMPALA of Ray RLlib on Pong, on its new API stack or the old one.

echo 5 | .venv-rllib/bin/python bench/peers/impala_rllib.py --stack old --runners 2 --envs 8
"""

import argparse
import logging
import os
import tempfile
from importlib.metadata import version

# Before Ray is imported: neither usage reports nor loggers that nobody reads.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"

import ray
import torch
from common import ATARI, WARM_UP, Turns
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.models import ModelCatalog
from ray.rllib.models.torch.torch_modelv2 import TorchModelV2
from ray.tune.registry import register_env
from ray.tune.trainable import trainable
from torch import nn

ACTIONS = 6


def make_game(settings=None):
    import ale_py  # here, because each actor has to register the games for itself
    import gymnasium
    from ray.rllib.env.wrappers.atari_wrappers import wrap_deepmind

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(ATARI, frameskip=1, repeat_action_probability=0.0)
    # Of its two stacks of wrappers the faster one: bytes, and frames are scaled once the others have been skipped.
    return wrap_deepmind(game, dim=84, framestack=True, noframeskip=True)


def make_trunk():
    """Nature's net, which its own settings cannot describe: with a layer of 512 that both heads share."""
    convs = [
        nn.Conv2d(4, 32, 8, 4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 4, 2),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 1),
        nn.ReLU(),
    ]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU())


def scaled(images):
    return images.permute(0, 3, 1, 2).float() / 255


class NewNature(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        self.trunk, self.policy, self.value = make_trunk(), nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def _forward(self, batch, **settings):
        return {Columns.ACTION_DIST_INPUTS: self.policy(self.trunk(scaled(batch[Columns.OBS])))}

    def _forward_train(self, batch, **settings):
        features = self.trunk(scaled(batch[Columns.OBS]))
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.EMBEDDINGS: features}

    def compute_values(self, batch, embeddings=None):
        features = self.trunk(scaled(batch[Columns.OBS])) if embeddings is None else embeddings
        return self.value(features).squeeze(-1)


class OldNature(TorchModelV2, nn.Module):
    def __init__(self, *words):
        TorchModelV2.__init__(self, *words)
        nn.Module.__init__(self)
        self.trunk, self.policy, self.value = make_trunk(), nn.Linear(512, ACTIONS), nn.Linear(512, 1)

    def forward(self, batch, state, lengths):
        self.features = self.trunk(scaled(batch["obs"]))
        return self.policy(self.features), state

    def value_function(self):
        return self.value(self.features).squeeze(-1)


def make_config(given):
    register_env("pong", make_game)
    config = (
        IMPALAConfig()
        .environment("pong", clip_rewards=True)
        .env_runners(
            num_env_runners=given.runners,
            num_envs_per_env_runner=given.envs,
            rollout_fragment_length=given.fragment,
        )
        .training(timeout_s_sampler_manager=given.wait)
        .reporting(min_time_s_per_iteration=0.5)  # between two looks at the clock
        .debugging(seed=1, log_level="ERROR")
    )
    if given.stack == "new":
        config.learners(num_learners=given.learners)
        return config.rl_module(rl_module_spec=RLModuleSpec(NewNature)).training(
            train_batch_size_per_learner=given.batch
        )
    ModelCatalog.register_custom_model("nature", OldNature)
    config.api_stack(enable_rl_module_and_learner=False, enable_env_runner_and_connector_v2=False)
    config.env_runners(preprocessor_pref=None).experimental(_disable_preprocessor_api=True)
    return config.resources(num_gpus=0).training(train_batch_size=given.batch, model={"custom_model": "nature"})


def steps_trained(result, given):
    """Of all the run; the new stack counts one more for each fragment, whose last obs is there for its value."""
    if given.stack == "old":
        return result["num_env_steps_trained"]
    found = result.get("learners", {}).get("__all_modules__", {})  # nothing before the first update
    return found.get("num_env_steps_trained_lifetime", 0) * given.fragment // (given.fragment + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stack", choices=("new", "old"), default="new")
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--envs", type=int, default=8, help="of each runner")
    parser.add_argument("--learners", type=int, default=0, help="actors that learn; 0: the driver does")
    parser.add_argument("--fragment", type=int, default=20)
    parser.add_argument("--batch", type=int, default=320)
    parser.add_argument("--wait", type=float, default=0.05, help="for samples; its own 0 spins")
    parser.add_argument("--threads", type=int, default=1, help="of torch where it learns")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    # More CPUs than there are, so that every actor may start.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    with tempfile.TemporaryDirectory() as directory:
        trainable.DEFAULT_STORAGE_PATH = directory  # instead of a new directory in the user's home for each run
        algorithm = make_config(given).build_algo()
        note = f"ray {version('ray')}, {given.stack} API stack, {given.runners} runners of {given.envs} envs, "
        note += f"fragments of {given.fragment}, batches of {given.batch}, torch threads {given.threads}, "
        note += f"{given.learners} actors that learn" if given.learners else "the driver learns"
        turns, steps = Turns(WARM_UP, {"counts": "learned", "note": note}), 0
        while not turns.round_ended(steps):
            result = algorithm.train()
            steps = steps_trained(result, given)
        algorithm.stop()
    ray.shutdown()


if __name__ == "__main__":
    main()
