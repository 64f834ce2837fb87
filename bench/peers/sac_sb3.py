"""SAC of Stable-Baselines3: `model.learn`, a chunk at a time.

echo 2 | .venv-sb3/bin/python bench/peers/sac_sb3.py --threads 1
"""

import sac_common as common
import stable_baselines3
import torch
from stable_baselines3 import SAC
from stable_baselines3.common.logger import configure


def main():
    given = common.arguments(__doc__, ("--fused", "Adam in one kernel, which SB3 takes if asked to"))
    torch.set_num_threads(given.threads)
    policy = {"net_arch": list(common.HIDDEN), "activation_fn": torch.nn.ReLU}
    if given.fused:
        policy["optimizer_kwargs"] = {"fused": True}
    model = SAC(
        "MlpPolicy",
        common.ENV,  # which it wraps in a Monitor and a DummyVecEnv
        learning_rate=common.RATE,
        buffer_size=common.REPLAY,
        learning_starts=common.RANDOM,
        batch_size=common.BATCH,
        tau=common.TAU,
        gamma=common.GAMMA,
        train_freq=1,
        gradient_steps=1,
        ent_coef="auto",
        policy_kwargs=policy,
        seed=1,
        device="cpu",
    )
    model.set_logger(configure(None, []))  # it keeps its means and writes them nowhere

    def run(steps):
        # Told not to reset the count, it goes on where it stopped, in the same episode.
        model.learn(steps, reset_num_timesteps=False)

    run(common.RANDOM + common.WARM_UP)
    optimizers = [model.actor.optimizer, model.critic.optimizer, model.ent_coef_optimizer]
    note = f"stable-baselines3 {stable_baselines3.__version__}, torch threads {given.threads}"
    note += ", fused Adam" if given.fused else ""
    common.take_turns(run, lambda: model.num_timesteps, optimizers, note)


if __name__ == "__main__":
    main()
