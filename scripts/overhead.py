"""Measure what metering costs: `python scripts/overhead.py --help`."""

from __future__ import annotations

import sys

from trainer.overhead import main

if __name__ == "__main__":
    sys.exit(main())
