"""Cross-entropy and mean squared error, whole and on column shards, against torch's own."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from models.loss import CrossEntropy, MeanSquaredError, count_correct, make_loss

Columns = tuple[int, int]

SHARDS: dict[str, list[Columns]] = {
    "whole": [(0, 7)],
    "two": [(0, 4), (4, 7)],
    "one column each": [(i, i + 1) for i in range(7)],
    "empty shards": [(0, 1), (1, 1), (1, 7), (7, 7)],
}


def cross_entropy(
    output: Tensor, target: Tensor, shards: list[Columns], global_rows: int | None = None
) -> tuple[float, Tensor]:
    """Loss and gradient [classes, rows] from shards of [classes, rows]; the reductions are done here."""
    rows = output.shape[1]
    gradient = torch.full_like(output, float("nan"))
    losses = []
    for rank, (start, stop) in enumerate(shards):
        loss = make_loss(
            "cross_entropy",
            output[start:stop],
            gradient[start:stop],
            target,
            (start, stop),
            global_rows or rows,
            output.shape[0],
            counts=rank == 0,
        )
        assert isinstance(loss, CrossEntropy)
        losses.append(loss)
    for loss in losses:
        loss.take_maximum()
    maximum = torch.stack([loss.maximum for loss in losses]).amax(0)
    for loss in losses:
        loss.maximum.copy_(maximum)
        loss.take_sums()
    sums = torch.stack([loss.sums for loss in losses]).sum(0)
    total = torch.zeros((), dtype=torch.float64)
    for loss in losses:
        loss.sums.copy_(sums)
        loss.add_to(total)
    return float(total), gradient


def squared_error(
    output: Tensor, target: Tensor, shards: list[Columns], global_rows: int | None = None
) -> tuple[float, Tensor]:
    gradient = torch.full_like(output, float("nan"))
    total = torch.zeros((), dtype=torch.float64)
    for start, stop in shards:
        make_loss(
            "mse",
            output[start:stop],
            gradient[start:stop],
            target,
            (start, stop),
            global_rows or output.shape[1],
            output.shape[0],
        ).add_to(total)
    return float(total), gradient


def classes(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    output = 3 * torch.randn(7, rows, dtype=torch.float64, generator=generator)
    return output, torch.randint(0, 7, (rows,), generator=generator)


def values(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(7, rows, dtype=torch.float64, generator=generator),
        torch.randn(7, rows, dtype=torch.float64, generator=generator),
    )


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_cross_entropy_is_torchs(shards: list[Columns], rows: int) -> None:
    output, target = classes(rows)
    loss, gradient = cross_entropy(output, target, shards)
    leaf = output.t().clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf, target)
    expected.backward()
    assert leaf.grad is not None
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(gradient, leaf.grad.t(), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
@pytest.mark.parametrize("rows", [1, 2, 11])
def test_mean_squared_error_is_torchs(shards: list[Columns], rows: int) -> None:
    output, target = values(rows)
    loss, gradient = squared_error(output, target, shards)
    leaf = output.t().clone().requires_grad_()
    expected = torch.nn.functional.mse_loss(leaf, target.t())
    expected.backward()
    assert leaf.grad is not None
    assert loss == pytest.approx(expected.item(), rel=1e-13)
    torch.testing.assert_close(gradient, leaf.grad.t(), rtol=1e-12, atol=1e-15)


def test_both_by_hand() -> None:
    """Logits 0 and ln 3: probabilities 1/4 and 3/4. Of four global rows this is one."""
    output = torch.tensor([[0.0], [math.log(3)]], dtype=torch.float64)
    loss, gradient = cross_entropy(output, torch.tensor([0]), [(0, 1), (1, 2)], global_rows=4)
    assert loss == pytest.approx(math.log(4) / 4)
    torch.testing.assert_close(gradient, torch.tensor([[-3 / 16], [3 / 16]], dtype=torch.float64))

    # Differences 1 and -2: squares 1 + 4, over four rows of two outputs.
    output, target = (torch.tensor(v, dtype=torch.float64) for v in ([[3.0], [1.0]], [[2.0], [3.0]]))
    loss, gradient = squared_error(output, target, [(0, 2)], global_rows=4)
    assert loss == 5 / 8
    torch.testing.assert_close(gradient, torch.tensor([[2 / 8], [-4 / 8]], dtype=torch.float64))


@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
def test_unequal_slices_of_a_batch_add_up_to_its_mean(kind: str) -> None:
    """Slices of 5, 3, 0 and 2 rows, as ranks or microbatches: an empty one adds nothing."""
    take = cross_entropy if kind == "cross_entropy" else squared_error
    output, target = classes(10) if kind == "cross_entropy" else values(10)
    whole, whole_gradient = take(output, target, [(0, 7)])
    total, gradients = 0.0, []
    for rows in (slice(0, 5), slice(5, 8), slice(8, 8), slice(8, 10)):
        loss, gradient = take(output[:, rows], target[..., rows], [(0, 3), (3, 7)], global_rows=10)
        total += loss
        gradients.append(gradient)
    assert total == pytest.approx(whole, rel=1e-13)
    torch.testing.assert_close(torch.cat(gradients, 1), whole_gradient, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", SHARDS.values(), ids=SHARDS)
def test_logits_of_ten_thousand_do_not_overflow(dtype: torch.dtype, shards: list[Columns]) -> None:
    """Row 0: the target has 1e4 and all others less by 1e4: loss 0. Row 1: it lies 2e4 below the others."""
    output = torch.zeros(7, 2, dtype=dtype)
    output[2, 0] = 1e4
    output[:, 1] = 1e4
    output[2, 1] = -1e4
    loss, gradient = cross_entropy(output, torch.tensor([2, 2]), shards)
    ten_thousand = float(torch.tensor(1e4, dtype=dtype))
    expected = (2 * ten_thousand + math.log(6)) / 2
    assert loss == pytest.approx(expected, rel=1e-6)
    assert bool(torch.isfinite(gradient).all())
    assert gradient[:, 0].tolist() == [0.0] * 7
    assert gradient[:, 1].tolist() == pytest.approx([1 / 12, 1 / 12, -1 / 2] + [1 / 12] * 4, rel=4e-3)


@pytest.mark.parametrize("shards", [[(0, 1000)], [(0, 500), (500, 1000)]])
def test_bfloat16_sums_over_classes_in_float32(shards: list[Columns]) -> None:
    """1,000 equal logits: a bfloat16 sum of ones would stop at 256."""
    output = torch.ones(1000, 3, dtype=torch.bfloat16)
    loss, gradient = cross_entropy(output, torch.tensor([0, 7, 999]), shards)
    assert loss == pytest.approx(math.log(1000), rel=1e-6)
    assert gradient.dtype == torch.bfloat16
    assert float(gradient[1, 0]) == pytest.approx(0.001 / 3, rel=4e-3)


def test_bfloat16_squares_are_summed_in_float32() -> None:
    output, target = torch.ones(1000, 3, dtype=torch.bfloat16), torch.zeros(1000, 3, dtype=torch.bfloat16)
    loss, gradient = squared_error(output, target, [(0, 1000)])
    assert loss == pytest.approx(1.0, rel=1e-6)
    assert gradient.dtype == torch.bfloat16


def test_bfloat16_differences_are_taken_in_float32() -> None:
    """256 - 0.5 has nine bits, one more than bfloat16 keeps."""
    output, target = (torch.full((1, 1), value, dtype=torch.bfloat16) for value in (256.0, 0.5))
    loss, _ = squared_error(output, target, [(0, 1)])
    assert loss == 255.5**2


def test_one_rank_counts_what_all_shards_know() -> None:
    output, target = classes(5)
    counted, _ = cross_entropy(output, target, [(0, 7)])
    loss = make_loss("cross_entropy", output, None, target, (0, 7), 5, 7, counts=False)
    assert isinstance(loss, CrossEntropy)
    total = torch.zeros((), dtype=torch.float64)
    loss.take_maximum()
    loss.take_sums()
    loss.add_to(total)
    assert float(total) == 0 < counted


@pytest.mark.parametrize("kind", ["cross_entropy", "mse"])
def test_evaluating_adds_to_the_total_and_writes_no_gradient(kind: str) -> None:
    output, target = classes(5) if kind == "cross_entropy" else values(5)
    take = cross_entropy if kind == "cross_entropy" else squared_error
    expected, _ = take(output, target, [(0, 7)])
    kept = output.clone()
    loss = make_loss(kind, output, None, target, (0, 7), 5, 7)
    total = torch.full((), 2.0, dtype=torch.float64)
    for _ in range(2):  # buffers are made once and used again
        if isinstance(loss, CrossEntropy):
            loss.take_maximum()
            loss.take_sums()
        loss.add_to(total)
    assert float(total) == pytest.approx(2 + 2 * expected, rel=1e-13)
    assert torch.equal(output, kept)


def test_right_rows_are_counted() -> None:
    output = torch.tensor([[1.0, 0.0, 5.0], [0.0, 2.0, 4.0]])
    assert int(count_correct(output, torch.tensor([0, 1, 1]))) == 2
    assert int(count_correct(torch.empty(2, 0), torch.empty(0, dtype=torch.int64))) == 0


def test_an_unknown_loss_is_refused() -> None:
    output = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"^trainer\.loss=hinge is unknown; valid are cross_entropy, mse$"):
        make_loss("hinge", output, None, output, (0, 2), 1, 2)


def test_the_kinds() -> None:
    output = torch.zeros(2, 1)
    assert isinstance(make_loss("mse", output, None, output, (0, 2), 1, 2), MeanSquaredError)
