"""What the gin files bind, statement by statement, with the place of each, and what has been read of it.

gin keeps values but not where they stand, and accepts names that nothing reads; this is how loading refuses them.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field

from genrec.configs import schema
from genrec.configs.schema import ConfigError

ARGS_CLASSES = (
    schema.TrainerArgs,
    schema.DatasetArgs,
    schema.BenchmarkDatasetArgs,
    schema.RandomDistribution,
    schema.FeatureArgs,
    schema.EmbeddingArgs,
    schema.DynamicEmbeddingArgs,
    schema.NetworkArgs,
    schema.OptimizerArgs,
    schema.RankingArgs,
    schema.RetrievalArgs,
    schema.TensorModelParallelArgs,
    schema.MixedPrecisionArgs,
)
FIELDS = {cls.__name__: tuple(item.name for item in dataclasses.fields(cls)) for cls in ARGS_CLASSES}


@dataclass(frozen=True)
class Key:
    """What a statement binds: "scope/Class.parameter", or the macro "scope/name" where there is no parameter."""

    scope: str
    name: str
    parameter: str

    def __str__(self) -> str:
        return join_scope(self.scope, self.name) + (f".{self.parameter}" if self.parameter else "")


@dataclass
class Statements:
    """The statements of one configuration. A place reads "file.gin:12" or "--gin-bindings 'text'"."""

    places: dict[Key, str] = field(
        default_factory=dict
    )  # of the last statement for the key, which is the one that counts
    macro_uses: dict[str, str] = field(default_factory=dict)  # name -> place of its first use
    built: set[tuple[str, str]] = field(default_factory=set)  # (scope, class) of the objects built

    def find(self, scope: str, binding: str) -> str | None:
        """The place that gave "Class.field" to an object built in ``scope``."""
        name, _, parameter = binding.partition(".")
        for outer in reversed(scopes_seen_from(scope)):
            place = self.places.get(Key(outer, name, parameter))
            if place is not None:
                return place
        return None

    def dataset_class(self) -> str:
        """Which of the two dataset classes is bound; ConfigError unless it is exactly one."""
        bound = {key.name for key in self.places if key.parameter and not key.scope}
        chosen = sorted(bound & {"DatasetArgs", "BenchmarkDatasetArgs"})
        if len(chosen) != 1:
            classes = "DatasetArgs (prepared data) and BenchmarkDatasetArgs (synthetic data)"
            raise ConfigError(f"exactly one of {classes} must be bound, {'both are' if chosen else 'neither is'}")
        return chosen[0]

    def check_macros(self) -> None:
        """Every macro in use is set, and every macro that is set is in use: a misspelt name fails one of them."""
        known = {str(key): place for key, place in self.places.items() if not key.parameter}
        for name, place in self.macro_uses.items():
            if name not in known:
                raise ConfigError(f"{place}: macro %{name} is not set{guess(name, known)}")
        for name, place in known.items():
            if name not in self.macro_uses:
                close = guess(name, [*self.macro_uses, *FIELDS])
                raise ConfigError(f"{place}: macro {name} is set but nothing uses %{name}{close}")

    def check_all_read(self, task: str) -> None:
        """Every binding must have been seen by an object that was built."""
        seen = {(outer, name) for scope, name in self.built for outer in scopes_seen_from(scope)}
        for key, place in self.places.items():
            if key.parameter and (key.scope, key.name) not in seen:
                built = ", ".join(sorted(join_scope(scope, name) for scope, name in self.built))
                raise ConfigError(f"{place}: nothing reads {key}, a {task} run with these files reads {built}")


def check_class(selector: str, place: str) -> None:
    """Refuse a class that is not one of ours."""
    name = selector.rpartition(".")[2]
    if name not in FIELDS or selector not in (name, f"genrec.{name}"):
        raise ConfigError(f"{place}: unknown class {selector!r}, known are {', '.join(FIELDS)}{guess(name, FIELDS)}")


def check_field(name: str, parameter: str, place: str) -> None:
    """Refuse a field that the class does not have."""
    if parameter not in FIELDS[name]:
        known = ", ".join(FIELDS[name])
        raise ConfigError(f"{place}: {name} has no field {parameter!r}, it has {known}{guess(parameter, FIELDS[name])}")


def guess(name: str, known: Iterable[str]) -> str:
    """What to add to a refusal: which known name was probably meant, if one is close."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else ""


def join_scope(scope: str, name: str) -> str:
    """As gin writes a scoped name."""
    return f"{scope}/{name}" if scope else name


def scopes_seen_from(scope: str) -> list[str]:
    """``a/b`` sees the bindings of "", "a" and "a/b", the innermost last."""
    parts = scope.split("/") if scope else []
    return ["/".join(parts[:depth]) for depth in range(len(parts) + 1)]
