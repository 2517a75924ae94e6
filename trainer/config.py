"""The typed configuration of a run, and the refusal of wrong input.

Hydra composes YAML into a plain mapping; `RunConfig.from_mapping` turns that
mapping into the frozen dataclasses below and checks every value, so that the
ranks get plain data that is known to be right. Nothing here imports torch:
`--help` and `--cfg job` must answer at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.errors import InputError, TrainingStopped
from trainer.reading import read_section
from trainer.validate import validate

__all__ = [
    "ClusterConfig",
    "CollectivesConfig",
    "DataConfig",
    "InputError",
    "LoggerConfig",
    "LrScheduleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "StrategyConfig",
    "TrainerConfig",
    "TrainingStopped",
]


@dataclass(frozen=True)
class ModelConfig:
    """`widths`, when given, lists the output width of every layer but the last and replaces the other two."""

    name: str = "mlp"
    num_layers: int = 4
    hidden_dim: int = 128
    widths: tuple[int, ...] | None = None
    activation: str = "relu"  # relu, gelu, tanh, identity
    bias: bool = True
    options: dict[str, Any] = field(default_factory=dict)  # a plug-in model's own keys


@dataclass(frozen=True)
class StrategyConfig:
    """`microbatches` is gradient accumulation outside a pipeline."""

    name: str = "single"
    microbatches: int = 1
    schedule: str = "1f1b"  # pipeline: gpipe, 1f1b, naive
    partition: tuple[int, ...] | None = None  # pipeline: layers per stage
    overlap: bool = True
    bucket_mb: float = 25.0  # ddp: MiB per all_reduce; 0 is one per gradient
    backward: str = "reduce_scatter"  # tensor: reduce_scatter or all_reduce
    options: dict[str, Any] = field(default_factory=dict)  # a plug-in strategy's own keys


@dataclass(frozen=True)
class DataConfig:
    """`batch_size` is global: all ranks together."""

    name: str = "digits"  # digits, synthetic, arrays
    batch_size: int = 128
    drop_last: bool = False
    prefetch: int = 2  # batches loaded ahead by a thread; 0 loads in line
    task: str = "classification"  # or regression
    inputs: str | None = None  # arrays: .npy, or .npz with :key
    targets: str | None = None
    eval_inputs: str | None = None
    eval_targets: str | None = None
    num_samples: int = 4096  # synthetic
    eval_samples: int = 512  # synthetic
    dim: int | None = None  # synthetic: input and output width; null is model.hidden_dim
    noise: float = 0.0  # synthetic: standard deviation added to the teacher's targets


@dataclass(frozen=True)
class OptimizerConfig:
    name: str = "adamw"  # sgd, adamw
    lr: float = 1e-3
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8


@dataclass(frozen=True)
class LrScheduleConfig:
    name: str = "constant"  # constant, cosine
    warmup_steps: int = 0
    min_ratio: float = 0.0  # cosine ends at min_ratio * lr


@dataclass(frozen=True)
class TrainerConfig:
    max_steps: int = 300
    loss: str = "auto"  # auto, cross_entropy, mse
    dtype: str = "float32"  # float32, float64, bfloat16
    param_dtype: str | None = None  # reserved
    compute_dtype: str | None = None  # reserved
    reduce_dtype: str | None = None  # reserved
    device: str = "auto"  # auto, cpu, cuda
    clip_grad_norm: float | None = None
    eval_every: int = 0  # 0 evaluates once, at the end
    log_every: int = 20  # progress lines; metrics are written for every step
    warmup_steps: int = 5  # steps marked is_warmup and left out of summary.json's medians
    checksum_every: int = 0  # compare replicas of the parameters every k steps; 0 never
    deterministic: bool = False
    dry_run: bool = False
    profile: tuple[int, int] | None = None  # torch.profiler from step a up to and with step b
    num_threads: int | None = None  # per rank; null is cores over local ranks


@dataclass(frozen=True)
class CollectivesConfig:
    backend: str = "auto"  # auto, gloo, nccl
    algorithm: str = "auto"  # auto, native, direct
    timeout_s: float = 60.0


@dataclass(frozen=True)
class LoggerConfig:
    name: str = "wandb"  # wandb, none
    mode: str = "auto"  # auto: online when a key is found, offline when not; online, offline
    project: str = "splitmeter"
    entity: str | None = None
    group: str | None = None
    job_type: str | None = None
    run_name: str | None = None
    tags: tuple[str, ...] = ()
    timeout_s: float = 15.0  # longest wait for W&B at start and at end


@dataclass(frozen=True)
class ClusterConfig:
    """What the plan assumes of the machine; measured link curves come with the bench."""

    name: str = "local"
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    """One run. `run_dir` is the run's folder, absolute."""

    run_dir: str
    seed: int = 0
    world_size: int | None = None  # null: torchrun's, or 1
    plugins: tuple[str, ...] = ()  # modules imported before the registries are read
    resume: str | None = None  # reserved
    model: ModelConfig = field(default_factory=ModelConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_schedule: LrScheduleConfig = field(default_factory=LrScheduleConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    collectives: CollectivesConfig = field(default_factory=CollectivesConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], run_dir: str) -> RunConfig:
        """A checked configuration from plain data, such as a composed Hydra config.

        Keys that are left out keep their defaults.

        Raises:
            InputError: an unknown key, a wrong type, a value out of range, or values that contradict.
        """
        config = read_section(cls, mapping, run_dir=run_dir)
        validate(config)
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that JSON can carry and `from_mapping` reads back; the folder is not part of it."""
        mapping = _lists(asdict(self))
        del mapping["run_dir"]
        return mapping


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value
