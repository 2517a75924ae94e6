"""Run a command on two hosts joined by a link of known speed: `python scripts/two_hosts.py --help`."""

from __future__ import annotations

import sys

from trainer.two_hosts_cli import main

if __name__ == "__main__":
    sys.exit(main())
