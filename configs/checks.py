"""Checks that the ``*Args`` dataclasses run on themselves: types from their own annotations, ranges, named sets.

Each refuses with one sentence that names the field, its value and what is allowed.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from genrec.configs.errors import ConfigError


class _Mismatch(Exception):
    """A value that does not have the annotated type."""


def convert_fields(args: Any) -> None:
    """Check every field of the frozen dataclass ``args`` against its annotation.

    An int is taken for a float and a list for a tuple, and stored as such; nothing else is converted: a bool is not an
    int, and '1e-3' is not a number. Raises ConfigError.
    """
    for name, hint in _type_hints(type(args)).items():
        value = getattr(args, name)
        try:
            converted = _convert(value, hint)
        except _Mismatch:
            raise refusal(args, name, f"must be {_describe_hint(hint)}") from None
        plain = list(_plain_values(converted))
        small = all(abs(number) < 2**63 for number in plain if isinstance(number, int))
        require(args, name, small, "must be below 2**63, being kept in 64 bits")
        require(args, name, all("\0" not in text for text in plain if isinstance(text, str)), "must not hold a NUL")
        set_field(args, name, converted)


def set_field(args: Any, name: str, value: Any) -> None:
    """Set a field of a frozen dataclass that is still being built."""
    object.__setattr__(args, name, value)


def refusal(args: Any, name: str, allowed: str) -> ConfigError:
    """The error for field ``name``; ``allowed`` completes "Class.field = value " ("must be positive")."""
    binding = f"{type(args).__name__}.{name}"
    return ConfigError(f"{binding} = {_describe_value(getattr(args, name))} {allowed}", binding)


def require(args: Any, name: str, condition: bool, allowed: str) -> None:
    """Refuse field ``name`` unless ``condition``."""
    if not condition:
        raise refusal(args, name, allowed)


def require_at_least(args: Any, low: float, *names: str) -> None:
    """Refuse fields below ``low``; None passes."""
    for name in names:
        value = getattr(args, name)
        require(args, name, value is None or value >= low, f"must be at least {low}")


def require_positive(args: Any, *names: str) -> None:
    """Refuse fields that are not above zero (or not a number at all); None passes."""
    for name in names:
        value = getattr(args, name)
        require(args, name, value is None or 0 < value < float("inf"), "must be positive and finite")


def require_fraction(args: Any, *names: str, below_one: bool = True) -> None:
    """Refuse fields outside [0, 1), or [0, 1] unless ``below_one``; None passes."""
    for name in names:
        value = getattr(args, name)
        inside = value is None or (0 <= value < 1 if below_one else 0 <= value <= 1)
        require(args, name, inside, f"must be at least 0 and {'below' if below_one else 'at most'} 1")


def require_minus_one_or_positive(args: Any, *names: str) -> None:
    """Refuse fields that are neither -1 (the default rule) nor positive."""
    for name in names:
        value = getattr(args, name)
        require(args, name, value == -1 or value > 0, "must be -1 or positive")


def require_choice(args: Any, name: str, choices: Sequence[str]) -> None:
    """Refuse a field outside the named set, ignoring case; the field is stored as the set spells it. None passes."""
    value = getattr(args, name)
    if value is not None:
        set_field(args, name, _choose(args, name, value, choices))


def require_choices(args: Any, name: str, choices: Sequence[str]) -> None:
    """As :func:`require_choice`, for every element of a tuple, which must hold no value twice."""
    chosen = tuple(_choose(args, name, value, choices) for value in getattr(args, name))
    set_field(args, name, chosen)
    require_unique(args, name)


def require_choice_values(args: Any, name: str, choices: Sequence[str]) -> None:
    """As :func:`require_choice`, for every value of a dict. None passes."""
    values = getattr(args, name)
    if values is not None:
        set_field(args, name, {key: _choose(args, name, value, choices) for key, value in values.items()})


def require_unique(args: Any, name: str) -> None:
    """Refuse a tuple that holds a value twice."""
    values = getattr(args, name)
    require(args, name, values is None or len(set(values)) == len(values), "must not name anything twice")


def _choose(args: Any, name: str, value: str, choices: Sequence[str]) -> str:
    for choice in choices:
        if value.lower() == choice.lower():
            return choice
    raise refusal(args, name, "must be one of " + ", ".join(repr(choice) for choice in choices))


def _type_hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}


def _convert(value: Any, hint: Any) -> Any:
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_union(value, parameters)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise _Mismatch
        return tuple(_convert(element, parameters[0]) for element in value)
    if origin is dict:
        if not isinstance(value, dict):
            raise _Mismatch
        return {_convert(key, parameters[0]): _convert(element, parameters[1]) for key, element in value.items()}
    if origin is typing.Literal:
        if value not in parameters:
            raise _Mismatch
        return value
    return _convert_plain(value, hint)


def _plain_values(value: Any) -> Iterator[Any]:
    """What is in containers, or ``value`` itself."""
    if isinstance(value, dict):
        yield from value
        value = tuple(value.values())
    if isinstance(value, tuple):
        for element in value:
            yield from _plain_values(element)
    else:
        yield value


def _convert_union(value: Any, alternatives: tuple[Any, ...]) -> Any:
    for alternative in alternatives:
        try:
            return _convert(value, alternative)
        except _Mismatch:
            continue
    raise _Mismatch


def _convert_plain(value: Any, hint: type) -> Any:
    if hint is float and type(value) is int:
        return float(value)
    if hint in (int, float) and isinstance(value, bool):
        raise _Mismatch
    if not isinstance(value, hint):
        raise _Mismatch
    return value


def _describe_hint(hint: Any) -> str:
    origin, parameters = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe_hint(alternative) for alternative in parameters)
    if origin is tuple:
        return f"a list of {_describe_hint(parameters[0]).removeprefix('an ').removeprefix('a ')}s"
    if origin is dict:
        return f"a dict from {parameters[0].__name__} to {_describe_hint(parameters[1])}"
    if origin is typing.Literal:
        return "one of " + ", ".join(repr(parameter) for parameter in parameters)
    plain = {int: "an integer", float: "a number", str: "a quoted string", bool: "True or False", type(None): "None"}
    return plain.get(hint) or f"a {hint.__name__}"


def _describe_value(value: Any) -> str:
    if callable(value):
        return f"@{getattr(value, '__name__', value)} (not called: '()' is missing)"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
