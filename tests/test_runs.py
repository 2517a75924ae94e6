"""Whole runs, as a user starts them: what is promised of `make train`, torchrun, and every config file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from collectives.link import load
from tests.composing import composed
from tests.launched import ROOT, rows_of, run_script
from tests.ranks import RankPools
from tests.training import train
from trainer.config import RunConfig

OPTIONS = sorted(
    f"{path.parent.name}={path.stem}"
    for path in (ROOT / "conf").glob("*/*.yaml")
    if path.parent.name not in ("bench", "hydra", "model")
)


def torchrun(count: int | None) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", *([f"--nproc-per-node={count}"] if count else []))


@pytest.mark.parametrize("option", OPTIONS)
def test_every_config_of_every_group_runs_a_step(ranks: RankPools, option: str, tmp_path: Path) -> None:
    overrides = [option, "trainer.max_steps=1", "lr_schedule.warmup_steps=1"]
    if option == "data=arrays":
        generator = np.random.default_rng(0)
        np.save(tmp_path / "x.npy", generator.normal(size=(300, 5)).astype(np.float32))
        np.save(tmp_path / "y.npy", generator.integers(0, 3, 300))
        overrides += [f"data.inputs={tmp_path}/x.npy", f"data.targets={tmp_path}/y.npy"]
    config = RunConfig.from_mapping(composed(*overrides), str(tmp_path))
    size = config.world_size or (1 if config.strategy.name == "single" else 2)
    rows = ranks[size].run(train, config)[0]["rows"]
    assert len(rows) == 1 and rows[0]["loss"] > 0 and rows[0]["bytes_sent"] == rows[0]["bytes_predicted"]


@pytest.mark.parametrize("seed", range(5))
def test_the_main_job_reaches_its_accuracy(ranks: RankPools, seed: int) -> None:
    """What `make train` runs: the pipeline over two ranks on digits."""
    config = RunConfig.from_mapping(composed("strategy=pipeline", f"seed={seed}"), "/nonexistent")
    assert config.data.name == "digits"
    rows = ranks[2].run(train, config)[0]["rows"]
    assert rows[-1]["eval_accuracy"] >= 0.95


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("count", "strategy"),
    [
        pytest.param(count, strategy, marks=() if chosen else pytest.mark.slow)
        for count, strategy, chosen in [
            (2, "ddp", True),
            (None, "pipeline", False),
            *[(n, s, False) for n in (1, 2, 3, 4) for s in ("ddp", "tensor", "pipeline")],
        ]
    ],
)
def test_torchrun_starts_the_ranks(count: int | None, strategy: str, tmp_path: Path) -> None:
    code, output = run_script(
        f"strategy={strategy}",
        "trainer.max_steps=5",
        "trainer.warmup_steps=1",
        f"hydra.run.dir={tmp_path}/run",
        launcher=torchrun(count),
    )
    assert code == 0, output
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(5))
    sizes = {int(name.split("/")[1]) for row in rows for name in row if name.startswith("rank/")}
    assert sizes == (set(range(count)) if count and count > 1 else set())
    assert ("nothing to split" in output) == (count in (None, 1))
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.timeout(240)
def test_own_ranks_print_what_was_measured_and_where_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    code, output = run_script(
        "strategy=tensor",
        "world_size=2",
        "trainer.max_steps=6",
        "trainer.warmup_steps=2",
        "trainer.profile=[2,3]",
        "trainer.deterministic=true",
        "collectives.link_budget_s=60",  # so that a disturbed call does not end the sizes
        f"hydra.run.dir={folder}",
    )
    assert code == 0, output
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["steps"] == 6
    median_ms = summary["steady"]["step_time_s"]["median"] * 1e3
    shown = re.search(r"step time +([\d.]+) ms", output)
    assert shown is not None and float(shown[1]) == pytest.approx(median_ms, abs=1e-3)
    # 4 layers of 128: three hidden activations of 128 x 128 float32, half of each sent to the other rank.
    assert "bytes sent" in output and "effective bandwidth" in output and str(folder) in output
    gathers = [e for e in summary["bytes_by_operation"] if e["operation"] == "all_gather output"]
    assert [e["bytes_sent"] for e in gathers] == [6 * 3 * 64 * 128 * 4] * 2
    assert all(e["bytes_sent"] == e["bytes_predicted"] for e in summary["bytes_by_operation"])
    link = load(folder / "link_curve.json")
    names = [
        "all_gather",
        "all_reduce",
        "reduce_scatter",
    ]  # the middle one: cross-entropy over shards of classes
    assert sorted(link.curves) == [(name, 2) for name in names]
    # The largest message is an activation: 128 rows of 128 float32, a size that is measured.
    assert all(curve.points[-1].size_bytes == 65_536 for curve in link.curves.values())
    assert sorted(entry["operation"] for entry in summary["link"]) == names
    for entry in summary["link"]:
        assert f"{entry['bandwidth_GBps']:.3f} GB/s per direction by {entry['operation']}" in output
    trace = json.loads((folder / "profile-rank1.json").read_text())
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("layer 1, microbatch 0, dW") == 2


@pytest.mark.timeout(240)
def test_a_diverging_run_ends_on_all_ranks_with_one_sentence(tmp_path: Path) -> None:
    code, output = run_script(
        "strategy=ddp",
        "world_size=2",
        "optimizer=sgd",
        "optimizer.lr=1e20",
        f"hydra.run.dir={tmp_path}/run",
    )
    assert code == 1
    assert output.count("loss is nan at step") == 1 and "Traceback" not in output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"].startswith("failed: loss is nan at step")


def test_the_page_of_metrics_defines_every_key_that_a_row_has(ranks: RankPools) -> None:
    mapping = composed("strategy=pipeline", "trainer.max_steps=2", "trainer.clip_grad_norm=1.0")
    config = dataclasses.replace(RunConfig.from_mapping(mapping, "/nonexistent"))
    rows = ranks[2].run(train, config)[0]["rows"]
    page = (ROOT / "docs" / "metrics.md").read_text()
    defined = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", page, re.MULTILINE))))
    own_rank = {re.sub(r"rank/\d+/", "rank/R/", key) for row in rows for key in row}
    assert own_rank | {"schema", "non_finite"} == defined - {"ddp", "tensor", "pipeline"}
