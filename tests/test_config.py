"""Every configuration file composes into a valid RunConfig, and every wrong value ends in its sentence."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf.errors import InterpolationResolutionError

from scripts import reference_config
from tests.composing import CONF, composed
from trainer.config import InputError, RunConfig, StrategyConfig
from trainer.errors import shown
from trainer.refusals import sentence_of
from trainer.validate import check_world

OPTIONS = [
    f"{file.parent.name}={file.stem}"
    for file in sorted(CONF.glob("*/*.yaml"))
    if file.parent.name not in ("hydra", "bench")  # the bench has tests of its own
]


def config(**sections: Any) -> RunConfig:
    return RunConfig.from_mapping(sections, "/run")


def holds(found: Any, value: Any) -> bool:
    """Whether a section, a list of sections, or a value is what the YAML says."""
    if isinstance(value, dict) and dataclasses.is_dataclass(found):
        return all(holds(getattr(found, key), item) for key, item in value.items())
    if isinstance(value, list):
        return len(found) == len(value) and all(map(holds, found, value))
    return bool(found == value)


def test_there_is_a_file_for_every_choice_of_the_design() -> None:
    assert set(OPTIONS) >= {
        "model=mlp",
        *(f"strategy={name}" for name in ("single", "ddp", "tensor", "pipeline")),
        *(f"data={name}" for name in ("digits", "synthetic", "arrays")),
        *(f"optimizer={name}" for name in ("sgd", "adamw")),
        *(f"lr_schedule={name}" for name in ("constant", "cosine")),
        *(f"cluster={name}" for name in ("local", "a100", "h100", "h200", "b200", "gb200_nvl72")),
        *(f"logger={name}" for name in ("wandb", "none")),
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_into_a_valid_config(option: str) -> None:
    mapping = composed(option)
    run = RunConfig.from_mapping(mapping, "/run")
    group, name = option.split("=")
    if group not in ("experiment", "debug"):
        assert getattr(run, group).name == name
        # Each value arrives as it stands in the file.
        for key, value in yaml.safe_load((CONF / group / f"{name}.yaml").read_text()).items():
            assert holds(getattr(getattr(run, group), key), value), key


def test_every_field_can_be_set_in_some_file() -> None:
    """A field that no file has could not be overridden without a +."""
    known: dict[str, set[str]] = {"": set(composed())}
    for option in OPTIONS:
        for section, values in composed(option).items():
            if isinstance(values, dict):
                known.setdefault(section, set()).update(values)
    run = config()
    for field in dataclasses.fields(RunConfig):
        if field.name == "run_dir":
            continue
        assert field.name in known[""]
        section = getattr(run, field.name)
        if dataclasses.is_dataclass(section):
            fields = {item.name for item in dataclasses.fields(section)} - {"options"}
            assert fields == known[field.name], field.name


def test_an_experiment_overrides_the_primary_config_and_a_debug_preset_overrides_both() -> None:
    scale = RunConfig.from_mapping(composed("experiment=scale"), "/run")
    assert (scale.model.hidden_dim, scale.model.num_layers, scale.data.name) == (1024, 8, "synthetic")
    assert scale.trainer.max_steps == 50
    assert composed("experiment=scale", "debug=one_step")["trainer"]["max_steps"] == 1
    assert composed("experiment=scale", "debug=one_step", "trainer.max_steps=2")["trainer"]["max_steps"] == 2


def test_no_config_names_an_import_path() -> None:
    assert not [file for file in CONF.rglob("*.yaml") if "_target_" in file.read_text()]


def test_the_reference_config_has_not_drifted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reference_config, "reference", functools.cache(reference_config.reference))
    monkeypatch.setattr(sys, "argv", ["reference_config.py"])
    assert reference_config.main() == 0, "run `make reference`"
    drifted = tmp_path / "docs" / "reference_config.yaml"
    drifted.parent.mkdir()
    drifted.write_text(reference_config.REFERENCE.read_text().replace("max_steps: 300", "max_steps: 299"))
    monkeypatch.setattr(reference_config, "REFERENCE", drifted)
    assert reference_config.main() == 1
    monkeypatch.setattr(sys, "argv", ["reference_config.py", "--write"])
    assert reference_config.main() == 0
    assert "max_steps: 300" in drifted.read_text()


def test_plain_data_survives_json() -> None:
    run = config(
        seed=7,
        model={"widths": [32, 16]},
        strategy={"name": "mine", "options": {"depth": 2, "names": ["a"], "nested": {"on": True}}},
        optimizer={"betas": [0.5, 0.75]},
        trainer={"profile": [3, 5]},
        logger={"tags": ["x"]},
    )
    mapping = json.loads(json.dumps(run.to_mapping()))
    assert "run_dir" not in mapping
    assert mapping["model"]["widths"] == [32, 16]
    assert RunConfig.from_mapping(mapping, "/run") == run


def test_numbers_may_be_text_as_yaml_and_environment_variables_give_them() -> None:
    run = config(world_size="3", optimizer={"lr": "1e-3", "eps": 1}, strategy={"bucket_mb": 0})
    assert (run.world_size, run.optimizer.lr, run.optimizer.eps, run.strategy.bucket_mb) == (
        3,
        0.001,
        1.0,
        0.0,
    )
    assert isinstance(run.optimizer.eps, float)


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().seed = 1  # type: ignore[misc]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"sede": 1}, "sede is not a key of the configuration; did you mean seed?"),
    (
        {"trainer": {"max_step": 1}},
        "trainer.max_step is not a key of the configuration; did you mean trainer.max_steps?",
    ),
    (
        {"lr_schedule": {"zzz": 1}},
        "lr_schedule.zzz is not a key of the configuration; the keys there are name, warmup_steps, min_ratio",
    ),
    ({"model": 5}, "model=5 must be a section of keys and values"),
    ({"strategy": {"options": 5}}, "strategy.options=5 must be a section of keys and values"),
    ({"seed": 1.5}, "seed=1.5 must be a whole number"),
    ({"seed": True}, "seed=true must be a whole number"),
    ({"seed": -1}, "seed=-1 must be at least 0"),
    ({"seed": 2**63}, "seed=9223372036854775808 must be at most 9223372036854775807"),
    ({"seed": None}, "seed=null must be a whole number"),
    ({"world_size": 0}, "world_size=0 must be at least 1"),
    ({"world_size": "two"}, "world_size=two must be a whole number"),
    ({"plugins": "mine"}, "plugins=mine must be a list such as [my_module]"),
    ({"plugins": [" "]}, "plugins[0]=' ' must not be empty"),
    ({"resume": "run"}, "resume=run is reserved for a later version; leave it null"),
    (
        {"trainer": {"param_dtype": "float32"}},
        "trainer.param_dtype=float32 is reserved for a later version; leave it null",
    ),
    ({"model": {"num_layers": 0}}, "model.num_layers=0 must be at least 1"),
    ({"model": {"hidden_dim": -4}}, "model.hidden_dim=-4 must be at least 1"),
    ({"model": {"name": ""}}, "model.name='' must not be empty"),
    ({"model": {"name": ["mlp"]}}, "model.name=['mlp'] must be text"),
    ({"model": {"bias": "yes"}}, "model.bias=yes must be true or false"),
    ({"model": {"activation": "elu"}}, "model.activation=elu must be one of relu, gelu, tanh, identity"),
    ({"model": {"widths": [8, 0]}}, "model.widths[1]=0 must be at least 1"),
    (
        {"model": {"widths": [8, 8], "num_layers": 7}},
        "model.num_layers=7 contradicts model.widths=[8, 8], which stands for 3 layers; "
        "leave one of the two out",
    ),
    (
        {"model": {"widths": [8, 8], "hidden_dim": 9}},
        "model.hidden_dim=9 contradicts model.widths=[8, 8], which gives every width; "
        "leave one of the two out",
    ),
    (
        {"model": {"options": {"depth": 2}}},
        "model.options has the key depth, but model=mlp has no options; they are for plug-ins",
    ),
    (
        {"model": {"name": "mine", "options": {"x": {1: 2}}}},
        "model.options.x has the key 1, which must be text",
    ),
    (
        {"model": {"name": "mine", "options": {"x": [math.inf]}}},
        "model.options.x[0]=inf must be a finite number",
    ),
    (
        {"strategy": {"name": "mine", "options": {"x": {2}}}},
        "strategy.options.x=[2] must be text, a number, true, false, null, a list or a section",
    ),
    ({"strategy": {"microbatches": 0}}, "strategy.microbatches=0 must be at least 1"),
    (
        {"strategy": {"microbatches": 9}, "data": {"batch_size": 8}},
        "strategy.microbatches=9 is more than data.batch_size=8; a microbatch needs at least one row",
    ),
    (
        {"strategy": {"partition": [3, 2]}},
        "strategy.partition=[3, 2] adds up to 5 layers and must add up to the model's 4",
    ),
    (
        {"strategy": {"partition": [3, 2]}, "model": {"widths": [8] * 9}},
        "strategy.partition=[3, 2] adds up to 5 layers and must add up to the model's 10",
    ),
    ({"strategy": {"partition": [4, 0]}}, "strategy.partition[1]=0 must be at least 1"),
    ({"strategy": {"schedule": "zero"}}, "strategy.schedule=zero must be one of 1f1b, gpipe, naive"),
    ({"strategy": {"backward": "x"}}, "strategy.backward=x must be one of reduce_scatter, all_reduce"),
    ({"strategy": {"bucket_mb": -1}}, "strategy.bucket_mb=-1.0 must be at least 0"),
    ({"data": {"name": "parquet"}}, "data.name=parquet must be one of digits, synthetic, arrays"),
    ({"data": {"batch_size": 0}}, "data.batch_size=0 must be at least 1"),
    ({"data": {"noise": math.nan}}, "data.noise=nan must be a finite number"),
    ({"data": {"inputs": ""}}, "data.inputs='' must not be empty"),
    ({"optimizer": {"name": "adam"}}, "optimizer.name=adam must be one of sgd, adamw"),
    ({"optimizer": {"lr": 0}}, "optimizer.lr=0.0 must be above 0"),
    ({"optimizer": {"lr": "fast"}}, "optimizer.lr=fast must be a finite number"),
    ({"optimizer": {"momentum": 1}}, "optimizer.momentum=1.0 must be at least 0 and below 1"),
    ({"optimizer": {"betas": [0.9]}}, "optimizer.betas=[0.9] must be a list of 2 values"),
    ({"optimizer": {"betas": [0.9, 1.5]}}, "optimizer.betas[1]=1.5 must be at least 0 and below 1"),
    ({"optimizer": {"nesterov": True}}, "optimizer.nesterov=true needs optimizer.momentum above 0"),
    ({"lr_schedule": {"min_ratio": 2}}, "lr_schedule.min_ratio=2.0 must be from 0 to 1"),
    (
        {"lr_schedule": {"name": "cosine", "warmup_steps": 11}, "trainer": {"max_steps": 10}},
        "lr_schedule.warmup_steps=11 must be at most trainer.max_steps=10",
    ),
    ({"trainer": {"max_steps": 0}}, "trainer.max_steps=0 must be at least 1"),
    ({"trainer": {"dtype": "float16"}}, "trainer.dtype=float16 must be one of float32, float64, bfloat16"),
    ({"trainer": {"clip_grad_norm": 0}}, "trainer.clip_grad_norm=0.0 must be above 0"),
    (
        {"trainer": {"profile": [5, 3]}},
        "trainer.profile=[5, 3] must name a first and a last step, the first not after the last",
    ),
    (
        {"trainer": {"profile": [8, 10], "max_steps": 10}},
        "trainer.profile=[8, 10] must lie within the steps, which are 0 to 9 with trainer.max_steps=10",
    ),
    ({"data": {"prefetch": 10**8}}, "data.prefetch=100000000 must be at most 10,000"),
    ({"model": {"num_layers": 10**8}}, "model.num_layers=100000000 must be at most 100,000"),
    ({"trainer": {"num_threads": 10**6}}, "trainer.num_threads=1000000 must be at most 4,096"),
    ({"collectives": {"timeout_s": 1e20}}, "collectives.timeout_s=1e+20 must be at most 10,000,000"),
    ({"trainer": {"num_threads": 0}}, "trainer.num_threads=0 must be at least 1"),
    ({"collectives": {"backend": "mpi"}}, "collectives.backend=mpi must be one of auto, gloo, nccl"),
    ({"collectives": {"timeout_s": 0}}, "collectives.timeout_s=0.0 must be above 0"),
    (
        {"collectives": {"backend": "nccl"}, "trainer": {"device": "cpu"}},
        "collectives.backend=nccl needs GPUs; with trainer.device=cpu take gloo or auto",
    ),
    ({"logger": {"mode": "on"}}, "logger.mode=on must be one of auto, online, offline"),
]


@pytest.mark.parametrize(("sections", "sentence"), WRONG, ids=[sentence[:40] for _, sentence in WRONG])
def test_wrong_input_is_refused_in_one_sentence(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        RunConfig.from_mapping(sections, "/run")
    assert str(refusal.value) == sentence


def test_hidden_dim_is_the_data_width_beside_widths() -> None:
    run = config(model={"widths": [8, 8], "hidden_dim": 9}, data={"name": "synthetic"})
    assert run.model.hidden_dim == 9


@pytest.mark.parametrize(
    ("strategy", "world_size", "sentence"),
    [
        (
            StrategyConfig("single"),
            2,
            "strategy=single cannot use world_size=2; take 1 rank, or ddp, tensor or pipeline",
        ),
        (
            StrategyConfig("pipeline", partition=(2, 1, 1)),
            2,
            "strategy.partition=[2, 1, 1] names 3 stages and must name one for each of 2 ranks",
        ),
    ],
)
def test_a_world_that_contradicts_the_strategy_is_refused(
    strategy: StrategyConfig, world_size: int, sentence: str
) -> None:
    with pytest.raises(InputError) as refusal:
        check_world(dataclasses.replace(config(), strategy=strategy), world_size)
    assert str(refusal.value) == sentence


def test_weak_scaling_gives_each_rank_as_many_rows() -> None:
    for ranks in (1, 2, 8):
        found = composed("experiment=weak_scaling", f"world_size={ranks}")
        assert found["data"]["batch_size"] == 256 * ranks


@pytest.mark.parametrize("given", ["256,null", "a,2", "2,1.5", "true,2"])
def test_a_product_of_what_is_no_whole_number_is_refused_by_the_key(given: str) -> None:
    wrong = next(text for text in given.split(",") if text not in ("2", "256"))
    with pytest.raises(InterpolationResolutionError) as refusal:
        composed(f"data.batch_size=${{times:{given}}}")
    assert sentence_of(refusal.value, [], RunConfig) == (
        f"data.batch_size=${{times:{given}}} multiplies whole numbers, and {wrong} is none; "
        "set what it refers to"
    )


def test_a_value_under_a_secret_name_is_never_shown() -> None:
    for key in ("logger.api_key", "strategy.options.accessToken", "model.options.dbPassword[0]"):
        assert shown(key, "hunter2hunter2") == f"{key}=<removed>"
    assert "hunter2" not in shown("strategy.options", {"api_key": "hunter2hunter2"})
    with pytest.raises(InputError) as refusal:
        config(strategy={"name": "mine", "options": {"api_key": {"hunter2hunter2"}}})
    assert "hunter2" not in str(refusal.value)
    with pytest.raises(InputError) as refusal:
        config(logger={"api_key": "hunter2hunter2"})
    assert "hunter2" not in str(refusal.value)


def test_long_and_broken_values_stay_one_readable_line() -> None:
    assert shown("a", "x" * 100) == "a=" + "x" * 57 + "..."
    assert shown("a", "two\nlines") == "a='two\\nlines'"
    assert shown("a", None) == "a=null"


def test_reading_a_config_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom trainer.config import RunConfig\nRunConfig.from_mapping({}, '/run')\n"
        "print([name for name in ('torch', 'numpy', 'wandb', 'hydra') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
