"""Measure the collectives: `python scripts/bench.py --help` lists what there is."""

from __future__ import annotations

import sys

from trainer.bench_config import BenchRun
from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main(job=BenchRun))
