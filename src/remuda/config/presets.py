"""Defaults per algorithm and family of environments, so that `remuda train ALGO --env ID` learns untouched.

A preset names the values that differ from the options' own defaults. The first pattern that matches an env's id
counts; envs that no pattern knows get the preset of their kind of actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from remuda.config import replay_presets as value_presets
from remuda.core import Space
from remuda.envs import is_atari

Preset = Mapping[str, Mapping[str, Any]]

PPO: dict[str, Preset] = {
    # Chosen on seeds 11 to 16, among eleven: with half the learning rate it takes half as long again to reach 475.
    "CartPole-*": {
        "run": {"steps": 200_000},
        "sampler": {"envs": 8},
        "algo": {
            "n_steps": 32,
            "batch_size": 256,
            "n_epochs": 20,
            "gamma": 0.98,
            "gae_lambda": 0.8,
            "learning_rate": "linear(2e-3, 0)",
            "clip_range": "linear(0.2, 0)",
        },
    },
    "Acrobot-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 16, "decorrelate": 100},
        "agent": {"normalize_obs": True},
        "algo": {"n_steps": 128, "batch_size": 256, "n_epochs": 4, "gae_lambda": 0.94, "normalize_reward": True},
    },
    "MountainCar-*": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 16},
        "agent": {"normalize_obs": True},
        "algo": {"n_steps": 16, "batch_size": 256, "gae_lambda": 0.98, "normalize_reward": True},
    },
    "Pendulum-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 8, "decorrelate": 200},
        "algo": {
            "n_steps": 256,
            "batch_size": 256,
            "n_epochs": 10,
            "gamma": 0.9,
            "learning_rate": "linear(1e-3, 0)",
            "normalize_reward": True,
        },
    },
    # Pong, before images were centred, learned nothing in 50,000 to 600,000 steps at learning rates of 4e-4 to 1e-3;
    # centred, with 5e-4 and a clip_range of 0.2, its paddle went to a wall, where nothing it does makes a difference.
    "ALE/*": {
        "run": {"steps": 10_000_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True, "center_images": True},
        "algo": {
            "n_steps": 128,
            "batch_size": 256,
            "n_epochs": 4,
            "learning_rate": "linear(3e-4, 1e-4)",
            "clip_range": "0.1",
            "ent_coef": "0.01",
            "vf_coef": 0.25,
            "clip_reward": True,
        },
    },
    # Breakout has a trap at 7 points, from which a policy that has stopped exploring does not come back: seed 11
    # stayed there with an ent_coef of 0.01, seed 1 with 0.03. These values were chosen on seed 12.
    "MinAtar/*": {
        "run": {"steps": 3_000_000},
        "sampler": {"envs": 32},
        "agent": {"shared": True},
        "algo": {
            "n_steps": 128,
            "batch_size": 1024,
            "learning_rate": "linear(1e-3, 1e-4)",
            "ent_coef": "linear(0.1, 0.01)",
            "gae_lambda": 0.98,
            "normalize_reward": True,
        },
    },
    # Tasks for memory: minibatches are whole sequences, so that --agent.core lstm needs nothing else.
    "Remuda/Recall-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {"n_steps": 64, "batch_size": 256, "ent_coef": "0.01", "learning_rate": "linear(1e-3, 0)"},
    },
    "Remuda/CartPolePositions-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {"n_steps": 128, "batch_size": 512, "n_epochs": 10, "learning_rate": "linear(1e-3, 0)"},
    },
    # Chosen on seeds 11 and 12 of LunarLander-v3, CliffWalking-v1, FrozenLake-v1 and Acrobot-v1, among three
    # candidates (docs/results/candidates). Rollouts of 128 rows and 4 epochs without normalizers ended LunarLander
    # at -60.
    "discrete": {
        "run": {"steps": 1_000_000},
        "agent": {"normalize_obs": True},
        "algo": {
            "n_steps": 256,
            "batch_size": 128,
            "n_epochs": 10,
            "ent_coef": "0.01",
            "learning_rate": "linear(5e-4, 0)",
            "normalize_reward": True,
        },
    },
    # Chosen on seed 11 of HalfCheetah-v5 and Hopper-v5, the first values tried.
    "box": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 8, "decorrelate": 200},
        "agent": {"normalize_obs": True, "log_std_init": -0.5},
        "algo": {
            "n_steps": 256,
            "batch_size": 128,
            "n_epochs": 10,
            "learning_rate": "linear(3e-4, 0)",
            "normalize_reward": True,
        },
    },
}

A2C: dict[str, Preset] = {
    "CartPole-*": {
        "run": {"steps": 500_000},
        # Not with normalised advantages: once every episode is perfect they are noise, and noise is what is learned.
        "algo": {"n_steps": 5, "learning_rate": "linear(7e-4, 0)"},
    },
    "ALE/*": {
        "run": {"steps": 10_000_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {"n_steps": 5, "ent_coef": "0.01", "clip_reward": True},
    },
    "discrete": {"run": {"steps": 1_000_000}, "sampler": {"envs": 16}, "algo": {"ent_coef": "0.01"}},
    "box": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 16, "decorrelate": 200},
        "agent": {"normalize_obs": True},
        "algo": {"n_steps": 16, "gae_lambda": 0.9, "normalize_reward": True},
    },
}

# The first values tried, most of them; docs/results.md says which were run. Means of losses wherever a net is small:
# sums over all rows of a batch make gradients that only RMSprop with a large epsilon knows how to take.
IMPALA: dict[str, Preset] = {
    "CartPole-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 8},
        "algo": {"n_steps": 20, "batch_size": 8, "learning_rate": "linear(2e-3, 0)", "ent_coef": "0.01"},
    },
    "Pendulum-*": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 16, "decorrelate": 200},
        "algo": {
            "n_steps": 32,
            "batch_size": 16,
            "gamma": 0.9,
            "learning_rate": "linear(1e-3, 0)",
            "max_grad_norm": 0.5,
            "normalize_reward": True,
        },
    },
    # As TorchBeast has it. moolib's are in docs/algorithms/impala.md, to be given by hand.
    "ALE/*": {
        "run": {"steps": 10_000_000},
        "sampler": {"envs": 16},
        # With the last action and reward shown, these go beside the features to the heads or the memory, as they are.
        "agent": {"shared": True, "hidden": ()},
        "algo": {
            "n_steps": 80,
            "batch_size": 8,
            "optimizer": "rmsprop",
            "learning_rate": "linear(4.8e-4, 0)",
            "optimizer_eps": 0.01,
            "rms_alpha": 0.99,
            "max_grad_norm": 40.0,
            "ent_coef": "0.0006",
            "reduction": "sum",
            "clip_reward": True,
        },
    },
    "MinAtar/*": {
        "run": {"steps": 5_000_000},
        "sampler": {"envs": 32},
        "agent": {"shared": True},
        "algo": {
            "n_steps": 20,
            "batch_size": 32,
            "learning_rate": "linear(1e-3, 1e-4)",
            "ent_coef": "linear(0.05, 0.01)",
            "normalize_reward": True,
        },
    },
    "Remuda/Recall-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {"n_steps": 64, "batch_size": 8, "ent_coef": "0.01", "learning_rate": "linear(1e-3, 0)"},
    },
    "Remuda/CartPolePositions-*": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {"n_steps": 64, "batch_size": 8, "ent_coef": "0.01", "learning_rate": "linear(1e-3, 0)"},
    },
    "discrete": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 16},
        "algo": {"ent_coef": "0.01", "learning_rate": "linear(6e-4, 0)"},
    },
    "box": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 16, "decorrelate": 200},
        "agent": {"normalize_obs": True, "log_std_init": -0.5},
        "algo": {
            "n_steps": 32,
            "batch_size": 16,
            "learning_rate": "linear(6e-4, 0)",
            "max_grad_norm": 0.5,
            "normalize_reward": True,
        },
    },
}

APPO: dict[str, Preset] = {
    "CartPole-*": {
        "run": {"steps": 200_000},
        "sampler": {"envs": 8},
        "algo": {"n_steps": 32, "batch_size": 8, "n_epochs": 10, "gamma": 0.98, "learning_rate": "linear(2e-3, 0)"},
    },
    "Pendulum-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 8, "decorrelate": 200},
        "algo": {
            "n_steps": 64,
            "batch_size": 4,
            "n_epochs": 10,
            "gamma": 0.9,
            "vtrace_lambda": 0.95,
            "learning_rate": "linear(1e-3, 0)",
            "normalize_reward": True,
        },
    },
    "ALE/*": {
        "run": {"steps": 10_000_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True, "center_images": True, "hidden": ()},
        "algo": {
            "n_steps": 64,
            "batch_size": 8,
            "n_epochs": 4,
            "learning_rate": "linear(3e-4, 1e-4)",
            "clip_range": "0.1",
            "ent_coef": "0.01",
            "vf_coef": 0.25,
            "vtrace_lambda": 0.95,
            "clip_reward": True,
        },
    },
    "MinAtar/*": {
        "run": {"steps": 3_000_000},
        "sampler": {"envs": 32},
        "agent": {"shared": True},
        "algo": {
            "n_steps": 64,
            "batch_size": 16,
            "n_epochs": 4,
            "learning_rate": "linear(1e-3, 1e-4)",
            "ent_coef": "linear(0.1, 0.01)",
            "vtrace_lambda": 0.98,
            "normalize_reward": True,
        },
    },
    "Remuda/Recall-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {
            "n_steps": 64,
            "batch_size": 4,
            "n_epochs": 4,
            "ent_coef": "0.01",
            "learning_rate": "linear(1e-3, 0)",
        },
    },
    "Remuda/CartPolePositions-*": {
        "run": {"steps": 500_000},
        "sampler": {"envs": 16},
        "agent": {"shared": True},
        "algo": {"n_steps": 128, "batch_size": 4, "n_epochs": 10, "learning_rate": "linear(1e-3, 0)"},
    },
    "discrete": {
        "run": {"steps": 1_000_000},
        "algo": {"n_steps": 64, "n_epochs": 4, "ent_coef": "0.01", "learning_rate": "linear(5e-4, 0)"},
    },
    "box": {
        "run": {"steps": 1_000_000},
        "sampler": {"envs": 8, "decorrelate": 200},
        "agent": {"normalize_obs": True, "log_std_init": -0.5},
        "algo": {
            "n_steps": 128,
            "batch_size": 2,
            "n_epochs": 10,
            "vtrace_lambda": 0.95,
            "learning_rate": "linear(3e-4, 0)",
            "normalize_reward": True,
        },
    },
}

PRESETS = {
    "a2c": A2C,
    "appo": APPO,
    "ddpg": value_presets.DDPG,
    "dqn": value_presets.DQN,
    "impala": IMPALA,
    "ppo": PPO,
    "r2d1": value_presets.R2D1,
    "rainbow": value_presets.RAINBOW,
    "sac": value_presets.SAC,
    "td3": value_presets.TD3,
}


def find_preset(algo: str, env: str, action: Space) -> Preset:
    """Return the preset of this env: by the pattern of its id (without any module prefix), else by its actions.

    All ids of Atari games count as `ALE/*`, such as PongNoFrameskip-v4 and Pong-v4.
    """
    table = PRESETS[algo]
    name = env.rpartition(":")[2]
    if is_atari(name) and not name.startswith("ALE/"):
        name = f"ALE/{name}"
    for pattern, preset in table.items():
        if fnmatchcase(name, pattern):
            return preset
    is_continuous = all(leaf.kind == "box" for _, leaf in action.leaves())
    # What an algorithm cannot learn at all is refused later, with the reason.
    return table.get("box" if is_continuous else "discrete", next(iter(table.values())))
