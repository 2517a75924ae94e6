"""Measure what a job of a sweep costs to start: `python scripts/startup.py --help`."""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from trainer.startup import main  # here: the ranks import this file too, and are not to wait for it

    sys.exit(main())
