"""Cross-entropy and mean squared error by hand, whole or on a shard of the output columns.

Both are a sum over rows and a count: a rank adds `scale` times the sum over its own rows,
with `scale` = 1 / global rows (mean squared error: 1 / (global rows * outputs)), so that the
sum over ranks and microbatches is the mean over the batch, exactly, however unequal the slices
(some may be empty). Data parallel's division by world size is in that factor already: a rank's
share would be (world size / global rows) * sum, and the reduced SUM is divided by world size.

Outputs come as [outputs, rows]; a row-major model passes a transposed view.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor

LOSSES = ("cross_entropy", "mse")


class Loss(abc.ABC):
    """The loss of one microbatch, its buffers made once.

    Args:
        output: model output [columns, rows], on this rank's columns.
        gradient: receives dLoss/doutput, [columns, rows].
        target: class numbers int64 [rows], or values [outputs, rows] of all columns.
        columns: (start, stop) of the output columns held here.
        counts: False where another rank already counts the parts that are the same on all shards.
    """

    def __init__(
        self,
        output: Tensor,
        gradient: Tensor | None,
        target: Tensor,
        columns: tuple[int, int],
        scale: float,
        counts: bool = True,
    ) -> None:
        self.output, self.gradient, self.target = output, gradient, target
        self.columns, self.scale, self.counts = columns, scale, counts
        # bfloat16 has 8 bits of mantissa: sums over classes are taken in float32.
        self.dtype = torch.float32 if output.dtype == torch.bfloat16 else output.dtype
        self.share = self._buffer()
        self._share64 = self._buffer(dtype=torch.float64)

    @abc.abstractmethod
    def add_to(self, total: Tensor) -> None:
        """Write the gradient (unless evaluating) and add this microbatch's share to `total`, float64 []."""

    def _add_share(self, total: Tensor) -> None:
        """`share` holds the sum over this microbatch's rows. Mixing dtypes in one call would allocate."""
        self._share64.copy_(self.share)
        total.add_(self._share64, alpha=self.scale)

    def _constant(self, value: float) -> Tensor:
        """A factor as a tensor: a Python number would be made one in every call."""
        return torch.full((), value, dtype=self.dtype, device=self.output.device)

    def _buffer(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.output.device)


class MeanSquaredError(Loss):
    """scale * sum (output - target)^2; needs no communication on column shards."""

    def __init__(
        self,
        output: Tensor,
        gradient: Tensor | None,
        target: Tensor,
        columns: tuple[int, int],
        scale: float,
        counts: bool = True,
    ) -> None:
        super().__init__(output, gradient, target, columns, scale, counts)
        in_place = gradient is not None and gradient.dtype == self.dtype
        self.difference = gradient if gradient is not None and in_place else self._buffer(*output.shape)
        self.squares = self._buffer(*output.shape)
        self.own_target = target[columns[0] : columns[1]]
        self.slope = self._constant(2.0 * scale)

    def add_to(self, total: Tensor) -> None:
        if self.output.dtype == self.dtype:
            torch.sub(self.output, self.own_target, out=self.difference)
        else:
            self.difference.copy_(self.output)  # in the sums' dtype before anything is rounded
            self.difference.sub_(self.own_target)
        torch.mul(self.difference, self.difference, out=self.squares)
        torch.sum(self.squares, dim=(0, 1), out=self.share)
        self._add_share(total)
        if self.gradient is not None:
            self.difference.mul_(self.slope)
            if self.gradient is not self.difference:
                self.gradient.copy_(self.difference)


class CrossEntropy(Loss):
    """scale * sum over rows of log(sum exp z) - z[target], taken in three stages.

    `take_maximum` and `take_sums` leave what column shards must reduce over ranks in `maximum`
    [1, rows] (MAX) and `sums` [2, rows] (SUM: sum of exponentials; the target's logit, which one
    shard alone holds). Without shards `add_to` may follow them at once.
    """

    def __init__(
        self,
        output: Tensor,
        gradient: Tensor | None,
        target: Tensor,
        columns: tuple[int, int],
        scale: float,
        counts: bool = True,
    ) -> None:
        super().__init__(output, gradient, target, columns, scale, counts)
        width, rows = output.shape
        self.exponentials = self._buffer(width, rows)
        self.maximum = self._buffer(1, rows)
        self.sums = self._buffer(2, rows)
        self.own_row = self._buffer(1, rows, dtype=torch.int64)
        self.clamped_row = self._buffer(1, rows, dtype=torch.int64)
        self.is_own = self._buffer(1, rows, dtype=torch.bool)
        self.own = self._buffer(1, rows)
        self.row_loss = self._buffer(1, rows)
        self.slope = self._constant(scale)

    def take_maximum(self) -> None:
        if self.output.shape[0] == 0:
            self.maximum.fill_(float("-inf"))
        else:
            self.exponentials.copy_(self.output)
            torch.amax(self.exponentials, dim=0, keepdim=True, out=self.maximum)

    def take_sums(self) -> None:
        if self.output.shape[0] == 0:
            self.sums.zero_()
            return
        self.exponentials.sub_(self.maximum)
        self._locate_targets()
        torch.gather(self.exponentials, 0, self.clamped_row, out=self.row_loss)
        torch.mul(self.row_loss, self.own, out=self.sums[1:2])
        self.exponentials.exp_()
        torch.sum(self.exponentials, dim=0, keepdim=True, out=self.sums[0:1])

    def add_to(self, total: Tensor) -> None:
        """The logits were shifted by `maximum`, which cancels in log(sum exp z) - z[target]."""
        if self.counts:
            torch.log(self.sums[0:1], out=self.row_loss)
            self.row_loss.sub_(self.sums[1:2])
            torch.sum(self.row_loss, dim=(0, 1), out=self.share)
            self._add_share(total)
        if self.gradient is not None and self.output.shape[0] > 0:
            self.exponentials.div_(self.sums[0:1])
            torch.neg(self.own, out=self.own)
            self.exponentials.scatter_add_(0, self.clamped_row, self.own)
            self.exponentials.mul_(self.slope)
            self.gradient.copy_(self.exponentials)

    def _locate_targets(self) -> None:
        """Row of each target within this shard (clamped), and 1 where the shard holds it, else 0."""
        torch.sub(self.target, self.columns[0], out=self.own_row[0])
        torch.clamp(self.own_row, 0, self.output.shape[0] - 1, out=self.clamped_row)
        torch.eq(self.own_row, self.clamped_row, out=self.is_own)
        self.own.copy_(self.is_own)


def make_loss(
    kind: str,
    output: Tensor,
    gradient: Tensor | None,
    target: Tensor,
    columns: tuple[int, int],
    global_rows: int,
    outputs: int,
    counts: bool = True,
) -> Loss:
    """The loss named by `kind`, with its scale from the global number of rows and outputs."""
    if kind == "cross_entropy":
        return CrossEntropy(output, gradient, target, columns, 1.0 / global_rows, counts)
    if kind == "mse":
        return MeanSquaredError(output, gradient, target, columns, 1.0 / (global_rows * outputs), counts)
    raise ValueError(f"trainer.loss={kind} is unknown; valid are {', '.join(LOSSES)}")


def count_correct(output: Tensor, target: Tensor) -> Tensor:
    """Rows of [outputs, rows] whose largest output is the target class, int64 []; it allocates."""
    return (output.argmax(dim=0) == target).sum()
