"""A schedule as a clock sees it: what the thread of a rank does, one span after the other.

Follows from the schedule alone, so that one rank can read what another has stamped.
"""

from __future__ import annotations

from dataclasses import dataclass

from strategies.communication import Communication, Wait
from strategies.compute import GradientNorm
from strategies.schedule import Schedule
from strategies.values import Operation

COMPUTE, LAUNCH, WAIT, MEET = range(4)  # MEET: the norm's exchange, started and waited for in one
KIND_NAMES = ("compute", "launch", "wait", "meet")


@dataclass(frozen=True, slots=True)
class Span:
    """`part` is the place among the spans of one operation."""

    kind: int
    operation: Operation
    part: int = 0


def spans_of(schedule: Schedule, norm_crosses: bool) -> tuple[Span, ...]:
    """One span an operation; three for a gradient norm that crosses ranks: own, exchange, scaling."""
    spans: list[Span] = []
    for operation in schedule.operations:
        if isinstance(operation, GradientNorm) and norm_crosses:
            spans += [Span(kind, operation, part) for part, kind in enumerate((COMPUTE, MEET, COMPUTE))]
        elif isinstance(operation, Communication):
            spans.append(Span(LAUNCH, operation))
        else:
            spans.append(Span(WAIT if isinstance(operation, Wait) else COMPUTE, operation))
    return tuple(spans)
