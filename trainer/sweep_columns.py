"""The columns of a sweep's table: key, unit, kind and definition; docs/sweeps.md has the same."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """`kind` is empty where the column says what ran rather than how it went."""

    key: str
    unit: str
    kind: str
    definition: str


COLUMNS = tuple(
    Column(*one)
    for one in (
        ("number", "", "", "the job's number in the sweep, from 0"),
        ("name", "", "", "its folder"),
        ("state", "", "", "`complete`, `failed`, `skipped`, `stopped` or `running`"),
        ("reason", "", "", "why it is not complete, in a sentence"),
        ("note", "", "", "what its folder lacks, and why a number that one may expect is `null`"),
        ("problem", "", "", "the number of its problem, from 0"),
        ("place", "", "", "among the complete jobs of its problem by `samples_per_s`; 1 is the best"),
        ("tied_with", "", "", "numbers of the jobs of its problem whose order with this one is not sure"),
        ("swept", "", "", "the keys that take several values in this sweep, with this job's"),
        ("strategy", "", "", "`strategy.name`"),
        ("world_size", "", "", "ranks"),
        ("microbatches", "", "", "`strategy.microbatches`; 1 under the naive schedule, which runs one"),
        ("schedule", "", "", "`strategy.schedule`; pipelines only"),
        ("batch_size", "rows", "", "`data.batch_size`, all ranks together"),
        ("steps", "", "count", "steps on record"),
        ("steady_steps", "", "count", "of them those after warm-up, which all medians rest on"),
        ("step_time_s", "s", "measured", "median"),
        ("step_time_low_s", "s", "measured", "first quartile of `step_time_s`"),
        ("step_time_high_s", "s", "measured", "third quartile of `step_time_s`"),
        ("samples_per_s", "rows/s", "measured", "median"),
        ("samples_per_s_low", "rows/s", "measured", "first quartile of `samples_per_s`"),
        ("samples_per_s_high", "rows/s", "measured", "third quartile of `samples_per_s`"),
        ("speedup", "ratio", "measured", "`samples_per_s` / that of the best one-rank job of its problem"),
        ("efficiency", "ratio", "measured", "`speedup` / `world_size`"),
        ("bytes_least", "B", "prediction", "median of a step's"),
        ("bytes_predicted", "B", "prediction", "median of a step's"),
        ("bytes_sent", "B", "count", "median of a step's"),
        ("bytes_wire", "B", "measured", "median of the readings, each over its `wire_steps`; with framing"),
        ("effective_bandwidth_GBps", "GB/s", "measured", "median of a step's"),
        ("bubble_fraction", "share", "measured", "median of a step's"),
        ("bubble_expected", "share", "prediction", "median of a step's: (p-1)/(m+p-1)"),
        ("compute_s", "s", "measured", "median"),
        ("exposed_comm_s", "s", "measured", "median"),
        ("wait_s", "s", "measured", "median"),
        ("idle_s", "s", "measured", "median"),
        ("host_s", "s", "measured", "median"),
        ("loss", "", "measured", "of the last step"),
        ("eval_loss", "", "measured", "of the last evaluation"),
        ("eval_accuracy", "share", "measured", "of the last evaluation"),
        ("wall", "", "", "of `verdict.json`: the largest part of a step"),
        (
            "cause",
            "",
            "",
            "of `verdict.json`: what to remove first; `none` where nothing gives 5 %, null where not judged",
        ),
        ("too_noisy", "", "", "of `verdict.json`: whether noise kept it from naming a cause"),
        ("verdict", "", "", "its sentence"),
        ("predicted_step_time_s", "s", "prediction", "of `verdict.json`: the step without the cause"),
    )
)
MEDIANS = (
    "bytes_least",
    "bytes_predicted",
    "bytes_sent",
    "effective_bandwidth_GBps",
    "bubble_fraction",
    "bubble_expected",
    "compute_s",
    "exposed_comm_s",
    "wait_s",
    "idle_s",
    "host_s",
)  # keys of a step's row of which the table has the median under the same name
