"""What rank 0 shows a person: a progress line, and at the end what the run measured."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from trainer.config import RunConfig

if TYPE_CHECKING:
    from rich.progress import Progress

Row = dict[str, Any]


class ProgressLine:
    """A moving line on a terminal, plain lines every `trainer.log_every` steps elsewhere."""

    def __init__(self, config: RunConfig, console: Console) -> None:
        self.config, self.console = config, console
        self._bar: Progress | None = None
        if console.is_terminal:
            from rich.progress import (  # here: where there is no terminal nobody waits for it
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("", total=config.trainer.max_steps)
            self._bar.start()

    def show(self, row: Row) -> None:
        """A step's row."""
        if self._bar is not None:
            self._bar.update(self._task, completed=row["step"] + 1, description=describe(row))
        elif (row["step"] + 1) % self.config.trainer.log_every == 0 or row["eval_loss"] is not None:
            count = f"step {row['step'] + 1}/{self.config.trainer.max_steps}"
            self.console.print(f"{count}  {describe(row)}", highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def describe(row: Row) -> str:
    """One row in a line."""
    parts = [
        f"loss {row['loss']:.4f}",
        f"{row['step_time_s'] * 1e3:.2f} ms",
        f"sent {bytes_text(row['bytes_sent'])}",
    ]
    if row["effective_bandwidth_GBps"] is not None:
        parts.append(f"{row['effective_bandwidth_GBps']:.4f} GB/s")
    if row["eval_accuracy"] is not None:
        parts.append(f"held-out accuracy {row['eval_accuracy']:.4f}")
    elif row["eval_loss"] is not None:
        parts.append(f"held-out loss {row['eval_loss']:.4f}")
    return "  ".join(parts)


def bytes_text(count: float) -> str:
    """Bytes in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    raise AssertionError


def show_summary(
    console: Console,
    steady: list[Row],
    last: Row | None,
    table: list[Row],
    headline_rank: int,
    run_dir: str,
    link: list[Row],
) -> None:
    """What the run measured: medians after warm-up, bytes by operation, and where everything is."""
    if steady:
        time_s = statistics.median(row["step_time_s"] for row in steady)
        console.print(f"\nmedian of {len(steady)} step{'' if len(steady) == 1 else 's'} after warm-up")
        console.print(f"  step time            {time_s * 1e3:.3f} ms", highlight=False)
        sent = statistics.median(row["bytes_sent"] for row in steady)
        console.print(
            f"  bytes sent           {sent:,.0f} by rank {headline_rank}, which sends most", highlight=False
        )
        bandwidths = [row["effective_bandwidth_GBps"] for row in steady]
        text = "none: nothing was sent"
        if None not in bandwidths:
            text = f"{statistics.median(bandwidths):.6f} GB/s (bytes sent / step time)"
        console.print(f"  effective bandwidth  {text}", highlight=False)
    for curve in link:
        size = bytes_text(curve["largest"]["size_bytes"])
        console.print(
            f"  link                 {curve['bandwidth_GBps']:.3f} GB/s per direction by "
            f"{curve['operation']} up to {size}, and {curve['latency_s'] * 1e6:,.0f} us at least",
            highlight=False,
            soft_wrap=True,
        )
    if last is not None and last["eval_loss"] is not None:
        accuracy = last["eval_accuracy"]
        text = f"loss {last['eval_loss']:.4f}" if accuracy is None else f"accuracy {accuracy:.4f}"
        console.print(f"  held-out {text}", highlight=False)
    if table:
        _show_bytes(console, table)
    console.print(f"run folder  {run_dir}", highlight=False, soft_wrap=True)


def _show_bytes(console: Console, table: list[Row]) -> None:
    """Sums over ranks; equal only where every rank's own figures are."""
    shown = Table(title="bytes sent in all steps, all ranks together", title_justify="left")
    shown.add_column("operation")
    for name in ("calls", "predicted", "counted", ""):
        shown.add_column(name, justify="right")
    for operation in dict.fromkeys(entry["operation"] for entry in table):
        own = [entry for entry in table if entry["operation"] == operation]
        if not any(entry["bytes_predicted"] or entry["bytes_sent"] for entry in own):
            continue  # receives: their senders have a row
        same = all(entry["bytes_predicted"] == entry["bytes_sent"] for entry in own)
        sums = [sum(entry[key] for entry in own) for key in ("calls", "bytes_predicted", "bytes_sent")]
        shown.add_row(operation, *(f"{value:,}" for value in sums), "equal" if same else "DIFFERENT")
    console.print(shown)
