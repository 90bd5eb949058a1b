"""gin's syntax errors in one sentence, with what was probably meant: gin has neither bare words nor arithmetic."""

from __future__ import annotations

import re
import tokenize
import typing
from collections.abc import Callable
from typing import Any

from genrec.configs.schema import ConfigError
from genrec.configs.statements import ARGS_CLASSES

_STRING = re.compile(r"'[^']*'|\"[^\"]*\"")
_ARITHMETIC = re.compile(r"[\d.)]\s*(\*\*|//|[-+*/%])\s*[\d%(]|\w+\s*(\*\*|//|[*/])\s*%?\w+|%\w+\s*[-+]")
_LITERALS = {"true": "True", "false": "False", "none": "None", "null": "None"}


def syntax_error(error: Exception, text: str, place_of: Callable[[int], str]) -> ConfigError:
    """The error to raise for gin's SyntaxError or Python's TokenError on ``text``."""
    number = _line_number(error)
    lines = text.splitlines()
    line = lines[min(number, len(lines)) - 1].strip() if lines else ""
    return ConfigError(f"{place_of(number)}: {line!r} is not valid gin: {_hint(line)}")


def _hint(line: str) -> str:
    name, _, value = (part.strip() for part in line.partition("="))
    before_comment = value.partition(" #")[0].rstrip()
    value = value if "'" in before_comment or '"' in before_comment else before_comment
    if value.lower() in _LITERALS and not _takes_text_alone(name):
        return f"write {name} = {_LITERALS[value.lower()]}"
    if re.match(r"[A-Za-z_][\w.]*\(", value):
        return "gin calls no functions, write the result"
    # Paths and names such as ml-20m hold operators too, but start with a letter, a dot, a slash or a tilde.
    if re.match(r"[A-Za-z_./~]", value) and not re.match(r"\.\d", value):
        return f"text needs quotes, such as {name} = '{value}'"
    if _ARITHMETIC.search(_STRING.sub("''", value)):
        return "gin has no arithmetic, write the result"
    return "it must be 'Class.field = value' or 'NAME = value', the value a Python literal, %MACRO or @reference"


def _takes_text_alone(name: str) -> bool:
    """Whether "Class.field", in a block the bare "field", takes text and not None, so that none is meant as a name."""
    class_name, _, parameter = name.rpartition("/")[2].rpartition(".")
    classes = [cls for cls in ARGS_CLASSES if class_name.rpartition(".")[2] in ("", cls.__name__)]
    hints = [hint for cls in classes for field, hint in typing.get_type_hints(cls).items() if field == parameter]
    return bool(hints) and all(hint is str for hint in hints)


def _line_number(error: Exception) -> int:
    """gin puts (file, line, column, text) second, Python's tokenizer (line, column)."""
    location: Any = error.args[1] if len(error.args) > 1 else (1, 1)
    return int(location[0] if isinstance(error, tokenize.TokenError) else location[1])
