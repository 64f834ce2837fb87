"""Remuda: one PyTorch platform for reinforcement learning, from a laptop to a cluster.

    import remuda

    run = remuda.train("ppo", env="CartPole-v1", steps=200_000, scheme="parallel")
    print(run.evaluate(episodes=20))
    policy = remuda.load(run.path)
"""
