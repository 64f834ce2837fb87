"""How errors and log lines refer to env workers, sampler workers and evaluators, and which errors users see."""

from __future__ import annotations

import logging

from remuda.errors import ConfigError, EnvError, EnvFailed, EnvSpecError
from remuda.processes.worker_pool import WorkerKind

ENV_WORKERS = WorkerKind(
    name="env workers",
    building="building its envs",
    remedy="step the env in a single process to see what it does, or raise envs.max_worker_restarts.",
    count_option="sampler.workers",
    logger=logging.getLogger("remuda.envs"),
    errors=(ConfigError, EnvError, EnvFailed),
    build_errors=(EnvSpecError,),
)
