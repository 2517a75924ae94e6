"""Plain data into a dataclass, every type checked: what YAML, a command line or JSON may hold."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trainer.errors import InputError, shown

Section = TypeVar("Section")


def read_section(kind: type[Section], data: Any, path: str = "", **given: Any) -> Section:
    """An instance of the dataclass `kind` from a mapping; keys that are left out keep their default.

    `path` is the dotted key of the mapping, for sentences; `given` are fields that do not come from it.

    Raises:
        InputError: an unknown key, a missing one without a default, or a value whose type is not the field's.
    """
    if not isinstance(data, Mapping):
        raise InputError(f"{shown(path, data)} must be a section of keys and values")
    hints = get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind) if field.name not in given]  # type: ignore[arg-type]
    prefix = f"{path}." if path else ""
    for name in data:
        if name not in fields:
            raise InputError(unknown_key(f"{prefix}{name}", [prefix + field for field in fields]))
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and field.name not in data and field.name not in given:
            raise InputError(f"{path or 'the configuration'} needs the key {field.name}")
    values = {name: _read(hints[name], value, prefix + name) for name, value in data.items()}
    return kind(**values, **given)


def unknown_key(key: str, known: list[str]) -> str:
    """The sentence for a key that is not among the dotted keys `known`.

    Its value is left out: it may be a secret under a misspelt name.
    """
    section, _, name = key.rpartition(".")
    siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == section]
    if not siblings:
        section, name, siblings = "", key, [other for other in known if "." not in other]
    close = get_close_matches(name, siblings, n=1, cutoff=0.7)
    prefix = f"{section}." if section else ""
    hint = f"did you mean {prefix}{close[0]}?" if close else f"the keys there are {', '.join(siblings)}"
    return f"{key} is not a key of the configuration; {hint}"


def _read(kind: Any, value: Any, key: str) -> Any:
    if dataclasses.is_dataclass(kind):
        assert isinstance(kind, type)
        return read_section(kind, value, key)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        kinds = [argument for argument in arguments if argument is not type(None)]
        # Of two kinds one is a section, as in `float | dict[str, Any]`.
        fitting = [kind for kind in kinds if (get_origin(kind) is dict) == isinstance(value, Mapping)]
        return _read((fitting or kinds)[0], value, key)
    if origin is tuple:
        return _read_tuple(arguments, value, key)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise InputError(f"{shown(key, value)} must be a section of keys and values")
        return _plain(value, key)
    return _SCALARS[kind](value, key)


_EXAMPLES = {str: "[my_module]"}


def _read_tuple(arguments: tuple[Any, ...], value: Any, key: str) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(
            f"{shown(key, value)} must be a list such as {_EXAMPLES.get(arguments[0], '[1, 2]')}"
        )
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(value) != len(arguments):
        raise InputError(f"{shown(key, list(value))} must be a list of {len(arguments)} values")
    return tuple(
        _read(kind, item, f"{key}[{i}]") for i, (kind, item) in enumerate(zip(arguments, value, strict=True))
    )


def _whole(value: Any, key: str) -> int:
    if isinstance(value, str):
        # A value that comes from an environment variable is text.
        with suppress(ValueError):
            value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{shown(key, value)} must be a whole number")
    return value


def _real(value: Any, key: str) -> float:
    number = math.nan
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        # YAML 1.1 takes 1e-3, without a point, for text.
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not math.isfinite(number):
        raise InputError(f"{shown(key, value)} must be a finite number")
    return number


def _truth(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{shown(key, value)} must be true or false")
    return value


def _text(value: Any, key: str) -> str:
    # Names such as 2024 or 1.5 reach us as numbers.
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise InputError(f"{shown(key, value)} must be text")
    return str(value)


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {int: _whole, float: _real, bool: _truth, str: _text}


def _plain(value: Any, key: str) -> Any:
    """Free-form data, as JSON can carry it."""
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise InputError(f"{key} has the key {name!r}, which must be text")
        return {name: _plain(item, f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, float):
        return _real(value, key)
    if value is None or isinstance(value, bool | int | str):
        return value
    raise InputError(f"{shown(key, value)} must be text, a number, true, false, null, a list or a section")
