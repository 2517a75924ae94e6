"""Runs planted cases, one at a time, and says what the verdict made of them: named, predicted, measured.

A plant is run; where the verdict names a cause, its change is made and run too, so that the predicted step
time stands beside a measured one. Spanning cases are run without their plant besides: what that gives back,
as measured, says whether the cause must be named.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from tests.launched import ROOT, Launched, torchrun_on_two_hosts
from tests.planted import HEALTHY, PLANTED, Case, Plant
from tests.spanning import SPANNING
from trainer.errors import InputError
from trainer.rank import tell
from trainer.two_hosts_cli import Parser

CASES = {case.name: case for case in (*PLANTED, *SPANNING, *HEALTHY)}
NAMED_FROM, NONE_BELOW = 0.10, 0.02  # shares of the step; between them both are right, another cause never
WORTH_NAMING = 0.05
TRAIN, TWO_HOSTS = (str(ROOT / "scripts" / name) for name in ("train.py", "two_hosts.py"))
LIMIT_S = 200.0  # of one run: sleeping layers take seconds, but the machine may be busy
ENDING_S = 40.0
OTHER = "healthy"  # row of the matrix for all cases in which nothing is planted
ROWS_OF_CAUSES = (
    "small_messages", "bad_algorithm", "no_overlap", "idle_bubble", "uneven_shards", "slow_rank",
    "small_microbatches", "wrong_link",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of one run.

    Args:
        after_s: measured step time once the named change was made.
        free_s: measured step time without the plant, of spanning cases.
    """

    case: Case
    seed: str
    plant: Plant
    verdict: dict[str, Any]
    after_s: float | None = None
    free_s: float | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured step time after the change."""
        predicted = self.verdict["predicted_step_time_s"]
        return None if predicted is None or not self.after_s else float(predicted / self.after_s)

    @property
    def taken(self) -> float | None:
        """Share of the step that the plant takes, measured; None but in spanning cases."""
        return None if self.free_s is None else 1 - self.free_s / float(self.verdict["step_time_s"])

    @property
    def is_proven(self) -> bool:
        """Whether the change that was named really gives back what makes it worth naming."""
        return self.after_s is not None and self.after_s <= (1 - WORTH_NAMING) * self.verdict["step_time_s"]

    @property
    def wrong(self) -> str:
        """In what the verdict is not that of the plant; empty where it is right."""
        cause, right = self.verdict["cause"], self.case.cause
        if self.case.is_healthy:
            return "" if cause == "none" or self.is_proven else f"cause {cause} for none"
        if self.taken is not None:
            if cause == "none":
                return "" if self.taken < NAMED_FROM else f"cause none, {right} takes {self.taken:.1%}"
            if cause == right and self.taken < NONE_BELOW:
                return f"cause {cause}, which takes {self.taken:.1%}"
        found = []
        for key, wanted in (("cause", right), ("wall", self.case.wall), ("rank", self.plant.rank)):
            if wanted is not None and self.verdict[key] != wanted:
                found.append(f"{key} {self.verdict[key]} for {wanted}")
        return ", ".join(found)

    def line(self) -> str:
        verdict = self.verdict
        step_ms = verdict["step_time_s"] * 1e3
        text = f"{self.case.name:26} {'ok ' if not self.wrong else 'NOT'} {verdict['cause']!s:18}"
        text += f" wall {verdict['wall']!s:8} step {step_ms:7.1f} ms"
        if verdict["predicted_step_time_s"] is not None:
            text += f" predicted {verdict['predicted_step_time_s'] * 1e3:7.1f} ms"
        if self.after_s is not None:
            text += f" measured {self.after_s * 1e3:7.1f} ms ratio {self.ratio:.2f}"
        if self.taken is not None:
            text += f" the plant takes {self.taken:.1%}"
        if verdict["override"]:
            text += f" by {verdict['override']}"
        return text + (f" ({self.wrong}: {verdict['sentence']})" if self.wrong else "")


def run_case(case: Case, seed: str, folder: Path, *, cure: bool = True) -> Outcome:
    """Draw, run, and with `cure` run again after the change that was named.

    Args:
        folder: new; keeps the runs.
        cure: a healthy run in which a cause is named, and a spanning one, are run again without it too.

    Raises:
        RuntimeError: a run failed, with what it said.
    """
    folder.mkdir(parents=True)
    plant = case.draw(Random(f"{case.name} {seed}"), folder)
    overrides = list(plant.overrides)
    if plant.assumes_loopback:
        assumed = replace(plant, two_hosts=False)
        train(assumed, [*plant.overrides, "trainer.max_steps=5"], folder / "loopback")
        overrides.append(f"collectives.link_curve={folder}/loopback/link_curve.json")
    verdict = train(plant, overrides, folder / "planted")
    outcome = Outcome(case, seed, plant, verdict)
    free = None
    if case.spans:
        free = _without(plant, folder / "free")
        outcome = replace(outcome, free_s=free["step_time_s"])
    if verdict["cause"] == "none" or not (cure or case.is_healthy):
        return outcome
    if verdict["override"]:
        after = train(plant, merged([*overrides, *verdict["override"].split()]), folder / "cured")
    elif verdict["cause"] == case.cause:
        after = free or _without(plant, folder / "cured")
    else:
        return outcome
    return replace(outcome, after_s=after["step_time_s"])


def _without(plant: Plant, folder: Path) -> dict[str, Any]:
    if plant.assumes_loopback:
        return train(replace(plant, two_hosts=False), plant.overrides, folder)
    assert plant.cured is not None
    return train(plant, plant.cured, folder)


def merged(overrides: Iterable[str]) -> list[str]:
    """The last of each key."""
    return list({text.partition("=")[0]: text for text in overrides}.values())


def train(plant: Plant, overrides: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run scripts/train.py as a user would; what its verdict.json holds."""
    arguments = [*merged(overrides), "logger=none", f"hydra.run.dir={folder}"]
    command = [TRAIN, *arguments, f"world_size={plant.world_size}"]
    if plant.two_hosts:
        command = [TWO_HOSTS, *torchrun_on_two_hosts(), TRAIN, *arguments]
    started = Launched(folder.parent, *command, PYTHONPATH=str(ROOT))
    try:
        code, output = started.result(LIMIT_S)
    except subprocess.TimeoutExpired:
        started.process.terminate()  # so that namespaces and ranks are taken down
        code, output = started.result(ENDING_S)
    finally:
        if started.process.poll() is None:
            started.clean_up()
    verdict = folder / "verdict.json"
    if code or not verdict.exists():
        raise RuntimeError(f"{folder.parent.name}: exit code {code} of {' '.join(command)}\n{output[-3000:]}")
    found: dict[str, Any] = json.loads(verdict.read_text())
    return found


def confusion(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of a Markdown table: planted by rows, named by columns."""
    named = Counter((row_of(own.case), own.verdict["cause"]) for own in outcomes)
    columns = [*ROWS_OF_CAUSES, "none"]
    rows = list(dict.fromkeys(row_of(own.case) for own in outcomes))
    yield "| planted | " + " | ".join(columns) + " |"
    yield "|---|" + "--:|" * len(columns)
    for row in rows:
        yield f"| {row} | " + " | ".join(str(named[row, column] or "") for column in columns) + " |"


def accuracy(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of a Markdown table: predicted over measured step time after the change that was named."""
    yield "| cause | runs | median predicted / measured | least | most | median share given back, measured |"
    yield "|---|--:|--:|--:|--:|--:|"
    for row in dict.fromkeys(row_of(own.case) for own in outcomes if own.case.cause != "none"):
        own = [o for o in outcomes if row_of(o.case) == row and o.verdict["cause"] == o.case.cause]
        ratios = [o.ratio for o in own if o.ratio is not None]
        given = [1 - o.after_s / o.verdict["step_time_s"] for o in own if o.after_s]
        if ratios:
            middle = statistics.median(ratios)
            yield (
                f"| {row} | {len(ratios)} | {middle:.2f} | {min(ratios):.2f} | {max(ratios):.2f} "
                f"| {statistics.median(given):.0%} |"
            )


def across(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Lines of a Markdown table: named of all, by the share of the step that the plant took."""
    edges = (-1.0, NONE_BELOW, NAMED_FROM, 1.0)
    yield f"| plant | takes below {NONE_BELOW:.0%}: named | between | {NAMED_FROM:.0%} or more |"
    yield "|---|--:|--:|--:|"
    for row in dict.fromkeys(row_of(own.case) for own in outcomes if own.case.spans):
        cells = []
        for low, high in itertools.pairwise(edges):
            own = [o for o in outcomes if row_of(o.case) == row and low <= (o.taken or 0.0) < high]
            named = sum(o.verdict["cause"] == o.case.cause for o in own)
            cells.append(f"{named} of {len(own)}" if own else "")
        yield f"| {row} | " + " | ".join(cells) + " |"


def row_of(case: Case) -> str:
    if case.is_healthy:
        return OTHER
    return case.name if case.cause == "none" or case.spans else case.cause


def report(outcomes: Sequence[Outcome], seed: str, failed: Sequence[str] = ()) -> str:
    """Markdown: both tables, each run that was not named right, and each that failed."""
    wrong = [f"- {own.case.name}, seed {own.seed}: {own.wrong}" for own in outcomes if own.wrong]
    healthy = len({own.case.name for own in outcomes if own.case.is_healthy})
    found = [
        f"- {own.case.name}, seed {own.seed}: {own.verdict['cause']}, and its change measured "
        f"{own.after_s:.4g} s after {own.verdict['step_time_s']:.4g} s"
        for own in outcomes
        if own.case.is_healthy and own.is_proven
    ]
    lines = [
        f"Rows: what was planted; columns: what the verdict named. {len(outcomes)} runs, seed {seed}; "
        f"{healthy} healthy configurations.",
        "",
        *confusion(outcomes),
        "",
        *accuracy(outcomes),
        "",
        *([*across(outcomes), ""] if any(own.case.spans for own in outcomes) else []),
        *(["Not healthy after all, the named change helped:", "", *found, ""] if found else []),
        *(["Not named right:", "", *wrong] if wrong else [] if failed else ["All were named right."]),
        *(["", "Failed:", "", *(f"- {text.splitlines()[0]}" for text in failed)] if failed else []),
    ]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases as the command line says; 1 where one is not named right."""
    parser = Parser(prog="planted.py", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"all, or of {', '.join(CASES)}")
    parser.add_argument("--seed", default="0", help="magnitudes follow from it")
    parser.add_argument("--runs", type=int, default=5, help="of each case, each with magnitudes of its own")
    parser.add_argument("--output", type=Path, help="file for the tables, in Markdown")
    parser.add_argument("--keep", type=Path, help="folder for the runs; without it they are deleted")
    try:
        options = parser.parse_args(arguments)
        unknown = [name for name in options.cases if name not in CASES]
        if unknown:
            raise InputError(f"CASE={unknown[0]} is unknown; valid are {', '.join(CASES)}")
        if options.runs < 1:
            raise InputError(f"--runs={options.runs} must be at least 1")
    except InputError as error:
        tell(str(error))
        return 2
    chosen = [CASES[name] for name in options.cases or CASES]
    outcomes: list[Outcome] = []
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        for case in chosen:
            for run in range(options.runs):
                name = f"{case.name}-{options.seed}-{run}-{time.time_ns()}"
                try:
                    outcomes.append(run_case(case, f"{options.seed} {run}", folder / name))
                except RuntimeError as error:
                    failed.append(f"{case.name}, run {run}: {error}")
                    print(failed[-1], flush=True)
                else:
                    print(outcomes[-1].line(), flush=True)
                if options.output is not None:
                    tables = report(outcomes, options.seed, failed)
                    options.output.write_text(tables, encoding="utf-8")
    print("\n" + report(outcomes, options.seed, failed))
    return 1 if failed or any(own.wrong for own in outcomes) else 0
