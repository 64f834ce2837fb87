# Each target does its own set-up: a machine with Python 3.11, pip and make is enough.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
RUN := runs/demo

.PHONY: demo test test-long check bench peers clean

demo: $(STAMP)
	rm -rf $(RUN)
	$(BIN)/remuda train ppo --env CartPole-v1 --scheme parallel --seed 1 --steps 100_000 --eval.every 20_000 --out $(RUN)
	$(BIN)/remuda eval $(RUN) --episodes 20
	$(BIN)/remuda plot $(RUN) --out $(RUN)/curve.png
	$(BIN)/remuda record $(RUN) --out $(RUN)/videos/cartpole.mp4

test: $(STAMP)
	$(BIN)/python -m pytest

# Learning runs, soaks and hundreds of kills: minutes each.
test-long: $(STAMP)
	$(BIN)/python -m pytest -m long --timeout 3600

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python bench/throughput.py

# Other libraries for side-by-side measurements, each in a virtual environment of its own.
peers: .venv-sb3/.installed

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,video,atari,mujoco,minatar,minigrid]'
	touch $(STAMP)

.venv-sb3/.installed: constraints.txt
	test -x .venv-sb3/bin/python || $(PYTHON) -m venv .venv-sb3
	.venv-sb3/bin/python -m pip install --quiet --constraint constraints.txt torch
	.venv-sb3/bin/python -m pip install --quiet --constraint constraints.txt stable-baselines3==2.9.2 'gymnasium[mujoco]'
	touch $@

clean:
	rm -rf .venv .venv-* runs build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
