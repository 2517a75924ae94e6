"""Keep docs/reference_config.yaml, where every key of every group stands, equal to what conf/ composes.

Without arguments: exit code 1 and the differing lines when the file has drifted; --write renews it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import conf

REFERENCE = Path(__file__).parents[1] / "docs" / "reference_config.yaml"
PRESETS = {"experiment", "debug", "hydra"}  # they set keys, and have none of their own
HEADERS = {  # by the file in conf/ that a script starts from
    "config": """\
# Every key and its default, written by `make reference`; what a key means stands beside it in conf/.
# scripts/train.py: first what runs when nothing is overridden, then each other choice of a group.
""",
    "bench": """\
# scripts/bench.py, likewise; choices of a group that stand above are not repeated.
""",
}


def groups() -> dict[str, list[str]]:
    """Options of each configuration group that has keys of its own."""
    (root,) = (Path(path) for path in conf.__path__)
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(root.iterdir())
        if folder.is_dir() and folder.name not in PRESETS and any(folder.glob("*.yaml"))
    }


def reference() -> str:
    """The text that the file must hold."""
    with initialize_config_module("conf", version_base="1.3"):
        return "---\n".join(dict.fromkeys(part for root in HEADERS for part in parts(root)))


def parts(root: str) -> list[str]:
    """What is composed from one file: the default, then each other choice of its groups."""
    default = _composed(root)
    found = [HEADERS[root] + yaml.safe_dump(default, sort_keys=False)]
    for group, options in groups().items():
        for option in options if group in default else ():
            section = _composed(root, f"{group}={option}")[group]
            if section != default[group]:
                found.append(f"# {group}={option}\n" + yaml.safe_dump({group: section}, sort_keys=False))
    return found


def _composed(root: str, *overrides: str) -> dict[Any, Any]:
    composed = OmegaConf.to_container(compose(root, list(overrides)), resolve=True)
    assert isinstance(composed, dict)
    return composed


def main() -> int:
    """Check or write the file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the file anew")
    write = parser.parse_args().write
    wanted = reference()
    if write:
        REFERENCE.parent.mkdir(exist_ok=True)
        REFERENCE.write_text(wanted, encoding="utf-8")
        return 0
    found = REFERENCE.read_text(encoding="utf-8") if REFERENCE.exists() else ""
    if found == wanted:
        return 0
    print(*difflib.unified_diff(found.splitlines(), wanted.splitlines(), lineterm=""), sep="\n")
    print(f"{REFERENCE.name} has drifted from conf/; `make reference` writes it anew", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
