"""Keep docs/reference_config.yaml, where every key of every group stands, equal to what conf/ composes.

Without arguments: exit code 1 and the differing lines when the file has drifted; --write renews it.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path

import yaml
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import conf

REFERENCE = Path(__file__).parents[1] / "docs" / "reference_config.yaml"
PRESETS = {"experiment", "debug", "hydra"}  # they set keys, and have none of their own
HEADER = """\
# Every key and its default, written by `make reference`; what a key means stands beside it in conf/.
# First what runs when nothing is overridden, then each other choice of a group.
"""


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
        default = OmegaConf.to_container(compose("config"), resolve=True)
        assert isinstance(default, dict)
        parts = [HEADER + yaml.safe_dump(default, sort_keys=False)]
        for group, options in groups().items():
            for option in options:
                composed = OmegaConf.to_container(compose("config", [f"{group}={option}"]), resolve=True)
                assert isinstance(composed, dict)
                if composed[group] != default[group]:
                    parts.append(
                        f"# {group}={option}\n" + yaml.safe_dump({group: composed[group]}, sort_keys=False)
                    )
    return "---\n".join(parts)


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
