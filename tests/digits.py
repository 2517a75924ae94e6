"""What scripts/train.py trains by default, as a case of `tests.truth`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.truth import Case
from trainer.config import DataConfig, OptimizerConfig
from trainer.data import load_dataset
from trainer.order import epoch_order


class Digits(Case):
    """In batches of the data set."""

    def data(self) -> list[tuple[Tensor, Tensor]]:
        dataset = load_dataset(DataConfig(name="digits"), seed=self.seed, hidden_dim=self.hidden_dim)
        order = epoch_order(len(dataset.train_inputs), self.seed, 0)
        batches, start = [], 0
        for rows in self.batches:
            chosen = order[start : start + rows]
            inputs = np.ascontiguousarray(dataset.train_inputs[chosen].reshape(rows, -1))
            targets = np.ascontiguousarray(dataset.train_targets[chosen])
            batches.append((torch.from_numpy(inputs).to(self.torch_dtype), torch.from_numpy(targets)))
            start += rows
        return batches


DIGITS = Digits(
    inputs=64,
    outputs=10,
    num_layers=4,
    hidden_dim=128,
    dtype="float32",
    optimizer=OptimizerConfig("adamw", lr=0.002),
    batches=(128,) * 3,
    seed=0,
)
