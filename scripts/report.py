"""Rebuild a run's report, or compare two runs: `python scripts/report.py --help`."""

from __future__ import annotations

import sys

from trainer.report_cli import main

if __name__ == "__main__":
    sys.exit(main())
