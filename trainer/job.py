"""What the launcher must know of any job's configuration, be it a training run or a bench."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from trainer.reading import read_section


@dataclass(frozen=True)
class JobConfig(abc.ABC):
    """One job. `run_dir` is its folder, absolute; the further fields are the sections of its kind."""

    kind: ClassVar[str]  # names the log file, and the class for a rank that is told it as text
    root: ClassVar[str]  # the file in conf/ that Hydra starts from
    worker: ClassVar[str]  # what each rank calls, as module:function
    preflight: ClassVar[str | None] = None  # likewise, called once before any rank starts; may import torch

    run_dir: str
    world_size: int | None = None  # null: torchrun's, or default_world_size

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], run_dir: str) -> Self:
        """A checked configuration from plain data, such as a composed Hydra config.

        Keys that are left out keep their defaults.

        Raises:
            InputError: an unknown key, a wrong type, a value out of range, or values that contradict.
        """
        config = read_section(cls, mapping, run_dir=run_dir)
        config.validate()
        return config

    def to_mapping(self) -> dict[str, Any]:
        """Plain data that JSON can carry and `from_mapping` reads back; the folder is not part of it."""
        mapping = _lists(asdict(self))
        del mapping["run_dir"]
        return mapping

    @abc.abstractmethod
    def validate(self) -> None:
        """Refuse values that can never be right, with an InputError."""

    @abc.abstractmethod
    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks that the configuration contradicts, with an InputError."""

    @property
    def default_world_size(self) -> int:
        """Ranks where neither torchrun nor `world_size` says how many."""
        return 1

    @property
    def num_threads(self) -> int | None:
        """Threads of a rank; None is cores over local ranks."""
        return None

    @property
    def dry_run(self) -> bool:
        """Whether to print the plan and start no ranks."""
        return False


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value
