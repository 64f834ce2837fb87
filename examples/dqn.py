"""Double DQN in one function, with remuda.EnvPool and remuda.ReplayBuffer in a loop of your own.

python examples/dqn.py        # CartPole-v1, 30 seconds on an idle core
"""

import copy

import numpy as np
import torch
from torch import nn

import remuda


def train(env="CartPole-v1", steps=100_000, seed=1, num_envs=8, warm_up=2_000, batch_size=128, gamma=0.99):
    """Train, and return the network and the returns of all episodes."""
    torch.set_num_threads(1)  # small networks are fastest on one thread
    torch.manual_seed(seed)
    random, returns, width = np.random.default_rng(seed), [], 128
    with (
        remuda.EnvPool(env, num_processes=1, batch_size=num_envs, seed=seed) as pool,
        remuda.ReplayBuffer(
            steps, pool.observation, pool.action, num_envs, n_step=8, gamma=gamma, seed=seed
        ) as replay,
    ):
        inputs, actions = pool.observation.shape[0], pool.action.n
        body = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()]
        net = nn.Sequential(*body, nn.Linear(width, actions))
        target, optimizer = copy.deepcopy(net), torch.optim.Adam(net.parameters())
        obs = pool.reset()[0].obs.copy()  # the pool overwrites its arrays in the next step
        for step in range(0, steps, num_envs):
            epsilon = max(0.01, 1 - step / (0.2 * steps))
            with torch.no_grad():
                greedy = net(torch.from_numpy(obs)).argmax(-1).numpy()
            explores = random.random(num_envs) < epsilon
            action = np.where(explores, random.integers(actions, size=num_envs), greedy)
            found = pool.step(0, action).result()
            replay.add(obs, action, found.reward, found.terminated, found.truncated, found.obs, found.mask)
            obs = found.obs.copy()
            returns += [episode.values["ep_rew"] for episode in pool.episodes()]
            if step % 8_000 == 0 and returns:
                print(f"{step:6d} steps, mean return {np.mean(returns[-20:]):.1f}")
            if step % (250 * num_envs) == 0:
                target.load_state_dict(net.state_dict())
            if step < warm_up:
                continue
            batch = replay.sample(batch_size)
            with torch.no_grad():
                best = net(batch.next_obs).argmax(-1, keepdim=True)
                value = target(batch.next_obs).gather(-1, best).squeeze(-1)
            q = net(batch.obs).gather(-1, batch.action[:, None]).squeeze(-1)
            loss = nn.functional.mse_loss(q, batch.reward + batch.discount * value)
            optimizer.param_groups[0]["lr"] = 1e-3 * (1 - step / steps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return net, returns


if __name__ == "__main__":
    train()
