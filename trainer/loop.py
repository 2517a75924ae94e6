"""The training loop: load, run the schedule, exchange a few numbers, write a row."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from collectives.group import World
from collectives.link import LinkCurve
from trainer.config import RunConfig, TrainingStopped
from trainer.control import Control, Gathered, gather_numbers, sum_over_ranks
from trainer.data import Batch, Dataset, TrainLoader, eval_batches
from trainer.executor import Rank
from trainer.history import History
from trainer.meter import Meter, StepInfo, peak_memory_bytes
from trainer.optimizer import learning_rate
from trainer.plan import Plan
from trainer.profiling import Profiler
from trainer.recorder import Recorder
from trainer.rows import Rows
from trainer.timeline import Timeline

Row = dict[str, Any]
CURES = "lower optimizer.lr, set trainer.clip_grad_norm, or look at the data"


class StopRequest(Protocol):
    """Polled once a step; `requested` is the number of the signal that asked, or 0."""

    @property
    def requested(self) -> int: ...


class Loop:
    """Trains on one rank. Rank 0 gets every row through `on_row`, a batch of steps at a time.

    `on_verdict` is called on all ranks every `trainer.verdict_every` steps.

    After `run`, `stopped_by` is the signal that ended training early (0: none), and `steps_of` counts
    the steps that ran by their global rows.
    """

    def __init__(
        self,
        plan: Plan,
        world: World,
        rank: Rank,
        dataset: Dataset,
        stop: StopRequest,
        on_row: Callable[[Row], None],
        link: LinkCurve | None = None,
        on_verdict: Callable[[Loop], None] | None = None,
    ) -> None:
        self.plan, self.world, self.rank, self.dataset = plan, world, rank, dataset
        self.config: RunConfig = plan.config
        self.stop = stop
        self.on_verdict = on_verdict if plan.config.trainer.verdict_every else None
        self.control = Control(world)
        self._timelines: dict[int, Timeline] = {}
        own = self.config.trainer
        self.recorder = Recorder(world, rank, own.wire_every, own.max_steps - 1, self.timeline)
        self.history = History(plan.batch_rows[0] if plan.batch_rows else 0, own.warmup_steps)
        self.rows = Rows(Meter(plan), self.timeline, link, self.history, on_row)
        self.profiler = Profiler(self.config, world.rank)
        self.stopped_by = 0
        self.samples_seen = 0
        self.last: StepInfo | None = None
        self.steps_of: dict[int, int] = {}
        self._sent, self._between = 0, 0.0
        self._pending: StepInfo | None = None  # the step whose row is still under way

    def run(self) -> None:
        """Train for `trainer.max_steps` steps, or until a signal.

        Raises:
            TrainingStopped: the loss or the parameters of a rank went wrong; all ranks raise alike.
        """
        config = self.config.trainer
        loader = self.loader()
        try:
            with torch.no_grad(), self.profiler:
                for _ in self.steps(loader, config.max_steps):
                    pass
        finally:
            loader.close()
            self.rows.close()

    def timeline(self, rows: int) -> Timeline:
        """How the stamps of steps on batches of `rows` are read."""
        if rows not in self._timelines:
            schedules = self.plan.schedules(rows)
            self._timelines[rows] = Timeline(schedules, self.rank.norm_crosses, self.plan.is_pipeline)
        return self._timelines[rows]

    def steps(self, loader: TrainLoader, max_steps: int) -> Iterator[int]:
        """Run the steps one by one; yields after each, and ends what is under way after the last."""
        config = self.config.trainer
        bad_score = ""
        mark = time.perf_counter()
        for step in range(max_steps):
            asked = time.perf_counter()
            batch = next(loader)
            taken = time.perf_counter()
            self.recorder.begin(step)
            info = self._train(step, batch)
            program = self.rank.program(info.rows)
            self.rank.stopwatch.wait(program.marks)
            now = time.perf_counter()
            self.recorder.record(step, info.rows, (mark, asked, taken), program, now)
            gathered = self.control.exchange(step, self._numbers(info, now - mark))
            mark = now
            if gathered is not None and self._settle(gathered):
                break
            self._pending = info
            if config.checksum_every and (step + 1) % config.checksum_every == 0:
                self._compare_replicas(step)
                mark = time.perf_counter()
            if step + 1 == max_steps or (config.eval_every and (step + 1) % config.eval_every == 0):
                bad_score = self._score(step)
                mark = time.perf_counter()
                if bad_score:
                    break
            if self.on_verdict and (step + 1) % config.verdict_every == 0 and step + 1 < max_steps:
                self._exchange_stamps()
                self._exchange_stamps()
                self.on_verdict(self)
                sum_over_ranks(self.world, [0.0])  # the others' next step is not to wait for the judge
                mark = time.perf_counter()
            yield step
        self._pending = self.last
        if (gathered := self.control.complete()) is not None:
            self._settle(gathered)
        self._exchange_stamps()
        self._exchange_stamps()
        if bad_score:
            raise TrainingStopped(bad_score)

    def _score(self, step: int) -> str:
        """Evaluate; what is wrong with the result, the same on all ranks."""
        before = self.recorder.wire()
        loss, accuracy = self.evaluate()
        self.rows.score(step, (loss, accuracy))
        self.recorder.skip_wire(before)
        if loss is None or math.isfinite(loss):
            return ""
        return f"loss of the held-out rows is {loss} after step {step}; all ranks stopped ({CURES})"

    def _exchange_stamps(self) -> None:
        """Take in the batch of stamps under way, and send the next; all ranks at the same step."""
        self.rows.stamped(self.recorder.receive())
        self.recorder.send()

    def _train(self, step: int, batch: Batch) -> StepInfo:
        rank, config = self.rank, self.config
        rate = learning_rate(step, config.trainer.max_steps, config.optimizer.lr, config.lr_schedule)
        program = rank.program(batch.rows)
        rank.set_learning_rate(rate)
        rank.loss_total.zero_()
        before, between = rank.ledger.total_bytes, rank.ledger.between_bytes
        program.load(batch.inputs, batch.targets)
        program.run(step)
        if self.profiler.running:
            # A message in flight while torch.profiler stops crashes the process (seen with torch 2.13).
            self.control.land()
            self.recorder.land()
        self.profiler.step()
        self.samples_seen += batch.rows
        self.steps_of[batch.rows] = self.steps_of.get(batch.rows, 0) + 1
        self._sent = rank.ledger.total_bytes - before
        self._between = rank.ledger.between_bytes - between
        self.last = StepInfo(step, batch.epoch, batch.rows, self.samples_seen, rate)
        return self.last

    def _numbers(self, info: StepInfo, step_time_s: float) -> tuple[float, ...]:
        """This rank's `control.FIELDS`."""
        rank = self.rank
        share, norm = float(rank.loss_total), float(rank.gradient_norm)
        is_bad = not math.isfinite(share) or (self.plan.task.clips and not math.isfinite(norm))
        return (
            step_time_s,
            share,
            norm,
            float(is_bad),
            float(self.stop.requested),
            self._sent,
            self._between,
            rank.program(info.rows).bytes_least,
            self.control.sent_bytes + rank.control_bytes + self.recorder.take_sent_bytes(),
            peak_memory_bytes(rank.device),
        )

    def _settle(self, gathered: Gathered) -> bool:
        """Take in the step's numbers; whether all ranks stop here."""
        if self.world.rank == 0:
            assert self._pending is not None and self._pending.step == gathered.step
            self.rows.add(self._pending, gathered)
        if self.recorder.is_due(max(gathered["step_time_s"])):
            self._exchange_stamps()
        bad = gathered["is_bad"]
        if any(bad):
            self.control.complete()
            self._exchange_stamps()
            self._exchange_stamps()
            first = bad.index(max(bad))
            loss, norm = sum(gathered["loss_share"]), gathered["gradient_norm"][first]
            what = f"gradient norm is {norm}" if math.isfinite(loss) else f"loss is {loss}"
            raise TrainingStopped(
                f"{what} at step {gathered.step}, first on rank {first}; all ranks stopped ({CURES})"
            )
        self.stopped_by = self.stopped_by or int(max(gathered["stop_signal"]))
        return bool(self.stopped_by)

    def evaluate(self) -> tuple[float | None, float | None]:
        """Mean loss and share of right classes (None for regression) over the held-out rows."""
        rows = self.plan.data.eval_rows
        if rows == 0:
            return None, None
        rank, world, strategy = self.rank, self.world, self.plan.strategy
        wants = strategy.takes(world.size, world.rank)
        loss = 0.0
        rank.correct_total.zero_()
        batches = eval_batches(
            self.dataset,
            batch_size=self.config.data.batch_size,
            slice_of=lambda count: strategy.rows_of(world.size, world.rank, count),
            want_inputs=wants[0],
            want_targets=wants[1],
            dtype=rank.dtype,
        )
        for batch in batches:
            program = rank.program(batch.rows, training=False)
            rank.loss_total.zero_()
            program.load(batch.inputs, batch.targets)
            program.run(batch.step)
            loss += float(rank.loss_total) * batch.rows / rows
        loss, correct = sum_over_ranks(world, [loss, float(rank.correct_total)])
        return loss, correct / rows if self.plan.task.loss == "cross_entropy" else None

    def _compare_replicas(self, step: int) -> None:
        """Ranks that hold the same parameters must hold the same bits."""
        if self.plan.strategy.replica_group(self.world.size) is None:
            return
        flat = self.rank.parameters.detach().cpu()
        own = zlib.crc32(flat.view(torch.uint8).numpy().data)
        sums = gather_numbers(self.world, own)
        different = [rank for rank, value in enumerate(sums) if value != sums[0]]
        if different:
            raise TrainingStopped(
                f"parameters of rank {different[0]} are not those of rank 0 after step {step}; "
                "replicas have drifted apart and training cannot go on"
            )

    def loader(self) -> TrainLoader:
        config, world, strategy = self.config, self.world, self.plan.strategy
        wants = strategy.takes(world.size, world.rank)
        return TrainLoader(
            self.dataset,
            batch_size=config.data.batch_size,
            drop_last=config.data.drop_last,
            seed=config.seed,
            slice_of=lambda rows: strategy.rows_of(world.size, world.rank, rows),
            want_inputs=wants[0],
            want_targets=wants[1],
            dtype=self.rank.dtype,
            prefetch=config.data.prefetch,
            pin_memory=self.rank.device.type == "cuda",
        )
