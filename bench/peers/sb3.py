"""PPO of Stable-Baselines3.

.venv-sb3/bin/python bench/peers/sb3.py --job JOB.json --out OUT.json
"""

import functools

import gymnasium
import stable_baselines3
import torch
from common import Meter, arguments, refuse, write
from stable_baselines3 import PPO
from stable_baselines3.common.atari_wrappers import AtariWrapper
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecFrameStack, VecNormalize

VEC_ENVS = {"this process": DummyVecEnv, "subprocesses": SubprocVecEnv}


def make_atari(env, **settings):
    import ale_py  # here, because each subprocess has to register the games for itself

    gymnasium.register_envs(ale_py)
    return gymnasium.make(env, **settings)


def make_envs(job, envs_in):
    if job["env"].startswith("ALE/"):
        # AtariWrapper skips the frames (and takes the maximum of the last two); the game itself must not skip again.
        envs = make_vec_env(
            functools.partial(make_atari, job["env"]),
            n_envs=job["envs"],
            seed=job["seed"],
            env_kwargs={"frameskip": 1, "repeat_action_probability": 0.0},
            wrapper_class=AtariWrapper,
            wrapper_kwargs={"frame_skip": 4, "terminal_on_life_loss": False, "clip_reward": True},
            vec_env_cls=VEC_ENVS[envs_in],
        )
        return VecFrameStack(envs, n_stack=4)
    envs = make_vec_env(job["env"], n_envs=job["envs"], seed=job["seed"], vec_env_cls=VEC_ENVS[envs_in])
    if job["normalize_obs"] or job["normalize_reward"]:
        envs = VecNormalize(
            envs, norm_obs=job["normalize_obs"], norm_reward=job["normalize_reward"], gamma=job["gamma"]
        )
    return envs


def main():
    given, job = arguments(__doc__, tuple(VEC_ENVS))
    refuse(job, net=("mlp", "nature"), activation=("tanh", "relu"))
    atari = job["net"] == "nature"
    # Messages cost more than a step of CartPole; --envs-in tries the other way.
    envs_in = given.envs_in or ("subprocesses" if atari else "this process")
    threads = given.threads or (job["threads"] if atari else 1)
    torch.set_num_threads(threads)

    activation = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU}[job["activation"]]
    hidden = {"pi": job["hidden"], "vf": job["hidden"]}
    model = PPO(
        "CnnPolicy" if atari else "MlpPolicy",
        make_envs(job, envs_in),
        n_steps=job["n_steps"],
        batch_size=job["envs"] * job["n_steps"] // job["minibatches"],
        n_epochs=job["epochs"],
        gamma=job["gamma"],
        gae_lambda=job["gae_lambda"],
        learning_rate=job["learning_rate"],
        clip_range=job["clip"],
        ent_coef=job["ent_coef"],
        vf_coef=job["vf_coef"],
        max_grad_norm=job["max_grad_norm"],
        normalize_advantage=job["normalize_advantage"],
        policy_kwargs={} if atari else {"net_arch": hidden, "activation_fn": activation},
        seed=job["seed"],
        device="cpu",
    )
    meter = Meter(job)
    if job["warm_up"]:
        model.learn(job["warm_up"], log_interval=10**9)
    meter.round_ended(model.num_timesteps)
    # learn() does whole rounds and, told not to reset the count, goes on where it stopped.
    model.learn(job["steps"], log_interval=10**9, reset_num_timesteps=False)
    meter.round_ended(model.num_timesteps)
    model.env.close()

    notes = [f"torch threads {threads}", "one Monitor per env, as make_vec_env does"]
    notes.append("a value for the last obs of truncated episodes, one call each")
    write(given, meter, "stable-baselines3", stable_baselines3.__version__, envs_in, notes)


if __name__ == "__main__":
    main()
