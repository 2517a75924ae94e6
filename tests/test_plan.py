"""From a configuration to a plan: batch sizes, choices, plug-ins, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models.autograd import AutogradModel
from models.block import Model
from models.mlp import DeepMLP
from strategies.ddp import DataParallel
from strategies.schedule import Schedule
from strategies.single import Single
from strategies.strategy import Task
from trainer.config import InputError, RunConfig
from trainer.plan import Plan, make_plan

SYNTHETIC = {"name": "synthetic", "task": "regression", "num_samples": 10, "eval_samples": 5, "batch_size": 4}


def config(**sections: Any) -> RunConfig:
    return RunConfig.from_mapping(sections, "/nowhere")


def plan(world_size: int = 1, **sections: Any) -> Plan:
    return make_plan(config(**sections), world_size)


def refusal(world_size: int = 1, **sections: Any) -> str:
    """The one sentence in which a configuration is refused, when read, planned or checked."""
    with pytest.raises(InputError) as refused:
        plan(world_size, **sections).check_schedules()
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


# What is right


def test_a_plan_takes_its_sizes_from_the_data() -> None:
    made = plan(2, strategy={"name": "tensor"}, model={"num_layers": 3, "hidden_dim": 32})
    assert [layer.output_shape for layer in made.model.layers] == [(32,), (32,), (10,)]
    assert made.model.input_shape == (64,)  # digits of 8 x 8 pixels in 10 classes
    assert (made.world_size, made.backend, made.strategy.name) == (2, "gloo", "tensor")
    assert (made.task.loss, made.task.dtype, made.task.clips) == ("cross_entropy", "float32", False)


def test_synthetic_data_make_every_layer_hidden_dim_wide() -> None:
    made = plan(data=SYNTHETIC, model={"num_layers": 3, "hidden_dim": 8})
    assert [(layer.input_shape, layer.output_shape) for layer in made.model.layers] == [((8,), (8,))] * 3
    assert made.task.loss == "mse"


def test_options_reach_strategy_and_task() -> None:
    made = plan(
        2,
        strategy={"name": "pipeline", "microbatches": 3, "schedule": "gpipe", "partition": [1, 3]},
        trainer={"dtype": "float64", "clip_grad_norm": 1.0},
        collectives={"algorithm": "native"},
    )
    assert made.strategy.options.microbatches == 3
    assert made.strategy.options.partition == (1, 3)
    assert (made.task.dtype, made.task.clips, made.task.algorithms.all_gather) == ("float64", True, "ring")
    assert [len(schedule.layers) for schedule in made.schedules(128)] == [1, 3]


@pytest.mark.parametrize(
    ("rows", "batch_size", "drop_last", "max_steps", "expected"),
    [
        (10, 4, False, 300, (4, 2)),
        (10, 4, False, 3, (4, 2)),
        (10, 4, False, 2, (4,)),  # the last batch of the epoch is the third
        (10, 4, True, 300, (4,)),
        (8, 4, False, 300, (4,)),
        (3, 4, False, 300, (3,)),
        (4, 4, False, 1, (4,)),
        (1, 1, False, 5, (1,)),
    ],
)
def test_batch_sizes_that_a_run_will_meet(
    rows: int, batch_size: int, drop_last: bool, max_steps: int, expected: tuple[int, ...]
) -> None:
    data = {**SYNTHETIC, "num_samples": rows, "batch_size": batch_size, "drop_last": drop_last}
    assert plan(data=data, trainer={"max_steps": max_steps}).batch_rows == expected


@pytest.mark.parametrize(
    ("rows", "batch_size", "expected"),
    [(5, 4, (4, 1)), (8, 4, (4,)), (3, 4, (3,)), (1, 1, (1,))],
)
def test_batch_sizes_of_evaluation(rows: int, batch_size: int, expected: tuple[int, ...]) -> None:
    assert plan(data={**SYNTHETIC, "eval_samples": rows, "batch_size": batch_size}).eval_rows == expected


def test_digits_leave_a_last_batch() -> None:
    made = plan(data={"batch_size": 128})  # 1,437 = 11 * 128 + 29; 360 = 2 * 128 + 104
    assert made.batch_rows == (128, 29)
    assert made.eval_rows == (128, 104)


@pytest.mark.parametrize("name", ["ddp", "tensor", "pipeline"])
def test_schedules_of_all_batch_sizes_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(3, data=SYNTHETIC, strategy={"name": name}, model={"hidden_dim": 6})
    asked: list[tuple[bool, int]] = []
    real = made.strategy.schedule, made.strategy.evaluation

    def training(model: Model, ranks: int, rank: int, rows: int, task: Task) -> Schedule:
        asked.append((True, rows))
        return real[0](model, ranks, rank, rows, task)

    def evaluating(model: Model, ranks: int, rank: int, rows: int, task: Task) -> Schedule:
        asked.append((False, rows))
        return real[1](model, ranks, rank, rows, task)

    monkeypatch.setattr(made.strategy, "schedule", training)
    monkeypatch.setattr(made.strategy, "evaluation", evaluating)
    made.check_schedules()
    assert asked == [(True, 4)] * 3 + [(True, 2)] * 3 + [(False, 4)] * 3 + [(False, 1)] * 3


def test_uneven_blocks_are_for_the_direct_exchange() -> None:
    for algorithm in ("direct", "auto"):
        plan(
            3,
            strategy={"name": "tensor"},
            model={"hidden_dim": 10},
            collectives={"algorithm": algorithm},
        ).check_schedules()


# What is wrong

LOCAL_DDP = {"name": "ddp"}

REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "single on several ranks": (
        2,
        {},
        "strategy=single with world_size=2 would train 2 unrelated models; "
        "use world_size=1, or strategy=ddp, tensor or pipeline",
    ),
    "more stages than layers": (
        5,
        {"strategy": {"name": "pipeline"}},
        "world_size=5 makes more stages than the 4 layers of the model; "
        "use at most 4 ranks or raise model.num_layers",
    ),
    "a partition that does not add up": (
        2,
        {"strategy": {"name": "pipeline", "partition": [1, 2]}},
        "strategy.partition=[1, 2] adds up to 3 layers and must add up to the model's 4",
    ),
    "a partition for fewer ranks": (
        3,
        {"strategy": {"name": "pipeline", "partition": [1, 3]}},
        "strategy.partition=[1, 3] must give each of the 3 stages at least one layer "
        "and add up to the 4 layers of the model",
    ),
    "more microbatches than rows": (
        1,
        {"strategy": {"microbatches": 5}, "data": SYNTHETIC},
        "strategy.microbatches=5 is more than data.batch_size=4; a microbatch needs at least one row",
    ),
    "an unknown schedule": (
        2,
        {"strategy": {"name": "pipeline", "schedule": "zigzag"}},
        "strategy.schedule=zigzag must be one of 1f1b, gpipe, naive",
    ),
    "an unknown backward": (
        2,
        {"strategy": {"name": "tensor", "backward": "broadcast"}},
        "strategy.backward=broadcast must be one of reduce_scatter, all_reduce",
    ),
    "an unknown strategy": (
        2,
        {"strategy": {"name": "zero"}},
        "strategy=zero is unknown; valid are single, ddp, tensor, pipeline "
        "(a plug-in's own are named in its module's STRATEGIES, declared under plugins)",
    ),
    "an unknown model": (1, {"model": {"name": "gpt"}}, "model=gpt is unknown; valid are mlp"),
    "uneven blocks by the backend's own": (
        3,
        {
            "strategy": {"name": "tensor"},
            "model": {"hidden_dim": 10},
            "collectives": {"algorithm": "native"},
        },
        "collectives.algorithm=native cannot all_gather blocks of unequal sizes [4, 3, 3]; "
        "use collectives.algorithm=direct, or a width that the world size divides",
    ),
    "uneven outputs by the backend's own": (  # only evaluation gathers the ten classes
        4,
        {
            "strategy": {"name": "tensor"},
            "model": {"hidden_dim": 8},
            "collectives": {"algorithm": "native"},
        },
        "collectives.algorithm=native cannot all_gather blocks of unequal sizes [3, 3, 2, 2]; "
        "use collectives.algorithm=direct, or a width that the world size divides",
    ),
    "cross-entropy of regression": (
        1,
        {"data": SYNTHETIC, "trainer": {"loss": "cross_entropy"}},
        "trainer.loss=cross_entropy does not fit regression data; use mse or auto",
    ),
    "squared error of classes": (
        1,
        {"trainer": {"loss": "mse"}},
        "trainer.loss=mse does not fit classification data; use cross_entropy or auto",
    ),
    "nccl without a GPU": (
        2,
        {"strategy": LOCAL_DDP, "collectives": {"backend": "nccl"}},
        "collectives.backend=nccl needs trainer.device=cuda, but tensors are on cpu; use gloo",
    ),
    "a plug-in that is not there": (
        1,
        {"plugins": ["no_such_module"]},
        "plugins=no_such_module cannot be imported (No module named 'no_such_module'); "
        "give a module that Python finds, for example with its folder on PYTHONPATH",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="names what is refused without a GPU")
@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_plan_is_refused_in_one_sentence(name: str) -> None:
    world_size, sections, sentence = REFUSED[name]
    assert refusal(world_size, **sections) == sentence


def test_a_gpu_asked_for_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(trainer={"device": "cuda"}) == (
        "trainer.device=cuda, but this machine has no GPU that torch can use; use cpu or auto"
    )


def test_a_gpu_is_used_where_there_is_one_and_gloo_by_one_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (plan().device_type, plan().backend) == ("cuda", "nccl")
    assert plan(collectives={"backend": "gloo"}).backend == "gloo"
    assert (plan(trainer={"device": "cpu"}).device_type, plan(trainer={"device": "cpu"}).backend) == (
        "cpu",
        "gloo",
    )


# Plug-ins

PLUG_IN = """
from functools import partial
from torch import nn
from models.autograd import AutogradModel
from strategies.ddp import DataParallel


class Mine(DataParallel):
    name = "mine"


def chain(input_shape, output_dim, options):
    width = options.get("width", output_dim)
    return AutogradModel([partial(nn.Linear, *input_shape, width)], input_shape)


STRATEGIES = {"mine": Mine}
MODELS = {"chain": chain}
"""


@pytest.fixture
def plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module on the path that no other test has imported."""
    name = "plug_in_of_a_test"
    (tmp_path / f"{name}.py").write_text(PLUG_IN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_plug_in_brings_strategies_and_models(plug_in: str) -> None:
    made = plan(
        2,
        plugins=[plug_in],
        strategy={"name": "mine", "options": {"anything": [1]}},
        model={"name": "chain", "options": {}},
    )
    assert isinstance(made.strategy, DataParallel) and made.strategy.name == "mine"
    assert made.strategy.options.options == {"anything": [1]}
    assert made.model.input_shape == (64,) and made.model.output_shape == (10,)
    made.check_schedules()


def test_names_of_plug_ins_are_listed_with_the_built_in_ones(plug_in: str) -> None:
    assert refusal(plugins=[plug_in], strategy={"name": "other"}).startswith(
        "strategy=other is unknown; valid are single, ddp, tensor, pipeline, mine"
    )
    assert refusal(plugins=[plug_in], model={"name": "other"}) == (
        "model=other is unknown; valid are mlp, chain"
    )


def test_tensor_cannot_split_a_plug_ins_modules(plug_in: str) -> None:
    assert refusal(2, plugins=[plug_in], model={"name": "chain"}, strategy={"name": "tensor"}) == (
        "strategy=tensor cannot split layer 0 (Linear): it has no rule for a shard of its columns; "
        "use strategy=ddp or pipeline, or model=mlp"
    )


def test_a_plug_ins_model_must_fit_the_data(plug_in: str) -> None:
    assert refusal(plugins=[plug_in], model={"name": "chain", "options": {"width": 7}}) == (
        "model=chain has 7 outputs where data=digits needs 10"
    )


def test_modules_that_do_not_fit_each_other_are_wrong_input(
    plug_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(input_shape: tuple[int, ...], output_dim: int, options: Mapping[str, Any]) -> Model:
        return AutogradModel([partial(nn.Linear, 3, 10)], input_shape)

    plan(plugins=[plug_in], model={"name": "chain"})
    monkeypatch.setitem(sys.modules[plug_in].MODELS, "chain", build)
    sentence = refusal(plugins=[plug_in], model={"name": "chain"})
    assert sentence.startswith("layer 0 (Linear) cannot take rows of shape (64,): ")


def test_a_plug_ins_schedule_that_would_hang_is_refused(
    plug_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lonely(Single):
        """Reduces on rank 0 alone."""

        def check(self, model: Model, world_size: int, batch_size: int) -> None:
            pass

        def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
            ddp = DataParallel(self.options).schedule(model, world_size, rank, rows, task)
            return ddp if rank == 0 else super().schedule(model, world_size, rank, rows, task)

    plan(plugins=[plug_in])
    monkeypatch.setitem(sys.modules[plug_in].STRATEGIES, "mine", Lonely)
    sentence = refusal(2, plugins=[plug_in], strategy={"name": "mine"})
    assert sentence.startswith("rank 1 skips all_reduce weight gradients of layers 0-3 (")
    assert sentence.endswith("which rank 0 runs")


def test_a_plug_in_without_anything_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plug_in_without_anything.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    made = plan(plugins=["plug_in_without_anything"])
    assert isinstance(made.model, DeepMLP) and isinstance(made.strategy, Single)
