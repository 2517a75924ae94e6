"""Measure what collectives use of a link of known speed: `python scripts/link_share.py --help`."""

from __future__ import annotations

import sys

from trainer.link_share_cli import main

if __name__ == "__main__":
    sys.exit(main())
