"""Time our splits beside torch's own on the same work: `python scripts/compare.py --help`."""

from __future__ import annotations

import sys

from trainer.comparison_cli import main

if __name__ == "__main__":
    sys.exit(main())
