"""The typed configuration of a run, and the refusal of wrong input.

Hydra composes YAML into a plain mapping; `RunConfig.from_mapping` turns that
mapping into the frozen dataclasses below and checks every value, so that the
ranks get plain data that is known to be right. Nothing here imports torch:
`--help` and `--cfg job` must answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.errors import InputError, TrainingStopped
from trainer.job import JobConfig
from trainer.validate import check_world, validate

__all__ = [
    "ClusterConfig",
    "CollectivesConfig",
    "DataConfig",
    "InputError",
    "LoggerConfig",
    "LrScheduleConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PeakTFLOPS",
    "RunConfig",
    "StrategyConfig",
    "SweepConfig",
    "Tier",
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
    wire_every: int = 20  # read the kernel's count, and stamp completions, every k steps; 0 never
    verdict_every: int = 0  # a verdict every k steps besides that at the end; 0 none
    report: bool = True  # write report.html at the end, where plotly is installed
    verdict_budget_s: float = 2.0  # for measuring other microbatches, at each verdict; 0 does not
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
    link_curve: str | None = None  # a link_curve.json; null measures one at the start
    link_budget_s: float = 2.0  # longest that measuring takes; 0 does not measure


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
class SweepConfig:
    """How a sweep goes on; no job's identity depends on it."""

    resume: bool = False  # run only what an earlier try of the same command left undone
    fail_fast: bool = False  # end the sweep with the first job that fails


@dataclass(frozen=True)
class Tier:
    """One rung of the memory ladder; bandwidths in decimal GB/s, for one member of `scope`.

    A tier has at most one kind of bandwidth: a link carries both directions at once, a memory shares one
    bus between reading and writing. NVLink's "900 GB/s" is 450 per direction; HBM's 3350 is reads plus
    writes. Null is unknown, or for the local machine measured (`trainer.machine`).
    """

    name: str  # NVLink, HBM, network, ...
    scope: str | None = None  # what shares it: "SM", "GPU", "node of 8", ...
    ranks: int | None = None  # GPUs that it joins with one another; 1: a GPU has it to itself; null: no limit
    size_bytes: int | None = None  # null also for what only carries
    bandwidth_GBps_per_direction: float | None = None
    bandwidth_GBps_read_plus_write: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class PeakTFLOPS:
    """Best dense rate of one GPU's matrix products by data type, 1e12 operations a second; no sparsity."""

    float64: float | None = None
    float32: float | None = None  # without TF32
    tf32: float | None = None
    bfloat16: float | None = None
    float16: float | None = None
    float8: float | None = None
    source: str | None = None


@dataclass(frozen=True)
class ClusterConfig:
    """What the plan assumes of the machine, from data sheets; measured link curves come with the bench.

    `tiers` go from the cores outward. GPUs of one fast domain reach each other at NVLink speed, and it
    may be smaller or larger than a node: a tray of a GB200 NVL72 has 4 GPUs and its domain has 72.
    """

    name: str = "local"
    gpus_per_node: int | None = None
    gpus_per_fast_domain: int | None = None
    peak_TFLOPS: PeakTFLOPS = field(default_factory=PeakTFLOPS)
    tiers: tuple[Tier, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # keys of your own


@dataclass(frozen=True)
class RunConfig(JobConfig):
    """One training run."""

    kind = "train"
    root = "config"
    worker = "trainer.worker:run"

    seed: int = 0
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
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def validate(self) -> None:
        validate(self)

    def check_world(self, world_size: int) -> None:
        check_world(self, world_size)

    @property
    def num_threads(self) -> int | None:
        return self.trainer.num_threads

    @property
    def dry_run(self) -> bool:
        return self.trainer.dry_run
