"""The user's own package in examples/plugin, run as its user would, and what it rewrites."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from strategies.checker import check
from strategies.communication import AllReduce, Wait
from strategies.registry import make_strategy
from strategies.strategy import Options, Task
from trainer.config import RunConfig
from trainer.plan import load_plugins, make_plan

pytestmark = pytest.mark.timeout(240)  # three runs that start Python and torch anew

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "plugin"


def command(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    paths = [str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [
            sys.executable,
            "scripts/train.py",
            f"hydra.searchpath=[file://{EXAMPLE}/conf]",
            "logger=none",
            f"hydra.run.dir={folder}",
            *overrides,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture
def my_splits(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLE)
    (module,) = load_plugins(["my_splits"])
    assert isinstance(module, ModuleType)
    return module


def test_the_example_is_short() -> None:
    assert len((EXAMPLE / "my_splits.py").read_text().splitlines()) < 40


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    done = command(
        tmp_path,
        "plugins=[my_splits]",
        "strategy=blocking",
        "model=residual",
        "world_size=2",
        "trainer.max_steps=5",
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[-1]["loss"] < rows[0]["loss"]
    # 64 x 64, 64; twice a norm's 2 * 64, 64 x 64, 64; 64 x 10, 10: each of two ranks sends all of it once.
    parameters = 4096 + 64 + 2 * (128 + 4096 + 64) + 640 + 10
    assert [(row["bytes_sent"], row["bytes_predicted"]) for row in rows] == [(4 * parameters,) * 2] * 5


def test_a_plug_in_that_is_not_there_is_refused_in_one_sentence(tmp_path: Path) -> None:
    done = command(tmp_path, "plugins=[my_split]", "strategy=blocking")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "plugins=my_split cannot be imported (No module named 'my_split'); "
        "give a module that Python finds, for example with its folder on PYTHONPATH"
    ]
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_plug_ins_choice_without_the_plug_in_is_refused_by_name(tmp_path: Path) -> None:
    done = command(tmp_path, "strategy=blocking")
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("strategy=blocking is unknown; valid are single, ddp, tensor, pipeline")
    assert "declared under plugins" in sentence


def test_the_examples_split_waits_where_it_starts(my_splits: ModuleType) -> None:
    made = make_plan(
        RunConfig.from_mapping(
            {
                "plugins": ["my_splits"],
                "strategy": {"name": "blocking", "bucket_mb": 0},
                "model": {"name": "residual", "options": {"width": 8, "blocks": 1}},
            },
            "/nowhere",
        ),
        2,
    )
    schedules = made.schedules(128)
    check(schedules)
    operations = schedules[0].operations
    starts = [i for i, operation in enumerate(operations) if isinstance(operation, AllReduce)]
    assert len(starts) == 2 + 4 + 2  # weights and biases in, of norm and linear, and out
    for i in starts:
        start, wait = operations[i], operations[i + 1]
        assert isinstance(start, AllReduce) and wait == Wait(start.value)
    assert sum(isinstance(operation, Wait) for operation in operations) == len(starts)
    ddp = make_strategy("ddp", Options(bucket_mb=0)).schedule(made.model, 2, 0, 128, Task("cross_entropy"))
    assert [o for o in operations if not isinstance(o, Wait)] == [
        o for o in ddp.operations if not isinstance(o, Wait)
    ]


def test_the_examples_model_is_a_chain_that_a_pipeline_can_cut(my_splits: ModuleType) -> None:
    made = make_plan(
        RunConfig.from_mapping(
            {
                "plugins": ["my_splits"],
                "strategy": {"name": "pipeline", "microbatches": 4},
                "model": {"name": "residual", "options": {"width": 8, "blocks": 2}},
            },
            "/nowhere",
        ),
        4,
    )
    made.check_schedules()
    assert [layer.kind for layer in made.model.layers] == ["Sequential", "Residual", "Residual", "Linear"]
    assert [schedule.layers[0].index for schedule in made.schedules(128)] == [0, 1, 2, 3]


def test_the_readme_shows_the_plug_in_that_is_run_here() -> None:
    code = (EXAMPLE / "my_splits.py").read_text()
    assert f"```python\n{code}```" in (ROOT / "README.md").read_text()
    assert len(code.splitlines()) < 40
