"""The commands of docs/cluster.md, for the tests that run them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cluster.md"
TRAIN = str(ROOT / "scripts" / "train.py")
PATH = f"{Path(sys.executable).parent}:"  # where torchrun and python are


def commands() -> list[str]:
    """The page's blocks of shell."""
    return re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def command(beginning: str, settings: str, folder: Path) -> str:
    """The block that begins so, with further settings for the run and `folder` in place of runs/."""
    (found,) = (own for own in commands() if own.startswith(beginning))
    assert found.count("scripts/train.py") == 1
    with_script = re.sub(r"scripts/train\.py( -m)?", lambda own: f"{TRAIN}{own[1] or ''} {settings}", found)
    return with_script.replace("=runs/", f"={folder}/")
