"""The table of a sweep: a row for each job, the best plan first, and what they say in a sentence."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report import Row
from trainer.sweep_advice import Advice, advice
from trainer.sweep_columns import COLUMNS
from trainer.sweep_files import Sweep, read_sweep
from trainer.sweep_ranking import Problem, ranked_problems
from trainer.sweep_rows import job_row

SCHEMA = 1
NO_JOBS = "The sweep has no job yet."
NO_CONFIGURATION = "No job got as far as its configuration: there is nothing to compare."


@dataclass(frozen=True)
class SweepTable:
    """`rows` are all jobs: those of each problem, best first, then those that are not ranked, by number.

    `problems` and `advice` go together, one for each kind of work that the sweep's jobs do.
    """

    folder: Path
    sweep: Sweep
    rows: tuple[Row, ...]
    problems: tuple[Problem, ...]
    advice: tuple[Advice, ...]

    @property
    def sentences(self) -> tuple[str, ...]:
        """One for each problem; where the sweep did not come to its end, what is known so far."""
        if not self.advice:
            return (NO_CONFIGURATION if self.rows else NO_JOBS,)
        so_far = "So far: " if self.sweep.state in ("running", "stopped") else ""
        return tuple(so_far + one.sentence for one in self.advice)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What to bear in mind, each once."""
        return tuple(dict.fromkeys(remark for one in self.advice for remark in one.remarks))

    @property
    def others(self) -> tuple[Row, ...]:
        """The rows that are not ranked, by number."""
        return tuple(row for row in self.rows if row["place"] is None)

    @property
    def ranked(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row["place"] is not None)


def read_table(folder: Path) -> SweepTable:
    """The table of a sweep's folder, at any time of the sweep.

    A job's numbers come from its metrics.jsonl, plan from config.yaml, verdict from verdict.json. A file that
    is missing or damaged ends in the row's `note`, and what it would have said is null.

    Raises:
        InputError: sweep.json or a job.json is damaged, or the folder is no sweep's.
    """
    sweep = read_sweep(folder)
    jobs = [job_row(job) for job in sweep.jobs]
    problems = ranked_problems(jobs)
    ranked = [row for problem in problems for row in problem.ranked]
    others = [row for row, _ in jobs if row["place"] is None]
    return SweepTable(folder, sweep, tuple(ranked + others), problems, tuple(advice(p) for p in problems))


def to_json(table: SweepTable) -> dict[str, Any]:
    """What table.json holds; docs/sweeps.md says what each key means."""
    return {
        "schema": SCHEMA,
        "state": table.sweep.state,
        "overrides": list(table.sweep.overrides),
        "sentences": list(table.sentences),
        "remarks": list(table.remarks),
        "problems": [
            {
                "number": problem.number,
                "label": problem.label,
                "sentence": told.sentence,
                "world_size": told.world_size,
                "job": told.job,
                "one_rank_job": None if problem.one_rank is None else problem.one_rank["number"],
            }
            for problem, told in zip(table.problems, table.advice, strict=True)
        ],
        "columns": [column._asdict() for column in COLUMNS],
        "rows": list(table.rows),
    }


def json_text(table: SweepTable) -> str:
    return json.dumps(to_json(table), indent=2, allow_nan=False) + "\n"


def csv_text(table: SweepTable) -> str:
    """One line a row; `swept` as a column `swept/KEY` for each swept key; null is empty."""
    swept = list(dict.fromkeys(key for row in table.rows for key in row["swept"]))
    keys = [column.key for column in COLUMNS if column.key != "swept"]
    place = keys.index("strategy")
    headings = [*keys[:place], *(f"swept/{key}" for key in swept), *keys[place:]]
    text = io.StringIO()
    writer = csv.DictWriter(text, headings, lineterminator="\n")
    writer.writeheader()
    for row in table.rows:
        line = {key: row[key] for key in keys} | {f"swept/{key}": row["swept"].get(key) for key in swept}
        writer.writerow(line | {"tied_with": " ".join(str(number) for number in row["tied_with"])})
    return text.getvalue()
