"""The order of samples, the loader, and the data sets that need no files."""

import gc
import math
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from trainer.config import DataConfig, InputError
from trainer.data import (
    Batch,
    Dataset,
    DataSpec,
    TrainLoader,
    describe,
    epoch_order,
    eval_batches,
    load_dataset,
    steps_per_epoch,
)
from trainer.dataset import Column

M64 = 2**64 - 1


def philox(seed: int, stream: int, block: int, count: int) -> list[int]:
    """Philox-4x64-10 from its paper, in Python's whole numbers; numpy counts blocks from 1."""
    words: list[int] = []
    while len(words) < count:
        block += 1
        c = [(block >> (64 * i)) & M64 for i in range(4)]
        k = [seed, stream]
        for _ in range(10):
            first, second = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
            c = [(second >> 64) ^ c[1] ^ k[0], second & M64, (first >> 64) ^ c[3] ^ k[1], first & M64]
            k = [(k[0] + 0x9E3779B97F4A7C15) & M64, (k[1] + 0xBB67AE8584CAA73B) & M64]
        words += c
    return words[:count]


def order_by_hand(rows: int, seed: int, epoch: int) -> list[int]:
    """Rows sorted by random keys whose low bits are the row number."""
    low = (1 << (rows - 1).bit_length()) - 1
    keys = [(word & ~low) | row for row, word in enumerate(philox(seed, 0, epoch << 128, rows))]
    return [key & low for key in sorted(keys)]


def cut(world: int, rank: int) -> Callable[[int], tuple[int, int]]:
    """Rank's part of some rows, cut as evenly as possible, larger parts first."""

    def slice_of(rows: int) -> tuple[int, int]:
        sizes = [rows // world + (r < rows % world) for r in range(world)]
        return sum(sizes[:rank]), sum(sizes[: rank + 1])

    return slice_of


def numbered(rows: int, eval_rows: int = 0, shape: tuple[int, ...] = (2,), dtype: str = "f4") -> Dataset:
    """Row i holds only i, and is of class i; held-out rows count on from there."""
    total = rows + eval_rows
    inputs = np.empty((total, *shape), dtype)
    inputs[:] = np.arange(total).reshape(-1, *[1] * len(shape))
    labels = np.arange(total)
    spec = DataSpec(shape, total, "classification", rows, eval_rows)
    return Dataset(spec, inputs[:rows], labels[:rows], inputs[rows:], labels[rows:])


def loader(dataset: Dataset, **options: Any) -> TrainLoader:
    usual = {
        "batch_size": 10,
        "drop_last": False,
        "seed": 3,
        "slice_of": cut(1, 0),
        "want_inputs": True,
        "want_targets": True,
        "dtype": torch.float32,
        "prefetch": 0,
    }
    return TrainLoader(dataset, **(usual | options))


def take(batches: TrainLoader, steps: int) -> list[Batch]:
    """The next batches, with copies of their tensors; the loader is closed."""
    taken = []
    for _ in range(steps):
        batch = next(batches)
        for name in ("inputs", "targets"):
            tensor = getattr(batch, name)
            setattr(batch, name, None if tensor is None else tensor.clone())
        taken.append(batch)
    batches.close()
    return taken


def test_the_reference_generator_gives_the_published_words() -> None:
    """Counter 0, key 0, from the known answers that come with the paper's code."""
    assert philox(0, 0, -1, 4) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("rows", [1, 2, 5, 64, 65, 1437])
def test_order_is_the_documented_permutation(rows: int) -> None:
    for seed, epoch in ((0, 0), (0, 1), (7, 2)):
        order = epoch_order(rows, seed, epoch)
        assert order.dtype == np.int64
        assert order.tolist() == order_by_hand(rows, seed, epoch)
        assert sorted(order.tolist()) == list(range(rows))
    assert epoch_order(0, 0, 0).shape == (0,)


def test_order_changes_with_seed_and_epoch_and_is_fair() -> None:
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in range(5) for epoch in range(5)]
    assert len(set(orders)) == 25
    firsts = np.bincount([epoch_order(4, 0, epoch)[0] for epoch in range(4000)], minlength=4)
    assert np.all(abs(firsts - 1000) < 5 * math.sqrt(4000 * 0.25 * 0.75))


def test_steps_per_epoch() -> None:
    cases = [(23, 10, False), (23, 10, True), (20, 10, False), (20, 10, True), (3, 10, False), (3, 10, True)]
    assert [steps_per_epoch(*case) for case in cases] == [3, 2, 2, 2, 1, 0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_slices_put_together_are_the_global_order(world: int, drop_last: bool) -> None:
    """23 rows in batches of 10: the last batch has 3 rows, so that rank 3 of 4 gets none."""
    dataset, steps = numbered(23), 7
    ranks = [take(loader(dataset, slice_of=cut(world, r), drop_last=drop_last), steps) for r in range(world)]
    sizes = [10, 10] if drop_last else [10, 10, 3]
    expected = []
    for epoch in range(4):
        order = order_by_hand(23, 3, epoch)
        expected += [(epoch, order[10 * i : 10 * i + size]) for i, size in enumerate(sizes)]
    for step in range(steps):
        epoch, rows = expected[step]
        batches = [rank[step] for rank in ranks]
        assert [(b.step, b.epoch, b.rows) for b in batches] == [(step, epoch, len(rows))] * world
        assert [b.start for b in batches] + [len(rows)] == [0] + [b.stop for b in batches]
        for batch in batches:
            assert batch.inputs is not None and batch.inputs.shape == (batch.stop - batch.start, 2)
        assert torch.cat([b.targets for b in batches]).tolist() == rows
        assert torch.cat([b.inputs for b in batches]).tolist() == [[row, row] for row in rows]


def test_a_loader_started_later_goes_on_where_the_first_would_be() -> None:
    whole = take(loader(numbered(23)), 9)
    for prefetch in (0, 2):
        late = take(loader(numbered(23), start_step=5, prefetch=prefetch), 4)
        for a, b in zip(whole[5:], late, strict=True):
            assert (a.step, a.epoch, a.rows) == (b.step, b.epoch, b.rows)
            assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_reading_ahead_changes_nothing(prefetch: int, dtype: torch.dtype) -> None:
    dataset = numbered(37, shape=(3, 5))
    ahead = take(loader(dataset, prefetch=prefetch, dtype=dtype), 12)
    for a, b in zip(take(loader(dataset, dtype=dtype), 12), ahead, strict=True):
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
        assert b.inputs.dtype == dtype and b.inputs.shape[1:] == (3, 5) and b.targets.dtype == torch.int64


@pytest.mark.parametrize("source", ["f2", "f4", "f8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_values_are_converted_as_torch_would(source: str, dtype: torch.dtype) -> None:
    values = (np.arange(6000).reshape(6, 1000) / 7 - 300).astype(source)
    spec = DataSpec((1000,), 1000, "regression", 6, 0)
    dataset = Dataset(spec, values, values[::-1].copy(), values[:0], values[:0])
    batch = take(loader(dataset, batch_size=6, dtype=dtype), 1)[0]
    order = epoch_order(6, 3, 0)
    assert torch.equal(batch.inputs, torch.from_numpy(values[order]).to(dtype))
    assert torch.equal(batch.targets, torch.from_numpy(values[::-1][order]).to(dtype))


def test_only_what_is_wanted_is_loaded() -> None:
    for inputs, targets in ((True, False), (False, True), (False, False)):
        batch = take(loader(numbered(23), want_inputs=inputs, want_targets=targets, prefetch=2), 3)[2]
        assert (batch.inputs is not None, batch.targets is not None) == (inputs, targets)
        assert (batch.step, batch.rows, batch.stop) == (2, 3, 3)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_step_allocates_and_buffers_go_round(prefetch: int, dtype: torch.dtype) -> None:
    """With prefetch 0 everything happens in the profiled thread; each slice size has its own view."""
    batches = loader(numbered(23, shape=(40,)), prefetch=prefetch, dtype=dtype)
    for _ in range(3):
        next(batches)

    def allocations(work: Callable[[], object]) -> int:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as p:
            work()
        assert p.profiler is not None
        return sum(e.name() == "[memory]" for e in p.profiler.kineto_results.events())

    assert allocations(lambda: torch.empty(100)) > 0
    assert allocations(lambda: [next(batches) for _ in range(20)]) == 0
    seen = [next(batches) for _ in range(30)]
    for name in ("inputs", "targets"):
        tensors = [getattr(batch, name) for batch in seen]
        assert len({t.data_ptr() for t in tensors}) == prefetch + 1
        assert len({id(t) for t in tensors}) <= 2 * (prefetch + 1)
    batches.close()


def test_a_batch_keeps_its_values_until_the_next() -> None:
    batches = loader(numbered(23), prefetch=3)
    for _ in range(20):
        batch = next(batches)
        before = batch.inputs.clone()
        time.sleep(0.002)
        assert torch.equal(batch.inputs, before)
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_buffer_waits_for_the_copies_made_from_it(prefetch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With page-locked buffers, a mark is set on the stream at `next()` and waited for before refilling."""

    class Event:
        def __init__(self) -> None:
            self.calls: list[str] = []
            events.append(self)

        def record(self) -> None:
            self.calls.append("record")

        def synchronize(self) -> None:
            self.calls.append("wait")

    events: list[Event] = []
    views = Column.views
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(Column, "views", lambda column, sizes, pin_memory: views(column, sizes, False))
    take(loader(numbered(23), prefetch=prefetch, pin_memory=True), 10)
    assert len(events) == prefetch + 1
    for event in events:
        calls = event.calls[prefetch == 0 :]  # in line, a mark is set before there is anything to wait for
        assert len(calls) >= 5 and calls == (["wait", "record"] * len(calls))[: len(calls)]


def test_held_out_rows_come_once_in_their_own_order() -> None:
    dataset = numbered(5, eval_rows=7)
    options: dict[str, Any] = {
        "batch_size": 4,
        "want_inputs": True,
        "want_targets": True,
        "dtype": torch.float64,
    }
    for world in (1, 2, 3):
        ranks = [
            [
                (b.step, b.epoch, b.rows, b.inputs[:, 1].tolist(), b.targets.tolist())
                for b in eval_batches(dataset, slice_of=cut(world, rank), **options)
            ]
            for rank in range(world)
        ]
        for step, rows in enumerate(([5, 6, 7, 8], [9, 10, 11])):
            assert all(r[step][:3] == (step, 0, len(rows)) for r in ranks)
            assert [value for r in ranks for value in r[step][3]] == rows
            assert [value for r in ranks for value in r[step][4]] == rows
        assert all(len(r) == 2 for r in ranks)
    assert list(eval_batches(numbered(5), slice_of=cut(1, 0), **options)) == []


def loader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "train-loader"]


def test_the_thread_ends_by_close_and_by_neglect() -> None:
    batches = loader(numbered(23), prefetch=2)
    next(batches)
    assert [t.daemon for t in loader_threads()] == [True]
    batches.close()
    batches.close()
    assert loader_threads() == []
    with pytest.raises(StopIteration):
        next(batches)
    batches = loader(numbered(23), prefetch=2)
    next(batches)
    del batches
    gc.collect()
    deadline = time.monotonic() + 30
    while loader_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert loader_threads() == []


def test_an_open_loader_does_not_hold_the_interpreter() -> None:
    code = (
        "import numpy as np, torch\n"
        "from trainer.data import Dataset, DataSpec, TrainLoader\n"
        "x = np.zeros((64, 4), np.float32); y = np.zeros(64, np.int64)\n"
        "d = Dataset(DataSpec((4,), 1, 'classification', 64, 0), x, y, x[:0], y[:0])\n"
        "loader = TrainLoader(d, batch_size=8, drop_last=False, seed=0, slice_of=lambda r: (0, r),\n"
        "    want_inputs=True, want_targets=True, dtype=torch.float32, prefetch=4)\n"
        "print(next(loader).rows)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "8", "")


def broken(values: dict[tuple[int, ...], float], shape: tuple[int, ...], dtype: str = "f4") -> Dataset:
    dataset = numbered(23, shape=shape, dtype=dtype)
    for index, value in values.items():
        dataset.train_inputs[index] = value
    return dataset


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    ("dataset", "dtype", "words"),
    [
        (
            broken({(7, 1): math.nan}, (2,)),
            torch.float32,
            "train_inputs: row 7, column 1 is nan; every value",
        ),
        (broken({(7, 1): -math.inf}, (2,)), torch.float64, "row 7, column 1 is -inf; every value"),
        (broken({(7, 1): math.nan}, (2,)), torch.bfloat16, "row 7, column 1 is nan; every value"),
        (broken({(22, 2, 3): math.nan}, (3, 5)), torch.float32, "row 22, column (2, 3) is nan"),
        (
            broken({(7, 0): 1e300}, (2,), "f8"),
            torch.float32,
            "row 7, column 0 is 1e+300; trainer.dtype=float32",
        ),
        (broken({(7, 0): 3.4e38}, (2,)), torch.bfloat16, "is 3.4e+38; trainer.dtype=bfloat16"),
    ],
)
def test_what_is_no_number_is_named(dataset: Dataset, dtype: torch.dtype, words: str, prefetch: int) -> None:
    batches = loader(dataset, dtype=dtype, prefetch=prefetch)
    for _ in range(2):
        with pytest.raises(InputError) as caught:
            for _ in range(3):
                next(batches)
        assert words in str(caught.value)
    batches.close()


def test_large_sums_are_no_error() -> None:
    """The sum of a batch overflows float32, no value does."""
    dataset = numbered(23)
    dataset.train_inputs[:, 0] = 3e38
    assert take(loader(dataset), 1)[0].inputs[:, 0].tolist() == [float(np.float32(3e38))] * 10


def test_labels_that_change_after_the_scan_are_named() -> None:
    for label in (23, -1):
        dataset = numbered(23)
        dataset.train_targets[11] = label
        with pytest.raises(InputError, match=f"train_targets: row 11 is {label}; labels must be 0 to 22"):
            take(loader(dataset), 3)


def test_digits_are_standardised_and_split_the_documented_way() -> None:
    sklearn_datasets = pytest.importorskip("sklearn.datasets")
    dataset = load_dataset(DataConfig(), seed=5, hidden_dim=8)
    assert dataset.spec == DataSpec((64,), 10, "classification", 1437, 360)
    assert dataset.spec == describe(DataConfig(), seed=0, hidden_dim=8)
    pixels, labels = sklearn_datasets.load_digits(return_X_y=True)
    order = order_by_hand(1797, 0, 0)
    train = pixels[order[:1437]] / 16
    for rows, inputs, targets in (
        (order[:1437], dataset.train_inputs, dataset.train_targets),
        (order[1437:], dataset.eval_inputs, dataset.eval_targets),
    ):
        assert targets.dtype == np.int64 and targets.tolist() == labels[rows].tolist()
        for pixel in range(64):
            mean = math.fsum(train[:, pixel]) / 1437
            std = math.sqrt(math.fsum((train[:, pixel] - mean) ** 2) / 1437)
            expected = (pixels[rows, pixel] / 16 - mean) / max(std, 0.1)
            np.testing.assert_allclose(inputs[:, pixel], expected, rtol=1e-6, atol=1e-6)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install scikit-learn.*`data` extra"):
        load_dataset(DataConfig(), seed=0, hidden_dim=8)


def synthetic(seed: int = 4, hidden_dim: int = 20, **options: Any) -> Dataset:
    config = DataConfig(name="synthetic", **({"task": "regression", "batch_size": 8} | options))
    return load_dataset(config, seed=seed, hidden_dim=hidden_dim)


def test_a_synthetic_row_depends_on_seed_and_number_alone() -> None:
    small = synthetic(num_samples=10, eval_samples=4)
    large = synthetic(num_samples=1500, eval_samples=1100, batch_size=3)
    assert np.array_equal(small.train_inputs, large.train_inputs[:10])
    assert np.array_equal(small.train_targets, large.train_targets[:10])
    assert np.array_equal(small.eval_inputs, large.eval_inputs[:4])
    assert np.array_equal(small.eval_targets, large.eval_targets[:4])
    rows = np.concatenate([large.train_inputs, large.eval_inputs])
    assert len(np.unique(rows, axis=0)) == 2600
    assert not np.array_equal(small.train_inputs, synthetic(seed=5, num_samples=10).train_inputs)


def sixteens(words: list[int]) -> list[int]:
    """The 16-bit numbers in each word, low end first, as signed numbers around zero."""
    return [((word >> shift) & 0xFFFF) - 32768 for word in words for shift in (0, 16, 32, 48)]


def test_the_teacher_is_the_documented_network() -> None:
    """Inputs and weights from Philox by hand, the network by exact sums, row by row."""
    dim, seed = 5, 4  # one row takes one block of 16 numbers
    dataset = synthetic(seed=seed, hidden_dim=dim, num_samples=6, eval_samples=2, batch_size=4)
    labels = synthetic(
        seed=seed, hidden_dim=dim, num_samples=6, eval_samples=2, batch_size=4, task="classification"
    )
    step = math.sqrt(3 / dim) / 32768
    weights = []
    for layer in (0, 1):
        numbers = sixteens(philox(seed, 2, layer << 128, 8))[: dim * dim]
        weights.append([round(n * step * 65536) / 65536 for n in numbers])
    for first, inputs, targets, classes in (
        (0, dataset.train_inputs, dataset.train_targets, labels.train_targets),
        (2**40, dataset.eval_inputs, dataset.eval_targets, labels.eval_targets),
    ):
        for i in range(len(inputs)):
            x = [n / 16384 for n in sixteens(philox(seed, 1, first + i, 4))[:dim]]
            assert inputs[i].tolist() == x
            hidden = [
                math.tanh(math.fsum(x[j] * weights[0][j * dim + k] for j in range(dim))) for k in range(dim)
            ]
            output = [math.fsum(hidden[j] * weights[1][j * dim + k] for j in range(dim)) for k in range(dim)]
            np.testing.assert_allclose(targets[i], output, rtol=0, atol=5e-6)
            assert classes[i] == output.index(max(output))
    assert dataset.spec == DataSpec((5,), 5, "regression", 6, 2)
    assert labels.spec == DataSpec((5,), 5, "classification", 6, 2)
    assert labels.train_targets.dtype == np.int64


def test_synthetic_numbers_have_the_stated_spread() -> None:
    plain = synthetic(dim=33, num_samples=4000)
    noisy = synthetic(dim=33, num_samples=4000, noise=0.5)
    assert plain.spec.input_shape == (33,)
    assert np.array_equal(plain.train_inputs, noisy.train_inputs)
    assert abs(plain.train_inputs.mean()) < 0.02 and abs(plain.train_inputs.var() - 4 / 3) < 0.02
    assert plain.train_inputs.min() >= -2 and plain.train_inputs.max() < 2
    noise = (noisy.train_targets - plain.train_targets) / 0.5
    assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.01
    assert abs((noise**4).mean() / 3 - 1) < 0.05  # a normal distribution's fourth moment is 3
    assert abs(np.corrcoef(noise[:, :-1].ravel(), noise[:, 1:].ravel())[0, 1]) < 0.02
    assert np.array_equal(
        noisy.train_targets[:7], synthetic(dim=33, num_samples=7, batch_size=7, noise=0.5).train_targets
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "mnist"}, "data=mnist is unknown; give one of digits, synthetic, arrays"),
        ({"task": "ranking"}, "data.task=ranking is unknown; give one of classification, regression"),
        ({"task": "regression"}, "data.task=regression does not fit data=digits"),
        ({"prefetch": -1}, "data.prefetch=-1 is no number of batches"),
        ({"batch_size": 0}, "data.batch_size=0 is no number of rows; it must be at least 1"),
        (
            {"batch_size": 1438, "drop_last": True},
            "data.batch_size=1438 with data.drop_last=true leaves no step of 1437 training rows; "
            "it must be at most 1437",
        ),
        ({"inputs": "x.npy"}, "data.inputs=x.npy is not read by data=digits; set data=arrays"),
        ({"name": "synthetic", "num_samples": 0}, "data.num_samples=0 is out of range"),
        ({"name": "synthetic", "eval_samples": -1}, "data.eval_samples=-1 is out of range"),
        ({"name": "synthetic", "dim": 0}, "data.dim=0 is out of range"),
        ({"name": "synthetic", "noise": math.nan}, "data.noise=nan is out of range"),
        ({"name": "arrays"}, "data.inputs=null is not set; data=arrays needs an .npy or .npz file"),
    ],
)
def test_wrong_settings_are_one_sentence(options: dict[str, Any], words: str) -> None:
    for function in (load_dataset, describe):
        with pytest.raises(InputError) as caught:
            function(DataConfig(**options), seed=0, hidden_dim=8)
        assert words in str(caught.value) and "\n" not in str(caught.value)
