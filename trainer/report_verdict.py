"""The verdict of a run in words: the wall, its cause, what the step would take, and the change to make."""

from __future__ import annotations

from trainer.report import Row, Run, entries, number, texts
from trainer.report_text import NONE, Markup, code, escape, in_unit, items, many, seconds, share, table

WALLS = {
    "link": "the link",
    "bubble": "the pipeline's bubble",
    "input": "the input",
    "host": "the host",
}


def verdict(run: Run) -> Markup:
    """The section's inside; says so where there is no verdict."""
    found = run.verdict
    if not found:
        why = next((one for one in run.missing if one.startswith("verdict.json")), "verdict.json is empty")
        return Markup(f"<h2>No verdict</h2>\n<p>{escape(why)}.</p>\n")
    parts = [f"<h2>{headline(found)}</h2>\n"]
    if found.get("too_noisy"):
        noise = number(found.get("noise_s"))
        sure = "" if noise is None else f" The median is sure to {seconds(noise)}."
        parts.append(
            f'<p class="warning"><b>Too noisy to tell.</b>{escape(sure)} A cause whose removal gives back '
            "less cannot be told from chance; run longer, or on a quiet machine.</p>\n"
        )
    if isinstance(found.get("sentence"), str):
        parts.append(f'<p class="sentence">{escape(found["sentence"])}</p>\n')
    if found.get("override"):
        parts.append(f'<p class="change">The change to make:<br>{code(found["override"])}</p>\n')
    parts.append(_tiles(found))
    parts.append(_evidence(found))
    parts.append(_causes(found))
    missing = texts(found.get("missing"))
    if missing:
        parts += ["<h3>What the verdict had to do without</h3>\n", items(missing)]
    return Markup("".join(parts))


def headline(found: Row) -> Markup:
    """The wall is the link; the cause is no overlap on rank 3."""
    wall, cause = found.get("wall"), found.get("cause")
    text = f"The wall is {_word(WALLS.get(str(wall), wall))}" if wall else "The wall is not known"
    if found.get("too_noisy"):
        text += "; too noisy to name a cause"
    elif cause == "none":
        text += "; no cause was found" if found.get("missing") else "; there is no cause to remove"
    elif cause is None and found.get("missing"):
        text += "; no cause could be looked for"
    elif cause:
        rank = found.get("rank")
        text += f"; its cause is {_word(cause)}" + (f" (rank {escape(rank)})" if rank is not None else "")
    return Markup(text)


def _word(name: object) -> Markup:
    return Markup(f"<b>{escape(str(name).replace('_', ' '))}</b>")


def tile(value: str, label: str, note: str = "") -> Markup:
    extra = f"<span>{escape(note)}</span>" if note else ""
    return Markup(f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>{extra}</div>')


def _tiles(found: Row) -> Markup:
    step, predicted = number(found.get("step_time_s")), number(found.get("predicted_step_time_s"))
    gain, gain_share = number(found.get("gain_s")), number(found.get("gain_share"))
    simulated, noise = number(found.get("simulated_step_time_s")), number(found.get("noise_s"))
    low, high = number(found.get("step_time_q1_s")), number(found.get("step_time_q3_s"))
    steps = number(found.get("steps"))
    spread = "" if low is None or high is None else f"quartiles {seconds(low)} to {seconds(high)}"
    if steps is not None:
        spread += f"{', ' if spread else ''}{many(int(steps), 'step')}"
    tiles = []
    if step is not None:
        tiles.append(tile(seconds(step), "a step takes", spread))
    if predicted is not None:
        tiles.append(tile(seconds(predicted), "without the cause it would take", "simulated, measured costs"))
    if gain is not None:
        label = "that gives back"
        tiles.append(
            tile(seconds(gain), label, "" if gain_share is None else f"{share(gain_share)} of the step")
        )
    if simulated is not None:
        off = "" if not step else f"{100 * (simulated / step - 1):+.1f} % of the measured one"
        tiles.append(tile(seconds(simulated), "the simulator's step as it is", off))
    if noise is not None:
        tiles.append(tile(seconds(noise), "noise", "a smaller gain is not named"))
    return Markup('<div class="tiles">' + "".join(tiles) + "</div>\n") if tiles else Markup("")


def _evidence(found: Row) -> Markup:
    rows = [
        (
            code(entry.get("name", NONE)),
            in_unit(number(entry.get("value")), str(entry.get("unit") or "")),
            entry.get("text") or NONE,
        )
        for entry in entries(found.get("evidence"))
    ]
    if not rows:
        return Markup("")
    return Markup("<h3>Evidence</h3>\n" + table(("number", "value", "what it says"), rows, stacked=True))


def _causes(found: Row) -> Markup:
    ranked = entries(found.get("causes"))
    if not ranked:
        return Markup("")
    rows = []
    for entry in ranked:
        rank = entry.get("rank")
        gain, part = number(entry.get("gain_s")), number(entry.get("gain_share"))
        rows.append(
            (
                str(entry.get("cause", NONE)).replace("_", " ") + ("" if rank is None else f", rank {rank}"),
                seconds(gain) + ("" if part is None else f" ({share(part)})"),
                seconds(number(entry.get("predicted_step_time_s"))),
                code(entry["override"]) if entry.get("override") else NONE,
                entry.get("text") or NONE,
            )
        )
    headings = ("cause", "gives back", "step would take", "change", "what it says")
    return Markup("<h3>Causes, by the time that they cost</h3>\n" + table(headings, rows, stacked=True))
