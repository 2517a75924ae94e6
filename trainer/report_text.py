"""Numbers and tables as HTML; every text that comes from a file is escaped here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

NONE = "\N{EN DASH}"  # stands where a value was not measured


class Markup(str):
    """HTML that is safe as it stands."""


def escape(value: object) -> Markup:
    """Text as HTML; what is HTML already stays."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def seconds(value: float | None) -> str:
    """Three digits with a unit that reads well: 12.3 ms."""
    if value is None:
        return NONE
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(value) * factor >= 1:
            return f"{_digits(value * factor)} {unit}"
    return f"{_digits(value * 1e6)} µs"


def size(value: float | None) -> str:
    """Decimal: 1.5 kB."""
    if value is None:
        return NONE
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {unit}"
    return f"{_digits(value)} B"


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def plain(value: float | None) -> str:
    """Three digits; whole numbers with all of theirs."""
    if value is None:
        return NONE
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return _digits(value) if 1e-3 <= abs(value) < 1e6 else f"{value:.3g}"


def bandwidth(value: float | None) -> str:
    return NONE if value is None else f"{plain(value)} GB/s"


def many(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def in_unit(value: float | None, unit: str) -> str:
    """A value in the unit that its file names."""
    if value is None:
        return NONE
    known = {"s": seconds, "B": size, "bytes": size}
    return known[unit](value) if unit in known else f"{plain(value)} {unit}".rstrip()


def table(
    headings: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    numbers: Iterable[int] = (),
    total: Sequence[object] | None = None,
    stacked: bool = False,
) -> Markup:
    """A table in a box that scrolls by itself; `numbers` are the columns set to the right.

    `stacked` turns each row into a card on a narrow screen: for rows of words.
    """
    right = set(numbers)

    def cells(values: Sequence[object], tag: str = "td") -> str:
        return "".join(
            f'<{tag}{" class=n" if place in right else ""} data-label="{escape(headings[place])}">'
            f"{escape(value)}</{tag}>"
            for place, value in enumerate(values)
        )

    head = "".join(
        f'<th scope="col"{" class=n" if place in right else ""}>{escape(heading)}</th>'
        for place, heading in enumerate(headings)
    )
    body = "".join(f"<tr>{cells(row)}</tr>\n" for row in rows)
    foot = "" if total is None else f"<tfoot><tr>{cells(total)}</tr></tfoot>"
    kind = "table stacked" if stacked else "table"
    return Markup(
        f'<div class="{kind}" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody>{foot}</table></div>\n"
    )


def items(sentences: Iterable[object]) -> Markup:
    return Markup("<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>\n")


def code(text: object) -> Markup:
    return Markup(f"<code>{escape(text)}</code>")


def folded(title: str, body: Markup) -> Markup:
    return Markup(f"<details><summary>{escape(title)}</summary>\n{body}</details>\n")


def _digits(value: float) -> str:
    if value == 0:
        return "0"
    text = f"{value:.3g}"
    return f"{value:,.0f}" if "e" in text else text
