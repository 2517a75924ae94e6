"""Batches of the order of samples, read ahead by a thread into buffers that are made once.

A rank's slice of a global batch is handed in as a function, so no split of the work can change what is
learned from, or when.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np
import torch

from trainer.dataset import Column, Dataset, View
from trainer.order import epoch_order, require_steps, steps_per_epoch

SliceOf = Callable[[int], tuple[int, int]]

_JOIN_S = 1.0  # longest wait for the thread when the interpreter ends


@dataclass
class Batch:
    """A rank's part of one global batch; its tensors are valid until the loader's next `next()`."""

    step: int  # from 0, over the whole run
    epoch: int
    rows: int  # of the global batch
    start: int  # this rank's rows are start .. stop - 1 of the batch
    stop: int
    inputs: torch.Tensor | None  # [stop - start, *input_shape]; None if not wanted
    targets: torch.Tensor | None  # int64 [stop - start], or [stop - start, output_dim]


@dataclass
class _Slot:
    """One set of buffers; `event` ends when a GPU has read what they held before."""

    inputs: dict[int, View] | None
    targets: dict[int, View] | None
    event: torch.cuda.Event | None


@dataclass
class _Filler:
    """Makes the batch of any step, as a pure function of the step, in the buffers of a slot."""

    inputs: Column | None
    targets: Column | None
    total: int
    batch_size: int
    steps: int  # per epoch
    slices: dict[int, tuple[int, int]]  # by rows of the global batch
    order_of: Callable[[int], np.ndarray]
    order: tuple[int, np.ndarray] = field(default=(-1, np.empty(0, np.int64)))

    def slot(self, pin_memory: bool) -> _Slot:
        sizes = {stop - start for start, stop in self.slices.values()}
        inputs, targets = (c.views(sizes, pin_memory) if c else None for c in (self.inputs, self.targets))
        return _Slot(inputs, targets, torch.cuda.Event() if pin_memory else None)

    def fill(self, slot: _Slot, step: int) -> Batch:
        epoch, within = divmod(step, self.steps)
        first = within * self.batch_size
        rows = min(self.batch_size, self.total - first)
        start, stop = self.slices[rows]
        batch = Batch(step, epoch, rows, start, stop, None, None)
        if self.inputs is None and self.targets is None:
            return batch
        if self.order[0] != epoch:
            self.order = epoch, self.order_of(epoch)
        index = self.order[1][first + start : first + stop]
        if slot.event is not None:
            slot.event.synchronize()
        if self.inputs is not None and slot.inputs is not None:
            batch.inputs = self.inputs.fill(slot.inputs[stop - start], index)
        if self.targets is not None and slot.targets is not None:
            batch.targets = self.targets.fill(slot.targets[stop - start], index)
        return batch


def _make_filler(
    dataset: Dataset,
    part: str,
    *,
    batch_size: int,
    drop_last: bool,
    slice_of: SliceOf,
    want: tuple[bool, bool],
    dtype: torch.dtype,
    order_of: Callable[[int], np.ndarray],
) -> _Filler:
    inputs, targets = getattr(dataset, f"{part}_inputs"), getattr(dataset, f"{part}_targets")
    total = len(inputs)
    steps = steps_per_epoch(total, batch_size, drop_last)
    sizes = {min(batch_size, total - step * batch_size) for step in (0, steps - 1)}
    slices = {rows: slice_of(rows) for rows in sizes}
    for rows, (start, stop) in slices.items():
        assert 0 <= start <= stop <= rows, f"slice {start}:{stop} is not within a batch of {rows} rows"
    most = max(stop - start for start, stop in slices.values())
    classes = dataset.spec.output_dim if dataset.spec.task == "classification" else None
    columns = [
        Column(array, dataset.name_of(f"{part}_{kind}"), dtype, limit, most) if wanted else None
        for kind, array, limit, wanted in zip(
            ("inputs", "targets"), (inputs, targets), (None, classes), want, strict=True
        )
    ]
    return _Filler(columns[0], columns[1], total, batch_size, steps, slices, order_of)


Filled = tuple[_Slot, Batch] | BaseException | None


def _read_ahead(
    filler: _Filler,
    step: int,
    free: SimpleQueue[_Slot | None],
    ready: SimpleQueue[Filled],
    stop: threading.Event,
) -> None:
    """The thread: fill each free slot in turn, until told to stop or something goes wrong."""
    try:
        while (slot := free.get()) is not None and not stop.is_set():
            ready.put((slot, filler.fill(slot, step)))
            step += 1
    except BaseException as error:  # raised again in the consumer's next()
        ready.put(error)
    ready.put(None)


def _stop(
    thread: threading.Thread, free: SimpleQueue[_Slot | None], stop: threading.Event, timeout_s: float | None
) -> None:
    stop.set()
    free.put(None)
    if thread is not threading.current_thread():  # garbage may be collected in any thread
        thread.join(timeout_s)


class TrainLoader:
    """Iterator of this rank's batches, endless over epochs, from step `start_step` on.

    `slice_of(rows)` gives (start, stop), this rank's rows of a global batch of `rows`, maybe none.
    `prefetch` batches are read ahead by a daemon thread (0: in `next()` itself). The tensors lie in
    prefetch + 1 sets of buffers made at the start, and are valid until the next `next()`; with
    `pin_memory`, copies to a GPU that the current stream was given by then are waited for before a
    buffer is written again. `next()` raises InputError for a NaN, infinity or label out of range.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        drop_last: bool,
        seed: int,
        slice_of: SliceOf,
        want_inputs: bool,
        want_targets: bool,
        dtype: torch.dtype,
        prefetch: int,
        pin_memory: bool = False,
        start_step: int = 0,
    ) -> None:
        total = len(dataset.train_inputs)
        require_steps(total, batch_size, drop_last)
        self._filler = _make_filler(
            dataset,
            "train",
            batch_size=batch_size,
            drop_last=drop_last,
            slice_of=slice_of,
            want=(want_inputs, want_targets),
            dtype=dtype,
            order_of=lambda epoch: epoch_order(total, seed, epoch),
        )
        self._step = start_step
        self._error: BaseException | None = None
        self._closed = False
        self._close: weakref.finalize | None = None
        if prefetch == 0 or not (want_inputs or want_targets):
            self._held: _Slot | None = self._filler.slot(pin_memory)
            return
        self._held = None
        self._free: SimpleQueue[_Slot | None] = SimpleQueue()
        self._ready: SimpleQueue[Filled] = SimpleQueue()
        for _ in range(prefetch + 1):
            self._free.put(self._filler.slot(pin_memory))
        stop = threading.Event()
        # The thread must not hold the loader: dropping the loader, or leaving the interpreter, ends it.
        thread = threading.Thread(
            target=_read_ahead,
            args=(self._filler, start_step, self._free, self._ready, stop),
            name="train-loader",
            daemon=True,
        )
        thread.start()
        self._thread, self._stop = thread, stop
        self._close = weakref.finalize(self, _stop, thread, self._free, stop, _JOIN_S)

    def __iter__(self) -> TrainLoader:
        return self

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise StopIteration
        if self._held is not None and self._held.event is not None:
            self._held.event.record()
        if self._close is None:
            assert self._held is not None
            batch = self._filler.fill(self._held, self._step)
            self._step += 1
            return batch
        if self._held is not None:
            self._free.put(self._held)
            self._held = None
        filled = self._ready.get()
        if filled is None:
            raise StopIteration
        if isinstance(filled, BaseException):
            self._error = filled
            raise filled
        self._held, batch = filled
        return batch

    def close(self) -> None:
        """End the thread and wait for it. Further `next()` stop the iteration; closing twice is no error."""
        self._closed = True
        if self._close is not None and self._close.detach() is not None:
            _stop(self._thread, self._free, self._stop, None)


def eval_batches(
    dataset: Dataset,
    *,
    batch_size: int,
    slice_of: SliceOf,
    want_inputs: bool,
    want_targets: bool,
    dtype: torch.dtype,
) -> Iterator[Batch]:
    """The held-out rows once, in their own order; `step` counts batches, `epoch` is 0.

    A batch's tensors are valid until the next one. Nothing is yielded when nothing is held out.
    """
    total = len(dataset.eval_inputs)
    if total == 0:
        return
    filler = _make_filler(
        dataset,
        "eval",
        batch_size=batch_size,
        drop_last=False,
        slice_of=slice_of,
        want=(want_inputs, want_targets),
        dtype=dtype,
        order_of=lambda epoch: np.arange(total),
    )
    slot = filler.slot(pin_memory=False)
    for step in range(filler.steps):
        yield filler.fill(slot, step)
