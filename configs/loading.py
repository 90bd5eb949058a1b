"""From gin files and overrides to one checked :class:`ExperimentConfig`. The only file that imports gin.

gin itself accepts much that has no effect: misspelt macros, bindings nothing reads, values of the wrong type. Here
every statement is kept with its file and line, so that each of these is refused in one sentence saying where it is. gin
still does the binding, scopes, macros and references, and its config is locked once loaded.
"""

from __future__ import annotations

import dataclasses
import importlib.util  # noqa: F401 (gin 0.5.0 uses importlib.util without importing it)
import inspect
import tokenize
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gin
from gin import config_parser

from genrec.configs import lookup
from genrec.configs.schema import ConfigError, ExperimentConfig, Task
from genrec.configs.statements import ARGS_CLASSES, Key, Statements, check_class, check_field
from genrec.configs.syntax_hints import syntax_error

_statements = Statements()  # of the configuration that gin holds now: both are one a process


def load_experiment(
    task: Task, *, gin_files: Sequence[str], gin_bindings: Sequence[str], search_dirs: Sequence[Path] = ()
) -> ExperimentConfig:
    """Parse ``gin_files`` in order, then ``gin_bindings``, which win, and build the checked configuration.

    A file name is looked up as given, then in ``search_dirs``, then among the shipped presets; an ``include`` beside
    the including file, then among the presets. Forgets what an earlier call loaded, and locks what this one loads:
    nothing can be bound any more. Raises ConfigError.
    """
    global _statements
    _statements = Statements()
    gin.clear_config()
    for name in gin_files:
        _parse_file(lookup.find_config(name, search_dirs), including=())
    for text in gin_bindings:
        _parse_override(text)
    _statements.check_macros()
    config = _build(task)
    _statements.check_all_read(task)
    _lock()
    return config


def operative_text() -> str:
    """All values that the last loaded configuration was built from, defaults included, as a gin file."""
    return str(gin.operative_config_str())


def describe(config: ExperimentConfig) -> str:
    """The resolved configuration to read: one "Class.field = value" a line, with "# default" behind defaults."""
    lines = [f"task = {config.task!r}"]
    for part in dataclasses.fields(config):
        args = getattr(config, part.name)
        if not dataclasses.is_dataclass(args):
            continue
        for item in dataclasses.fields(args):
            value = getattr(args, item.name)
            mark = "  # default" if value == item.default else ""
            lines.append(f"{type(args).__name__}.{item.name} = {value!r}{mark}")
    return "\n".join([*lines, f"digest = {config.digest}"])


class _Delegate(gin.config.ParserDelegate):
    """gin's own, noting at which place macros and references are used."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def macro(self, macro_name: str) -> Any:
        reference = super().macro(macro_name)
        if reference.configurable.name == "macro":  # not one of gin's constants
            _statements.macro_uses.setdefault(macro_name, self.place)
        return reference

    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Any:
        check_class(scoped_configurable_name.rpartition("/")[2], self.place)
        return super().configurable_reference(scoped_configurable_name, evaluate)


def _lock() -> None:
    """Let gin's own finalize hooks look at the configuration, then let nothing be bound any more."""
    try:
        gin.finalize()
    except ValueError as error:
        raise ConfigError(str(error).partition("\n")[0]) from None


def _parse_file(path: Path, including: tuple[Path, ...]) -> None:
    """Parse ``path``, which the files ``including`` lead to."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: it is not UTF-8 text") from error
    _parse_text(text, lambda line: f"{path}:{line}", including=(*including, path))


def _parse_override(text: str) -> None:
    if "=" not in text:
        raise ConfigError(f"--gin-bindings {text!r} is not a binding, must be like 'TrainerArgs.train_batch_size = 64'")
    _parse_text(text, lambda line: f"--gin-bindings {text!r}", including=())


def _parse_text(text: str, place_of: Callable[[int], str], including: tuple[Path, ...]) -> None:
    """Statement by statement, as gin.parse_config does, to know the place of each and to find includes by it."""
    delegate = _Delegate(place_of(1))
    try:
        parser = config_parser.ConfigParser(text, delegate)
        while True:
            delegate.place = place_of(parser.current_token.start[0])
            statement = parser.parse_statement()
            if statement is None:
                return
            _take(statement, place_of(statement.location.line_num), including)
    except (SyntaxError, tokenize.TokenError) as error:
        raise syntax_error(error, text, place_of) from None
    except ConfigError as error:
        raise _without_gin_lines(error) from None


def _take(statement: Any, place: str, including: tuple[Path, ...]) -> None:
    if isinstance(statement, config_parser.BindingStatement):
        _bind(statement, place)
    elif isinstance(statement, config_parser.BlockDeclaration):
        check_class(statement.selector, place)
    elif isinstance(statement, config_parser.IncludeStatement):
        path = lookup.find_include(statement.filename, including[-1].parent if including else Path(), place)
        if path.resolve() in [other.resolve() for other in including]:
            raise ConfigError(f"{place}: include {statement.filename!r} leads back to a file that includes it")
        _parse_file(path, including)
    else:
        raise ConfigError(f"{place}: import statements are not supported, all classes are known without them")


def _bind(statement: Any, place: str) -> None:
    if statement.arg_name:
        check_class(statement.selector, place)
        key = Key(statement.scope, statement.selector.rpartition(".")[2], statement.arg_name)
        check_field(key.name, key.parameter, place)
        gin.bind_parameter((key.scope, key.name, key.parameter), statement.value)
    else:
        key = Key(statement.scope, statement.selector, "")
        gin.bind_parameter((str(key), "gin.macro", "value"), statement.value)
    _statements.places[key] = place


def _build(task: Task) -> ExperimentConfig:
    head = {"ranking": "RankingArgs", "retrieval": "RetrievalArgs"}[task]
    try:
        return ExperimentConfig(
            task=task,
            trainer=_construct("TrainerArgs"),
            dataset=_construct(_statements.dataset_class()),
            network=_construct("NetworkArgs"),
            optimizer=_construct("OptimizerArgs"),
            tensor_parallel=_construct("TensorModelParallelArgs"),
            mixed_precision=_construct("MixedPrecisionArgs"),
            text=gin.config_str(),
            **{task: _construct(head)},
        )
    except ConfigError as error:
        raise _with_place(error, scope="") from None


def _construct(name: str) -> Any:
    """The object of class ``name`` as bound. No arguments: gin would silently prefer them to the bindings."""
    try:
        return gin.get_configurable(name)()
    except ConfigError as error:
        raise _without_gin_lines(error) from None
    except RecursionError:
        raise ConfigError(f"the @references or %macros that {name} leads to go round in a circle") from None


def _builder(cls: type) -> Callable[..., Any]:
    """A function with the fields of ``cls`` as parameters, for gin to call, that puts places into errors."""

    def build(**values: Any) -> Any:
        scope = gin.current_scope_str()
        _statements.built.add((scope, cls.__name__))
        for item in dataclasses.fields(cls):
            if item.name not in values and item.default is dataclasses.MISSING:
                where = f" in scope {scope!r}" if scope else ""
                raise ConfigError(f"{cls.__name__}.{item.name} is required and not bound{where}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise _with_place(error, scope) from None

    build.__name__ = cls.__name__
    build.__doc__ = cls.__doc__
    build.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    return build


def _without_gin_lines(error: ConfigError) -> ConfigError:
    """An error that has passed through gin is of a class made on the spot, with lines of gin's behind the sentence."""
    return ConfigError(error.message, *error.fields)


def _with_place(error: ConfigError, scope: str) -> ConfigError:
    """``error`` behind the place of the binding at fault, unless that is a default."""
    places = [_statements.find(scope, binding) for binding in error.fields]
    return ConfigError(f"{places[0]}: {error.message}") if places and places[0] else error


for _cls in ARGS_CLASSES:
    gin.external_configurable(_builder(_cls), name=_cls.__name__, module="genrec")
