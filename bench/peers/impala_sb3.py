"""A2C of Stable-Baselines3 on Pong, which learns from 20 steps of 16 envs at a time.

echo 5 | .venv-sb3/bin/python bench/peers/impala_sb3.py --envs-in 'this process' --threads 1
"""

import argparse

import stable_baselines3
import torch
from common import ATARI, WARM_UP, Turns
from sb3 import VEC_ENVS, make_envs
from stable_baselines3 import A2C
from stable_baselines3.common.logger import configure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs-in", choices=tuple(VEC_ENVS), default="subprocesses")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = A2C(
        "CnnPolicy",  # Nature's net, whose 512 features the two heads share
        make_envs({"env": ATARI, "envs": 16, "seed": 1}, given.envs_in),
        n_steps=20,
        ent_coef=0.01,
        seed=1,
        device="cpu",
    )
    model.set_logger(configure(None, []))
    note = (
        f"stable-baselines3 {stable_baselines3.__version__}, envs in {given.envs_in}, torch threads {given.threads}"
    )
    turns = Turns(WARM_UP, {"counts": "learned", "note": note})
    while not turns.round_ended(model.num_timesteps):
        # One rollout and its update; told not to reset the count, it goes on where it stopped.
        model.learn(model.n_steps * model.n_envs, reset_num_timesteps=False)
    model.env.close()


if __name__ == "__main__":
    main()
