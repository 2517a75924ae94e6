"""The built-in strategies by name, and how a plug-in's join them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from strategies.ddp import DataParallel
from strategies.pipeline import Pipeline
from strategies.single import Single
from strategies.strategy import Options, Strategy
from strategies.tensor import TensorParallel

BUILT_IN: dict[str, Callable[[Options], Strategy]] = {
    "single": Single,
    "ddp": DataParallel,
    "tensor": TensorParallel,
    "pipeline": Pipeline,
}


def make_strategy(
    name: str, options: Options, plugins: Mapping[str, Callable[[Options], Strategy]] | None = None
) -> Strategy:
    """The strategy of that name, from the built-in ones or a plug-in's `STRATEGIES`.

    Raises:
        ValueError: an unknown name (the valid ones are listed), or a plug-in's that is taken.
    """
    for taken in BUILT_IN.keys() & (plugins or {}).keys():
        raise ValueError(f"plugins: a plug-in's strategy is named {taken}, as a built-in one is; rename it")
    known = {**BUILT_IN, **(plugins or {})}
    if name not in known:
        raise ValueError(
            f"strategy={name} is unknown; valid are {', '.join(known)}"
            " (a plug-in's own are named in its module's STRATEGIES, declared under plugins)"
        )
    made = known[name](options) if callable(known[name]) else None
    if not isinstance(made, Strategy):
        raise ValueError(
            f"strategy={name}: its entry in STRATEGIES must be a class of strategies.strategy.Strategy, or a "
            "function that returns one"
        )
    return made
