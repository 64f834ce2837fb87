"""Presets of the algorithms that learn from fresh rollouts; presets.py describes the format."""

from __future__ import annotations

from remuda.config.replay_presets import Preset

PPO: dict[str, Preset] = {
    # These values were chosen among eleven candidates on seeds 11 to 16. With half the learning rate, the agent takes
    # 1.5 times as long to reach a return of 475.
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
    # Without center_images, the agent learned nothing on Pong in runs of 50,000 to 600,000 steps with learning rates
    # of 4e-4 to 1e-3. With center_images, a learning rate of 5e-4 and a clip_range of 0.2, the paddle got stuck at a
    # wall, where actions have no effect.
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
    # If a policy for Breakout stops exploring early, its return never exceeds 7. This happened on seed 11 with an
    # ent_coef of 0.01 and on seed 1 with 0.03. The values here were chosen on seed 12.
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
    # For memory tasks, batch_size is a multiple of n_steps, so that --agent.core lstm works without other options.
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
    # These values were chosen among three candidates (docs/results/candidates), on seeds 11 and 12 of
    # LunarLander-v3, CliffWalking-v1, FrozenLake-v1 and Acrobot-v1. With rollouts of 128 rows, 4 epochs and no
    # normalization, LunarLander ended at a return of -60.
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
    # These values were tried on seed 11 of HalfCheetah-v5 and Hopper-v5. No other values were tried.
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
        # normalize_advantage stays off, because standardized advantages are pure noise once every episode is perfect.
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

# Most of these values are the first that were tried; docs/results.md lists the envs. Presets for small nets average
# losses over rows (the default of `reduction`), because summed losses need RMSprop with a large epsilon.
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
    # These are the values of TorchBeast; docs/algorithms/impala.md lists those of moolib.
    "ALE/*": {
        "run": {"steps": 10_000_000},
        "sampler": {"envs": 16},
        # Without hidden layers, previous action and reward are concatenated directly to the features of the image.
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
