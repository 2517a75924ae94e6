"""Plant causes in runs and see what the verdict names: `python scripts/planted.py --help`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the cases stand with the tests

from tests.planted_matrix import main

if __name__ == "__main__":
    sys.exit(main())
