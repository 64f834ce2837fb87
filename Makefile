# Each target does its own set-up: a machine with Python 3.11, pip and make is enough.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RUN := runs/demo

.PHONY: demo test test-long check bench clean

demo: $(STAMP)
	rm -rf $(RUN)
	$(BIN)/remuda train ppo --env CartPole-v1 --scheme parallel --seed 1 --steps 100_000 --eval.every 20_000 --out $(RUN)
	$(BIN)/remuda eval $(RUN) --episodes 20
	$(BIN)/remuda plot $(RUN) --out $(RUN)/curve.png
	$(BIN)/remuda record $(RUN) --out $(RUN)/videos/cartpole.mp4

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder --ignore tests/faults
	$(BIN)/python -m pytest --numprocesses 3 --dist worksteal tests/faults  # they mostly wait

# Learning runs, soaks and hundreds of kills: minutes each, about an hour on two cores.
test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 3600 --numprocesses auto --dist worksteal --ignore tests/faults
	$(BIN)/python -m pytest -m long --timeout 3600 tests/faults

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Side by side with the other libraries, after `make peers`: some hours in which nothing else should run.
bench: $(STAMP)
	$(BIN)/remuda bench ppo --env CartPole-v1 --slices 5 --out docs/speed/ppo-cartpole.json
	$(BIN)/remuda bench ppo --env ALE/Pong-v5 --only remuda,sb3,cleanrl --slices 10 --out docs/speed/ppo-pong.json
	$(BIN)/remuda bench ppo --env ALE/Pong-v5 --only 'remuda single envs,sb3' --slices 5 --out docs/speed/ppo-pong-single.json
	$(BIN)/remuda bench ppo --env HalfCheetah-v5 --only remuda,sb3 --slices 5 --out docs/speed/ppo-halfcheetah.json
	$(BIN)/remuda bench update --env CartPole-v1 --slices 10 --out docs/speed/update-cartpole.json
	$(BIN)/remuda bench update --env HalfCheetah-v5 --slices 10 --out docs/speed/update-halfcheetah.json
	$(BIN)/python bench/time_to.py --out docs/speed/time-to.json
	$(BIN)/python bench/time_to.py --env HalfCheetah-v5 --seeds 3 --out docs/speed/time-to-3000.json
	$(BIN)/python bench/checkpoints.py --out docs/speed/checkpoints.json
	$(BIN)/python bench/start_up.py --out docs/speed/start-up.json
	$(BIN)/python bench/updates.py sac --batch 256 --out docs/speed/sac-256.json
	$(BIN)/python bench/updates.py sac --batch 8192 --seconds 3 --out docs/speed/sac-8192.json
	$(BIN)/python bench/updates.py dqn --batch 32 --seconds 2 --out docs/speed/dqn-32.json
	$(BIN)/python bench/side_by_side.py --out docs/speed/side-by-side.json
	$(BIN)/python bench/wide.py --out docs/speed/wide.json
	$(BIN)/python bench/replay.py --out docs/speed/replay.json
	$(BIN)/python bench/end_to_end.py --out docs/speed/sac-end-to-end.json
	$(BIN)/python bench/actor_learner.py --out docs/speed/actor-learner.json
	$(BIN)/python bench/replay_checkpoint.py --out docs/speed/replay-checkpoint.json
	$(BIN)/python bench/slow_env.py --out docs/speed/slow-env.json
	$(BIN)/python bench/exchange.py --out docs/speed/exchange.json
	$(BIN)/python bench/ranks.py --out docs/speed/ranks.json
	$(BIN)/python bench/replay_writers.py --batch 256 --rounds 16 --out docs/speed/replay-writers-256.json
	$(BIN)/python bench/replay_writers.py --batch 8192 --seconds 6 --out docs/speed/replay-writers-8192.json
	$(BIN)/python bench/cpu_shares.py --out docs/speed/cpu-shares.json
	$(BIN)/python bench/async_replay.py --out docs/speed/async-replay.json
	$(BIN)/python bench/speed_page.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,video,atari,box2d,mujoco,minatar,minigrid]'
	touch $(STAMP)

include bench/peers/Makefile.inc

# The picture of the README: trains LunarLander-v3 for about four minutes, then draws agent and learning curve.
.PHONY: picture
picture: $(STAMP)
	rm -rf runs/picture
	$(BIN)/remuda train ppo --env LunarLander-v3 --seed 1 --steps 1_000_000 --checkpoint.every 50_000 --checkpoint.keep all --out runs/picture
	$(BIN)/python bench/picture.py runs/picture --out docs/images/lunarlander.gif

clean:
	rm -rf .venv .venv-* runs build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
