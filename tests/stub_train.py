"""scripts/train.py with a worker from stub_workers: python stub_train.py WORKER [overrides]."""

from __future__ import annotations

import os
import sys
import time

if __name__ == "__main__":
    if os.environ.get("RANK") == os.environ.get("STUB_LATE_RANK", "none"):
        time.sleep(float(os.environ["STUB_LATE_S"]))
    from trainer.cli import main

    worker = sys.argv.pop(1)
    sys.exit(main(f"stub_workers:{worker}"))
elif __name__ == "__mp_main__":
    import gc

    gc.disable()  # as scripts/train.py
