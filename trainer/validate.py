"""Which values a configuration may hold: ranges, choices, and keys that must agree with each other.

What needs the data, the model or the ranks is checked where they are known; here nothing is imported,
so that a wrong key is refused before torch is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.errors import InputError, shown

if TYPE_CHECKING:
    from trainer.config import ClusterConfig, RunConfig, Tier

CHOICES: dict[str, tuple[str, ...]] = {
    "model.activation": ("relu", "gelu", "tanh", "identity"),
    "strategy.schedule": ("1f1b", "gpipe", "naive"),
    "strategy.backward": ("reduce_scatter", "all_reduce"),
    "data.name": ("digits", "synthetic", "arrays"),
    "data.task": ("classification", "regression"),
    "optimizer.name": ("sgd", "adamw"),
    "lr_schedule.name": ("constant", "cosine"),
    "trainer.loss": ("auto", "cross_entropy", "mse"),
    "trainer.dtype": ("float32", "float64", "bfloat16"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "collectives.backend": ("auto", "gloo", "nccl"),
    "collectives.algorithm": ("auto", "native", "direct"),
    "logger.name": ("wandb", "none"),
    "logger.mode": ("auto", "online", "offline"),
}
BUILT_IN_STRATEGIES = ("single", "ddp", "tensor", "pipeline")

# Each is checked when it is not null; a list is checked item by item.
AT_LEAST_ONE = (
    "world_size model.num_layers model.hidden_dim model.widths strategy.microbatches strategy.partition "
    "data.batch_size data.num_samples data.dim trainer.max_steps trainer.log_every trainer.num_threads"
).split()
AT_LEAST_ZERO = (
    "seed strategy.bucket_mb data.eval_samples data.prefetch data.noise optimizer.weight_decay "
    "lr_schedule.warmup_steps collectives.link_budget_s trainer.eval_every trainer.warmup_steps "
    "trainer.checksum_every trainer.wire_every trainer.verdict_budget_s trainer.verdict_every "
    "trainer.profile"
).split()
ABOVE_ZERO = (
    "optimizer.lr optimizer.eps trainer.clip_grad_norm collectives.timeout_s logger.timeout_s"
).split()
BELOW_ONE = "optimizer.momentum optimizer.betas".split()
AT_MOST_ONE = ["lr_schedule.min_ratio"]
MOST_S = 10_000_000  # what clocks of all libraries can count
AT_MOST = {  # beyond these nothing starts, or not in any time that a user waits
    "model.num_layers": 100_000,
    "data.prefetch": 10_000,
    "trainer.num_threads": 4096,
    "collectives.timeout_s": MOST_S,
    "logger.timeout_s": MOST_S,
}
NOT_EMPTY = (
    "model.name strategy.name cluster.name logger.project plugins data.inputs data.targets "
    "data.eval_inputs data.eval_targets collectives.link_curve"
).split()
RESERVED = "resume trainer.param_dtype trainer.compute_dtype trainer.reduce_dtype".split()
LARGEST_SEED = 2**63 - 1


def validate(config: RunConfig) -> None:
    """Refuse values that can never be right, whatever data and ranks there are.

    Raises:
        InputError: one sentence that names the key, its value and what would be right.
    """
    _check_values(config)
    _check_model(config)
    _check_strategy(config)
    _check_training(config)
    check_cluster(config.cluster)


def _value(config: Any, key: str) -> Any:
    return operator.attrgetter(key)(config)


def _check_values(config: RunConfig) -> None:
    for key in RESERVED:
        if _value(config, key) is not None:
            raise InputError(
                f"{shown(key, _value(config, key))} is reserved for a later version; leave it null"
            )
    check_choices(config, CHOICES)
    require(config, NOT_EMPTY, lambda text: bool(text.strip()), "must not be empty")
    require(config, AT_LEAST_ONE, lambda number: number >= 1, "must be at least 1")
    require(config, AT_LEAST_ZERO, lambda number: number >= 0, "must be at least 0")
    require(config, ABOVE_ZERO, lambda number: number > 0, "must be above 0")
    require(config, BELOW_ONE, lambda number: 0 <= number < 1, "must be at least 0 and below 1")
    require(config, AT_MOST_ONE, lambda number: 0 <= number <= 1, "must be from 0 to 1")
    for key, most in AT_MOST.items():
        require(config, [key], partial(operator.ge, most), f"must be at most {most:,}")
    require(config, ["seed"], lambda number: number <= LARGEST_SEED, f"must be at most {LARGEST_SEED}")


def check_choices(config: Any, choices: Mapping[str, tuple[str, ...]]) -> None:
    """The value under each dotted key, or each item where it is a list, must be one of the names.

    Raises:
        InputError: one that is not.
    """
    for key, names in choices.items():
        require(config, [key], names.__contains__, f"must be one of {', '.join(names)}")


def require(config: Any, keys: Sequence[str], holds: Callable[[Any], bool], rule: str) -> None:
    """The values under dotted keys must hold; null does, and a list is looked at item by item.

    Raises:
        InputError: the key with its value, and `rule`.
    """
    for key in keys:
        value = _value(config, key)
        for i, item in enumerate(value if isinstance(value, tuple) else (value,)):
            if item is not None and not holds(item):
                raise InputError(f"{shown(f'{key}[{i}]' if isinstance(value, tuple) else key, item)} {rule}")


def _check_model(config: RunConfig) -> None:
    model, defaults = config.model, type(config.model)()
    _refuse_options("model", model.name, ("mlp",), model.options)
    if model.widths is None:
        return
    layers = len(model.widths) + 1
    if model.num_layers not in (layers, defaults.num_layers):
        raise InputError(
            f"model.num_layers={model.num_layers} contradicts {shown('model.widths', list(model.widths))}, "
            f"which stands for {layers} layers; leave one of the two out"
        )
    dim_is_used = config.data.name == "synthetic" and config.data.dim is None
    if model.hidden_dim not in (*model.widths, defaults.hidden_dim) and not dim_is_used:
        raise InputError(
            f"model.hidden_dim={model.hidden_dim} contradicts {shown('model.widths', list(model.widths))}, "
            f"which gives every width; leave one of the two out"
        )


def _refuse_options(section: str, name: str, built_in: tuple[str, ...], options: dict[str, Any]) -> None:
    if name in built_in and options:
        raise InputError(
            f"{section}.options has the key {next(iter(options))}, but {section}={name} has no options; "
            f"they are for plug-ins"
        )


def layer_count(config: RunConfig) -> int | None:
    """Layers of a built-in model; None for a plug-in's, which only it knows."""
    if config.model.name != "mlp":
        return None
    return config.model.num_layers if config.model.widths is None else len(config.model.widths) + 1


def _check_strategy(config: RunConfig) -> None:
    strategy, batch_size = config.strategy, config.data.batch_size
    _refuse_options("strategy", strategy.name, BUILT_IN_STRATEGIES, strategy.options)
    if strategy.microbatches > batch_size:
        raise InputError(
            f"strategy.microbatches={strategy.microbatches} is more than data.batch_size={batch_size}; "
            f"a microbatch needs at least one row"
        )
    layers = layer_count(config)
    if strategy.partition is not None and layers is not None and sum(strategy.partition) != layers:
        raise InputError(
            f"{shown('strategy.partition', list(strategy.partition))} adds up to {sum(strategy.partition)} "
            f"layers and must add up to the model's {layers}"
        )


def check_world(config: RunConfig, world_size: int) -> None:
    """Refuse a number of ranks that the configuration contradicts; the launcher calls it when it knows.

    Raises:
        InputError: `single` on several ranks, or a partition with another number of stages.
    """
    strategy = config.strategy
    if strategy.name == "single" and world_size > 1:
        raise InputError(
            f"strategy=single cannot use world_size={world_size}; take 1 rank, or ddp, tensor or pipeline"
        )
    if strategy.partition is not None and len(strategy.partition) != world_size:
        raise InputError(
            f"{shown('strategy.partition', list(strategy.partition))} names {len(strategy.partition)} stages "
            f"and must name one for each of {world_size} ranks"
        )


def _check_training(config: RunConfig) -> None:
    trainer, schedule = config.trainer, config.lr_schedule
    if config.optimizer.nesterov and config.optimizer.momentum == 0:
        raise InputError("optimizer.nesterov=true needs optimizer.momentum above 0")
    if schedule.name == "cosine" and schedule.warmup_steps > trainer.max_steps:
        raise InputError(
            f"lr_schedule.warmup_steps={schedule.warmup_steps} must be at most "
            f"trainer.max_steps={trainer.max_steps}"
        )
    if trainer.profile is not None and trainer.profile[0] > trainer.profile[1]:
        raise InputError(
            f"{shown('trainer.profile', list(trainer.profile))} must name a first and a last step, "
            f"the first not after the last"
        )
    if trainer.profile is not None and trainer.profile[1] >= trainer.max_steps:
        raise InputError(
            f"{shown('trainer.profile', list(trainer.profile))} must lie within the steps, which are 0 to "
            f"{trainer.max_steps - 1} with trainer.max_steps={trainer.max_steps}"
        )
    if config.collectives.backend == "nccl" and trainer.device == "cpu":
        raise InputError("collectives.backend=nccl needs GPUs; with trainer.device=cpu take gloo or auto")


def check_cluster(cluster: ClusterConfig) -> None:
    """Refuse a memory ladder that no machine has.

    Raises:
        InputError: a size, rate or number of GPUs that is not positive, a tier without a name or named
            twice, or a tier with both kinds of bandwidth.
    """
    _require_positive("cluster", cluster, ("gpus_per_node", "gpus_per_fast_domain"))
    _require_positive("cluster.peak_TFLOPS", cluster.peak_TFLOPS, _numbers(cluster.peak_TFLOPS))
    names: list[str] = []
    for i, tier in enumerate(cluster.tiers):
        key = f"cluster.tiers[{i}]"
        _check_tier(key, tier)
        if tier.name in names:
            raise InputError(
                f"{shown(f'{key}.name', tier.name)} is also the name of "
                f"cluster.tiers[{names.index(tier.name)}]; each tier needs a name of its own"
            )
        names.append(tier.name)


def _check_tier(key: str, tier: Tier) -> None:
    if not tier.name.strip():
        raise InputError(f"{shown(f'{key}.name', tier.name)} must not be empty")
    _require_positive(key, tier, _numbers(tier))
    link, memory = tier.bandwidth_GBps_per_direction, tier.bandwidth_GBps_read_plus_write
    if link is not None and memory is not None:
        raise InputError(
            f"{key} has both bandwidth_GBps_per_direction={link} and "
            f"bandwidth_GBps_read_plus_write={memory}; give the first for a link, the second for a memory, "
            f"and leave the other null"
        )


def _numbers(section: Any) -> list[str]:
    return [name for name, value in vars(section).items() if isinstance(value, int | float)]


def _require_positive(key: str, section: Any, names: Iterable[str]) -> None:
    for name in names:
        value = getattr(section, name)
        if value is not None and value <= 0:
            raise InputError(
                f"{shown(f'{key}.{name}', value)} must be above 0; leave it null where it is unknown"
            )
