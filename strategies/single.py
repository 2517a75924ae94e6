"""The whole model on one rank: the step that every split rewrites, and the truth that it must equal."""

from __future__ import annotations

from models.block import Model
from strategies.layout import Layout
from strategies.schedule import Schedule
from strategies.strategy import Strategy, Task, cut_rows, make_schedule, score, step, whole_layers, world


class Single(Strategy):
    name = "single"

    def check(self, model: Model, world_size: int, batch_size: int) -> None:
        if world_size != 1:
            raise ValueError(
                f"strategy=single with world_size={world_size} would train {world_size} unrelated models; "
                "use world_size=1, or strategy=ddp, tensor or pipeline"
            )
        super().check(model, world_size, batch_size)

    def layout(self, model: Model, world_size: int, dtype: str) -> Layout:
        return Layout(model, dtype, 1, lambda rank: range(len(model.layers)), lambda layer, rank: None)

    def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        layers, microbatches = whole_layers(model.layers), self.microbatches(rows)
        operations = step(layers, microbatches, world(1), task.clips)
        return make_schedule(operations, layers, cut_rows(0, rows, microbatches), rows, task.dtype)

    def evaluation(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        layers, microbatches = whole_layers(model.layers), self.microbatches(rows)
        operations = score(layers, microbatches)
        return make_schedule(operations, layers, cut_rows(0, rows, microbatches), rows, task.dtype)

    def bytes_predicted(
        self, model: Model, world_size: int, rank: int, rows: int, task: Task
    ) -> dict[str, int]:
        return {}
