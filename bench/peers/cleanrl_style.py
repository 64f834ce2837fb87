"""PPO as one plain loop, in the manner of CleanRL's ppo.py and ppo_atari.py (none of its code).

.venv-cleanrl/bin/python bench/peers/cleanrl_style.py --job JOB.json --out OUT.json
"""

import functools

import gymnasium
import numpy as np
import torch
from common import Meter, arguments, refuse, write
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.distributions import Categorical


def layer(module, gain=2**0.5):
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    def __init__(self, job, obs_shape, n_actions):
        super().__init__()
        self.nature = job["net"] == "nature"
        if self.nature:  # one network, shared by policy and value
            self.body = nn.Sequential(
                layer(nn.Conv2d(4, 32, 8, stride=4)),
                nn.ReLU(),
                layer(nn.Conv2d(32, 64, 4, stride=2)),
                nn.ReLU(),
                layer(nn.Conv2d(64, 64, 3)),
                nn.ReLU(),
                nn.Flatten(),
                layer(nn.Linear(64 * 7 * 7, 512)),
                nn.ReLU(),
            )
            self.actor, self.critic = layer(nn.Linear(512, n_actions), 0.01), layer(nn.Linear(512, 1), 1.0)
        else:
            self.body = nn.Identity()
            self.actor = self.mlp(job, obs_shape[0], n_actions, 0.01)
            self.critic = self.mlp(job, obs_shape[0], 1, 1.0)

    @staticmethod
    def mlp(job, size, out, gain):
        activation = {"tanh": nn.Tanh, "relu": nn.ReLU}[job["activation"]]
        layers = []
        for width in job["hidden"]:
            layers += [layer(nn.Linear(size, width)), activation()]
            size = width
        return nn.Sequential(*layers, layer(nn.Linear(size, out), gain))

    def forward(self, obs):
        features = self.body(obs / 255.0 if self.nature else obs)
        return Categorical(logits=self.actor(features)), self.critic(features).squeeze(-1)


def make_envs(job):
    # Same-step resets, so that each row is an env step: the default spends a row of every episode on its reset.
    if job["env"].startswith("ALE/"):
        from ale_py.vector_env import AtariVectorEnv

        # Its defaults: frame skip 4, no sticky actions, 84x84 grey, stack 4, clipped rewards; C++ threads.
        game = job["env"].removeprefix("ALE/").rsplit("-", 1)[0].lower()
        return AtariVectorEnv(game, job["envs"], autoreset_mode=AutoresetMode.SAME_STEP)
    make = functools.partial(gymnasium.make, job["env"])
    return SyncVectorEnv([make] * job["envs"], autoreset_mode=AutoresetMode.SAME_STEP)


def main():
    given, job = arguments(__doc__)
    refuse(job, net=("mlp", "nature"), activation=("tanh", "relu"), normalize_obs=(False,), normalize_reward=(False,))
    threads = given.threads or (job["threads"] if job["net"] == "nature" else 1)
    torch.set_num_threads(threads)
    torch.manual_seed(job["seed"])
    np.random.seed(job["seed"])
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(make_envs(job))
    shape, n, rows = envs.single_observation_space.shape, job["envs"], job["n_steps"]
    dtype = torch.uint8 if job["net"] == "nature" else torch.float32
    agent = Agent(job, shape, envs.single_action_space.n)
    optimizer = torch.optim.Adam(agent.parameters(), lr=job["learning_rate"], eps=1e-5)

    all_obs = torch.zeros((rows, n, *shape), dtype=dtype)
    actions = torch.zeros((rows, n), dtype=torch.int64)
    logprobs, rewards, dones, values = (torch.zeros((rows, n)) for _ in range(4))
    obs = torch.as_tensor(envs.reset(seed=job["seed"])[0], dtype=dtype)
    done = torch.zeros(n)

    meter, steps = Meter(job), 0
    while not meter.round_ended(steps):
        for t in range(rows):
            all_obs[t], dones[t] = obs, done
            with torch.no_grad():
                policy, values[t] = agent(obs)
                action = policy.sample()
            actions[t], logprobs[t] = action, policy.log_prob(action)
            next_obs, reward, terminated, truncated, _ = envs.step(action.numpy())
            obs = torch.as_tensor(next_obs, dtype=dtype)
            rewards[t] = torch.as_tensor(reward)
            done = torch.as_tensor(terminated | truncated, dtype=torch.float32)
        steps += rows * n

        with torch.no_grad():
            next_value = agent(obs)[1]
            advantages = torch.zeros_like(rewards)
            last = 0.0
            for t in reversed(range(rows)):
                alive = 1.0 - (done if t == rows - 1 else dones[t + 1])
                after = next_value if t == rows - 1 else values[t + 1]
                delta = rewards[t] + job["gamma"] * alive * after - values[t]
                advantages[t] = last = delta + job["gamma"] * job["gae_lambda"] * alive * last
            returns = advantages + values

        flat = [x.flatten(0, 1) for x in (all_obs, actions, logprobs, advantages, returns)]
        for _ in range(job["epochs"]):
            for index in torch.randperm(rows * n).chunk(job["minibatches"]):
                mb_obs, mb_actions, mb_logprobs, mb_advantages, mb_returns = (x[index] for x in flat)
                policy, value = agent(mb_obs)
                ratio = (policy.log_prob(mb_actions) - mb_logprobs).exp()
                if job["normalize_advantage"]:
                    mb_advantages = (mb_advantages - mb_advantages.mean()) / (mb_advantages.std() + 1e-8)
                clipped = ratio.clamp(1 - job["clip"], 1 + job["clip"])
                policy_loss = -torch.min(mb_advantages * ratio, mb_advantages * clipped).mean()
                value_loss = (value - mb_returns).square().mean()
                entropy = policy.entropy().mean()
                loss = policy_loss + job["vf_coef"] * value_loss - job["ent_coef"] * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), job["max_grad_norm"])
                optimizer.step()
    envs.close()

    notes = [f"torch threads {threads}", "an episode that was cut off counts as ended, as in CleanRL"]
    if job["net"] == "nature":
        notes.append("games in ALE's own C++ threads")
    write(given, meter, "CleanRL-style loop", f"torch {torch.__version__}", "this process", notes)


if __name__ == "__main__":
    main()
