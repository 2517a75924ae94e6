"""A comparison's raw times put into words: ratios with their spread, a table, JSON and Markdown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.contenders import Request
from trainer.environment import host_environment
from trainer.files import write_atomically

Row = dict[str, Any]

BARS = {"ddp": 1.0, "tensor": 0.9, "pipeline": 0.9}  # largest ours / torch's that `--check` lets pass
NOT_THE_BAR = ("DTensor pairs",)  # not the split that ours is; listed for information
HEADINGS = ("contender", "median ms", "min ms", "allocs", "ours/this", "quartiles", "bar")


def summarise(outcome: Row, request: Request, command: str) -> Row:
    """What compare.json holds: the raw times too."""
    return {
        "schema": 1,
        "command": command,
        "environment": {**host_environment(), "processor": processor()},
        "load_average": outcome["load_average"],
        "ranks": request.ranks,
        "threads_per_rank": 1,
        "rounds": request.rounds,
        "burst": request.burst,
        "warmup": request.warmup,
        "seed": request.seed,
        "settings": [
            {**setting, "contenders": summarise_setting(setting["contenders"])}
            for setting in outcome["settings"]
        ],
    }


def summarise_setting(contenders: Sequence[Row]) -> list[Row]:
    """Each contender with its statistics and, for torch's, the ratio of ours to it; bars where they apply."""
    rows = [
        {**row, "median_s": statistics.median(row["times_s"]), "min_s": min(row["times_s"])}
        for row in contenders
    ]
    for family in dict.fromkeys(row["family"] for row in rows):
        members = [row for row in rows if row["family"] == family]
        ours, theirs = members[0], members[1:]
        for row in theirs:
            ratios = [own / other for own, other in zip(ours["times_s"], row["times_s"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
            row["ratio"] = {"median": middle, "q1": low, "q3": high}
        rivals = [row for row in theirs if row["name"] not in NOT_THE_BAR]
        min(rivals, key=lambda row: row["median_s"])["bar"] = BARS[family]
    return rows


def failures(report: Row) -> list[str]:
    """One sentence for each bar that was missed and each step of ours that allocates."""
    sentences = []
    for setting in report["settings"]:
        name = ",".join(str(size) for size in setting["setting"].values())
        for row in setting["contenders"]:
            if "bar" in row and row["ratio"]["median"] > row["bar"]:
                sentences.append(
                    f"{name}: ours takes {row['ratio']['median']:.3f} of the time of {row['name']}, "
                    f"more than {row['bar']:.1f}"
                )
            if row["is_ours"] and row["allocations_per_step"]:
                count = row["allocations_per_step"]
                sentences.append(
                    f"{name}: a step of {row['family']}, {row['name']}, allocates {count:g} times"
                )
    return sentences


def cells(row: Row) -> tuple[str, ...]:
    """One contender as a line of a table, under `HEADINGS`."""
    ratio, bar = row.get("ratio"), row.get("bar")
    verdict = ""
    if bar is not None and ratio is not None:
        verdict = f"{bar:.1f} {'met' if ratio['median'] <= bar else 'MISSED'}"
    return (
        f"{row['family']}: {row['name']}",
        f"{row['median_s'] * 1e3:.2f}",
        f"{row['min_s'] * 1e3:.2f}",
        f"{row['allocations_per_step']:g}",
        f"{ratio['median']:.3f}" if ratio else "",
        f"{ratio['q1']:.3f} to {ratio['q3']:.3f}" if ratio else "",
        verdict,
    )


def title(setting: Row) -> str:
    sizes = setting["setting"]
    return (
        f"{sizes['layers']} layers of {sizes['width']}, batch {sizes['batch']}, "
        f"{sizes['microbatches']} microbatches"
    )


def notes(report: Row) -> list[str]:
    """What a reader must know to read the table."""
    environment = report["environment"]
    return [
        f"{report['ranks']} ranks, {report['threads_per_rank']} thread each, gloo over loopback; float32",
        f"{report['rounds']} rounds, {report['burst']} step(s) a turn; ours/this: median over rounds of the "
        "ratio of two turns in one round, below 1 where ours is faster; quartiles of the same",
        "ms: a step of the slowest rank; allocs: of tensor memory in a step, on the rank with most",
        "ddp and tensor take the whole batch at once on both sides; microbatches are the pipelines'",
        "the bar is for the faster of torch's pipelines, and for DTensor by columns: ours splits columns too",
        f"{environment['processor']}, {environment['cpu_count']} processors; load average in the minute "
        f"before: {report['load_average']:.1f}",
        f"torch {environment['torch']}, Python {environment['python']}, commit {environment['git_commit']}",
    ]


def details(setting: Row) -> list[str]:
    """What was chosen by tuning, and how well gradients agree."""
    lines = []
    for row in setting["contenders"]:
        parts = [row["tuning"]] if row["tuning"] else []
        if not row["is_ours"]:
            parts.append(f"gradients within {row['gradient_difference']:.1e} of ours")
        if parts:
            lines.append(f"{row['family']}: {row['name']}: " + "; ".join(parts))
    return lines


def show(report: Row, console: Console) -> None:
    """The tables, for a person."""
    for setting in report["settings"]:
        table = Table(title=title(setting), title_justify="left")
        for number, heading in enumerate(HEADINGS):
            table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
        for row in setting["contenders"]:
            table.add_row(*cells(row), style="bold" if row["is_ours"] else None)
        console.print(table)
        for line in details(setting):
            console.print(f"  {line}", highlight=False, soft_wrap=True)
    for note in notes(report):
        console.print(f"  {note}", highlight=False, soft_wrap=True)


def markdown(report: Row) -> str:
    """The same as a page."""
    lines = ["# Ours beside torch's own", "", f"`{report['command']}`", ""]
    lines += [f"- {note}" for note in notes(report)]
    for setting in report["settings"]:
        lines += [
            "",
            f"## {title(setting)}",
            "",
            _line(HEADINGS),
            _line(["---", *["---:"] * (len(HEADINGS) - 1)]),
        ]
        lines += [_line(cells(row)) for row in setting["contenders"]]
        lines += ["", *(f"- {line}" for line in details(setting))]
    return "\n".join([*lines, ""])


def _line(parts: Sequence[str]) -> str:
    return "| " + " | ".join(parts) + " |"


def write(report: Row, folder: Path) -> None:
    """compare.json and compare.md."""
    write_atomically(folder / "compare.json", json.dumps(report, indent=1) + "\n")
    write_atomically(folder / "compare.md", markdown(report))


def processor() -> str:
    """The processor's name as the system gives it."""
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
