"""The kinds of job there are, by the name that reaches a rank as text."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.bench_config import BenchRun
from trainer.config import RunConfig
from trainer.job import JobConfig

JOBS: Mapping[str, type[JobConfig]] = {job.kind: job for job in (RunConfig, BenchRun)}
