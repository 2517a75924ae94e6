"""What a run's folder holds, for the report: read leniently, with a sentence for whatever is missing.

A run that crashed leaves files that are cut, rows without medians and values that are null. Nothing here
raises for them: each file is read as far as it goes, and `Run.missing` says what is not there.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from collectives.link import LinkCurve, load
from trainer.errors import InputError
from trainer.files import read_metrics
from trainer.report_trace import StepTrace, read_trace
from trainer.summary import summarise

Row = dict[str, Any]

# Of a step, in cut order; all but data_s, which is a part of host_s, add up to it.
PARTS = ("compute_s", "exposed_comm_s", "wait_s", "idle_s", "host_s", "data_s")
CONSEQUENCES = {
    "config.yaml": "strategy and model are not known",
    "metrics.jsonl": "no step is on record",
    "summary.json": "the run did not end in order or is still running, "
    "and its status, its environment and the table of bytes are not known",
    "link_curve.json": "there is no link curve to compare with",
    "verdict.json": "no verdict was reached",
    "trace.json": "there is no timeline of a step",
}


@dataclass(frozen=True)
class Run:
    """A run's folder as read; `missing` holds a sentence for everything that is not there or is damaged.

    Mappings are empty and `link` and `trace` None where their file is missing.
    """

    folder: Path
    rows: list[Row] = field(default_factory=list)
    config: Row = field(default_factory=dict)
    config_text: str = ""
    summary: Row = field(default_factory=dict)
    steady: Row = field(default_factory=dict)
    verdict: Row = field(default_factory=dict)
    link: LinkCurve | None = None
    trace: StepTrace | None = None
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name or str(self.folder)

    @property
    def environment(self) -> Row:
        return mapping(self.summary.get("environment"))

    @property
    def world_size(self) -> int | None:
        """Ranks of the run, from whichever file knows; None when none does."""
        for value in (self.environment.get("world_size"), self.config.get("world_size")):
            if type(value) is int and value > 0:
                return value
        ranks = ranks_of(self.rows[-1]) if self.rows else []
        return len(ranks) or None

    @property
    def steady_rows(self) -> list[Row]:
        """The rows after warm-up."""
        return [row for row in self.rows if not row.get("is_warmup")]

    def median(self, key: str) -> float | None:
        """Median of a key over the steady steps; None when it was not measured."""
        return number(mapping(self.steady.get(key)).get("median"))

    def quartiles(self, key: str) -> tuple[float, float] | None:
        found = mapping(self.steady.get(key))
        low, high = number(found.get("q1")), number(found.get("q3"))
        return None if low is None or high is None else (low, high)

    def time_split(self) -> dict[int, dict[str, float]]:
        """rank -> part of the step -> seconds, medians over the steady rows; only what was measured.

        Where the rows have no split, that of verdict.json.
        """
        steady = self.steady_rows
        prefixes = {rank: f"rank/{rank}/" for rank in (ranks_of(steady[-1]) if steady else [])} or {0: ""}
        split: dict[int, dict[str, float]] = {}
        for rank, prefix in prefixes.items():
            for part in PARTS:
                values = present(row.get(prefix + part) for row in steady)
                if values:
                    split.setdefault(rank, {})[part] = statistics.median(values)
        if split:
            return split
        for entry in entries(self.verdict.get("time_split")):
            own = {part: value for part in PARTS if (value := number(entry.get(part))) is not None}
            if type(entry.get("rank")) is int and own:
                split[entry["rank"]] = own
        return split


def check_folder(folder: Path, name: str = "RUN") -> None:
    """
    Raises:
        InputError: it is no folder of a run; `name` is what the user calls it.
    """
    right = "name the folder of a training run, such as runs/2026-01-31/12-00-00"
    if not folder.is_dir():
        raise InputError(f"{name}={folder} is no folder; {right}")
    if not (folder / "metrics.jsonl").is_file():
        raise InputError(f"{name}={folder} has no metrics.jsonl; {right}")


def read_records(folder: Path) -> Run:
    """Rows, configuration, summary and verdict, as far as they can be read: what the numbers come from."""
    missing: list[str] = []
    rows = _rows(folder / "metrics.jsonl", missing)
    config, config_text = _config(folder / "config.yaml", missing)
    summary = _json(folder / "summary.json", missing)
    verdict = _json(folder / "verdict.json", missing)
    steady = mapping(summary.get("steady")) or mapping(guarded(summarise, rows))
    run = Run(folder, rows, config, config_text, summary, steady, verdict)
    if rows and not run.steady_rows:
        missing.append("no step after warm-up: medians are missing")
    return replace(run, missing=tuple(missing))


def read_run(folder: Path) -> Run:
    """The folder as far as it can be read; damaged and missing files end as sentences in `missing`."""
    run = read_records(folder)
    missing = list(run.missing)
    link, trace = None, None
    path = folder / "link_curve.json"
    if path.is_file():
        try:
            link = load(path)
        except (ArithmeticError, ValueError) as error:
            missing.append(f"link_curve.json is damaged: {error}")
    elif run.world_size != 1:
        missing.append(_absent(path.name))
    document = _json(folder / "trace.json", missing)
    if document:
        trace = guarded(read_trace, document)
        if trace is None:
            missing.append("trace.json has no whole step: " + CONSEQUENCES["trace.json"])
    return replace(run, link=link, trace=trace, missing=tuple(missing))


def number(value: Any) -> float | None:
    """`value` when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # a whole number that no float can hold
        return None


def present(values: Any) -> list[float]:
    """The finite numbers among `values`."""
    return [found for value in values if (found := number(value)) is not None]


def mapping(value: Any) -> Row:
    return value if isinstance(value, dict) else {}


def entries(value: Any) -> list[Row]:
    """The mappings of a list; none where it is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def texts(value: Any) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def guarded(function: Any, *arguments: Any) -> Any:
    """What the function gives, or None where its input is of a shape that nobody expected."""
    try:
        return function(*arguments)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def ranks_of(row: Mapping[str, Any]) -> list[int]:
    """The ranks that have keys of their own in a row, ascending."""
    found = {key.split("/", 2)[1] for key in row if key.startswith("rank/")}
    return sorted(int(rank) for rank in found if rank.isdecimal())


def series(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """(steps, values) of the rows in which the key was measured."""
    points = [(number(row.get("step")), number(row.get(key))) for row in rows]
    known = [(step, value) for step, value in points if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def _absent(name: str) -> str:
    return f"{name} is missing: {CONSEQUENCES[name]}"


def _damaged(name: str, error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        reason: object = f"{error.problem}: line {error.problem_mark.line + 1}"
    elif isinstance(error, OSError):
        reason = error.strerror
    else:
        reason = error
    return f"{name} is damaged ({reason}): {CONSEQUENCES[name]}"


def _rows(path: Path, missing: list[str]) -> list[Row]:
    rows: list[Row] = []
    try:
        for row in read_metrics(path):
            if not isinstance(row, dict):
                raise ValueError("a line is no mapping")
            rows.append(row)
        if not _ends_whole(path):
            missing.append("metrics.jsonl is cut within its last line, which is left out")
    except FileNotFoundError:
        missing.append(_absent(path.name))
    except (OSError, ValueError) as error:
        if rows:
            missing.append(f"metrics.jsonl is damaged after row {len(rows)}: later rows are left out")
        else:
            missing.append(_damaged(path.name, error))
    else:
        if not rows:
            missing.append(f"metrics.jsonl has no whole row: {CONSEQUENCES[path.name]}")
    return rows


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"\n", b"")


def _config(path: Path, missing: list[str]) -> tuple[Row, str]:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.safe_load(text)
        if not isinstance(found, dict):
            raise ValueError("it is no mapping")
    except FileNotFoundError:
        missing.append(_absent(path.name))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        missing.append(_damaged(path.name, error))
    else:
        return found, text
    return {}, text


def _json(path: Path, missing: list[str]) -> Row:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it is no mapping")
    except FileNotFoundError:
        missing.append(_absent(path.name))
    except (OSError, ValueError, RecursionError) as error:
        missing.append(_damaged(path.name, error))
    else:
        return found
    return {}
