"""SAC as one plain loop, in the manner of CleanRL's sac_continuous_action.py (none of its code).

echo 2 | .venv-cleanrl/bin/python bench/peers/sac_cleanrl_style.py --threads 1

CleanRL updates actor and temperature in every second step, twice then; here once in each, which is as much work.
As there, two critics have one optimizer, the temperature has fresh actions, and target nets move tensor by tensor.
"""

import gymnasium
import numpy as np
import sac_common as common
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn
from torch.nn.functional import mse_loss

LOG_STD = (-5.0, 2.0)


class Replay:
    """Rows of one env in numpy; draws with replacement, and copies what it drew into tensors, as SB3's does."""

    def __init__(self, capacity, obs, action):
        self.capacity, self.size, self.place = capacity, 0, 0
        self.obs, self.next_obs = (np.zeros((capacity, obs), np.float32) for _ in range(2))
        self.action = np.zeros((capacity, action), np.float32)
        self.reward, self.terminated = (np.zeros((capacity, 1), np.float32) for _ in range(2))

    def add(self, **row):
        for name, value in row.items():
            getattr(self, name)[self.place] = value
        self.place = (self.place + 1) % self.capacity
        self.size = min(self.size + 1, self.capacity)

    def draw(self, count):
        index = np.random.randint(0, self.size, count)
        arrays = (self.obs, self.next_obs, self.action, self.reward, self.terminated)
        return tuple(torch.tensor(array[index]) for array in arrays)


def body(size):
    layers = []
    for width in common.HIDDEN:
        layers += [nn.Linear(size, width), nn.ReLU()]
        size = width
    return nn.Sequential(*layers)


class Actor(nn.Module):
    def __init__(self, obs, space):
        super().__init__()
        size = int(np.prod(space.shape))
        self.body = body(obs)
        self.mean, self.log_std = nn.Linear(common.HIDDEN[-1], size), nn.Linear(common.HIDDEN[-1], size)
        self.register_buffer("scale", torch.tensor((space.high - space.low) / 2))
        self.register_buffer("middle", torch.tensor((space.high + space.low) / 2))

    def forward(self, obs):
        """Actions, and the logarithm of their density."""
        features, (low, high) = self.body(obs), LOG_STD
        log_std = low + (high - low) / 2 * (torch.tanh(self.log_std(features)) + 1)
        normal = torch.distributions.Normal(self.mean(features), log_std.exp())
        drawn = normal.rsample()
        squashed = torch.tanh(drawn)
        log_prob = normal.log_prob(drawn) - torch.log(self.scale * (1 - squashed.square()) + 1e-6)
        return squashed * self.scale + self.middle, log_prob.sum(1, keepdim=True)


class Critic(nn.Module):
    def __init__(self, obs, action):
        super().__init__()
        self.net = nn.Sequential(*body(obs + action), nn.Linear(common.HIDDEN[-1], 1))

    def forward(self, obs, action):
        return self.net(torch.cat([obs, action], 1))


def make_env():
    return gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.make(common.ENV))


class Loop:
    """The loop, which can be left and entered again."""

    def __init__(self, fused):
        # Same-step resets, so that each row is an env step: the default spends a row of every episode on its reset.
        self.envs = SyncVectorEnv([make_env], autoreset_mode=AutoresetMode.SAME_STEP)
        space = self.envs.single_action_space
        space.seed(1)
        obs, action = self.envs.single_observation_space.shape[0], space.shape[0]
        self.actor = Actor(obs, space)
        self.critics = [Critic(obs, action) for _ in range(2)]
        self.targets = [Critic(obs, action) for _ in range(2)]
        for critic, target in zip(self.critics, self.targets, strict=True):
            target.load_state_dict(critic.state_dict())
        self.log_alpha, self.alpha, self.target_entropy = torch.zeros(1, requires_grad=True), 1.0, -float(action)
        of_critics = [parameter for critic in self.critics for parameter in critic.parameters()]
        self.critic_optimizer, self.actor_optimizer, self.alpha_optimizer = (
            torch.optim.Adam(parameters, lr=common.RATE, fused=fused or None)
            for parameters in (of_critics, self.actor.parameters(), [self.log_alpha])
        )
        self.replay = Replay(common.REPLAY, obs, action)
        self.obs, _ = self.envs.reset(seed=1)
        self.steps = 0

    def run(self, steps):
        for _ in range(steps):
            self.step()
            if self.steps > common.RANDOM:
                self.update()

    def step(self):
        if self.steps < common.RANDOM:
            action = self.envs.single_action_space.sample()[None]
        else:
            with torch.no_grad():
                action = self.actor(torch.tensor(self.obs, dtype=torch.float32))[0].numpy()
        next_obs, reward, terminated, truncated, infos = self.envs.step(action)
        last = next_obs
        if truncated[0] or terminated[0]:
            last = infos["final_obs"][0]
        self.replay.add(obs=self.obs, next_obs=last, action=action, reward=reward, terminated=terminated)
        self.obs = next_obs
        self.steps += 1

    def update(self):
        obs, next_obs, action, reward, terminated = self.replay.draw(common.BATCH)
        with torch.no_grad():
            next_action, next_log_prob = self.actor(next_obs)
            next_value = torch.min(*(target(next_obs, next_action) for target in self.targets))
            wanted = reward + (1 - terminated) * common.GAMMA * (next_value - self.alpha * next_log_prob)
        critic_loss = sum(mse_loss(critic(obs, action), wanted) for critic in self.critics)
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        chosen, log_prob = self.actor(obs)
        value = torch.min(*(critic(obs, chosen) for critic in self.critics))
        actor_loss = (self.alpha * log_prob - value).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward()
        self.actor_optimizer.step()

        with torch.no_grad():
            _, log_prob = self.actor(obs)
        alpha_loss = -(self.log_alpha.exp() * (log_prob + self.target_entropy)).mean()
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()
        self.alpha = self.log_alpha.exp().item()

        for critic, target in zip(self.critics, self.targets, strict=True):
            for new, old in zip(critic.parameters(), target.parameters(), strict=True):
                old.data.copy_(common.TAU * new.data + (1 - common.TAU) * old.data)


def main():
    given = common.arguments(__doc__, ("--fused", "Adam in one kernel, which CleanRL does not ask for"))
    common.require_mujoco()
    torch.set_num_threads(given.threads)
    torch.manual_seed(1)
    np.random.seed(1)
    loop = Loop(given.fused)
    loop.run(common.RANDOM + common.WARM_UP)
    optimizers = [loop.critic_optimizer, loop.actor_optimizer, loop.alpha_optimizer]
    note = f"one plain loop, torch {torch.__version__}, torch threads {given.threads}"
    note += ", fused Adam" if given.fused else ""
    common.take_turns(loop.run, lambda: loop.steps, optimizers, note)


if __name__ == "__main__":
    main()
