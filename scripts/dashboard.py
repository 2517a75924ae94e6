"""Build the W&B workspace of runs and sweeps: `python scripts/dashboard.py --help`."""

from __future__ import annotations

import sys

from trainer.dashboard_cli import main

if __name__ == "__main__":
    sys.exit(main())
