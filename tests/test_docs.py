"""Every command in the README and in docs/ is run, or stands here with where else it is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from tests.launched import NAMES

ROOT = Path(__file__).resolve().parents[1]
# Commands that set up or run everything, which is what CI does; or that another test runs, with its name.
ELSEWHERE: Mapping[str, str] = {
    "make": ".ci/run",
    "python -m venv old": "by hand, before a release",
    "python scripts/startup.py": "tests/test_startup.py; its exit code is that of a bar in time",
}
# Pages whose commands need a Slurm, two hosts or a server: the tests that run them.
PAGES_ELSEWHERE: Mapping[str, str] = {
    "cluster.md": "tests/test_slurm.py, tests/test_two_nodes.py",
    "wandb.md": "tests/test_docs_wandb.py",
}
SHORT = (
    "trainer.max_steps=6", "trainer.warmup_steps=1", "logger=none",
    "trainer.verdict_budget_s=0.2", "collectives.link_budget_s=0.2",
)  # fmt: skip
PAGES = [
    ROOT / "README.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in PAGES_ELSEWHERE),
]


def commands(page: Path) -> Iterator[str]:
    """The lines of a page's sh blocks, those that a backslash continues joined, without comments."""
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
        for line in block.replace("\\\n", " ").splitlines():
            text = re.sub(r"(^|\s)#\s.*$", "", line).strip()
            if text:
                yield " ".join(text.split())


def found() -> list[tuple[str, str]]:
    pairs = {text: page.name for page in reversed(PAGES) for text in commands(page)}
    return sorted((page, text) for text, page in pairs.items())


def elsewhere(text: str) -> str | None:
    return next((where for start, where in ELSEWHERE.items() if text.startswith(start)), None)


COMMANDS = found()
RUN_HERE = [own for own in COMMANDS if elsewhere(own[1]) is None]


def test_commands_are_found_in_the_pages() -> None:
    texts = [text for _, text in COMMANDS]
    assert "make train" in texts
    assert any("examples/plugin" in text and "strategy=blocking" in text for text in texts)
    assert not any("\\" in text or "  #" in text for text in texts)
    assert all(any(text.startswith(start) for text in texts) for start in ELSEWHERE), "one is gone"


def test_commands_that_other_tests_run_are_named_there() -> None:
    for page, tests in PAGES_ELSEWHERE.items():
        assert (ROOT / "docs" / page).is_file()
        assert all((ROOT / name).is_file() for name in tests.split(", "))


def small(text: str, folder: Path) -> str:
    """The command with few steps and its files in `folder`, otherwise as it stands."""
    if "scripts/train.py" in text and "--" not in text.split("scripts/train.py")[1]:
        text += " " + " ".join(SHORT)
        for key in ("hydra.run.dir", "hydra.sweep.dir"):
            if key not in text:
                text += f" {key}={folder}/{key}"
    elif "scripts/bench.py" in text and "--" not in text.split("scripts/bench.py")[1]:
        text += f" bench.iterations=1 bench.warmup=1 bench.rounds=2 logger=none hydra.run.dir={folder}/run"
        text += " bench.sizes=[1MB]" if "400mb" in text else " bench.max_size=64KiB"
    return text


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what commands take: RUN, OTHER, SWEEP, x.npy, y.npy."""
    folder = tmp_path_factory.mktemp("docs")
    for name in ("RUN", "OTHER"):
        text = f"python scripts/train.py {' '.join(SHORT)} hydra.run.dir={folder}/{name}"
        assert run(text).returncode == 0
    text = f"python scripts/train.py -m seed=0,1 {' '.join(SHORT)} hydra.sweep.dir={folder}/SWEEP"
    assert run(text).returncode == 0
    generator = np.random.default_rng(0)
    np.save(folder / "x.npy", generator.standard_normal((512, 16)))
    np.save(folder / "y.npy", np.arange(512) % 4)
    return folder


def run(text: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    return subprocess.run(
        ["bash", "-c", text],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("page", "text"), RUN_HERE, ids=lambda own: own[:70])
def test_a_command_of_the_docs_ends_well(page: str, text: str, runs: Path, tmp_path: Path) -> None:
    words = [str(runs / word) if word in ("RUN", "OTHER", "SWEEP") else word for word in text.split(" ")]
    command = " ".join(re.sub(r"=(\w+\.npy)", rf"={runs}/\1", word) for word in words)
    done = run(small(command, tmp_path))
    assert done.returncode == 0, f"{page}: {shlex.quote(command)}\n{done.stdout[-3000:]}"
