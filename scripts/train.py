"""Train a model under a split: `python scripts/train.py --help` lists what there is."""

from __future__ import annotations

import sys

from trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
