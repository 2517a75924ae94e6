"""Train a model under a split: `python scripts/train.py --help` lists what there is."""

from __future__ import annotations

if __name__ == "__main__":
    # Here: ranks that are started import this file too, and need neither Hydra nor the command line.
    from trainer.cli import run_script

    run_script()
elif __name__ == "__mp_main__":
    import gc

    gc.disable()  # while a rank imports torch, all of which stays; until trainer.rank.keep_torch
