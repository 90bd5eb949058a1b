"""Names of recipes stand for Transformer Engine's classes of the same meaning; with a stand-in for it, on any machine.

A name that is mapped to another mode trains all the same, and says nothing.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from genrec.configs.schema import LINEAR_RECIPES, MixedPrecisionArgs
from genrec.hstu.precision.recipes import linear_recipe
from genrec.hstu.precision.te import te_recipe

CLASSES = {
    "delayed": "DelayedScaling",
    "tensorwise": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
}


@pytest.fixture
def engine(monkeypatch):
    """``transformer_engine.common.recipe`` whose classes only remember what they were given."""
    recipe = ModuleType("transformer_engine.common.recipe")
    recipe.Format = SimpleNamespace(HYBRID="hybrid format", E4M3="e4m3 format")
    for name in CLASSES.values():
        setattr(recipe, name, type(name, (), {"__init__": lambda self, **given: self.__dict__.update(given)}))
    common = ModuleType("transformer_engine.common")
    common.recipe = recipe
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", common)
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipe)
    te_recipe.cache_clear()
    yield
    te_recipe.cache_clear()


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("scaling", ["hybrid", "e4m3"])
@pytest.mark.parametrize("name", LINEAR_RECIPES)
def test_names_and_formats(name, scaling) -> None:
    args = MixedPrecisionArgs(mixed_precision_dtype="fp8", linear_recipe=name, linear_scaling_precision=scaling)
    made = te_recipe(linear_recipe(args))
    assert type(made).__name__ == CLASSES[name]
    assert made.fp8_format == f"{scaling} format"


@pytest.mark.usefixtures("engine")
def test_options_of_delayed_scaling() -> None:
    args = MixedPrecisionArgs(
        mixed_precision_dtype="fp8",
        linear_recipe="delayed",
        amax_history_len=7,
        amax_compute_algo="most_recent",
        margin=2,
    )
    made = te_recipe(linear_recipe(args))
    assert (made.amax_history_len, made.amax_compute_algo, made.margin) == (7, "most_recent", 2)


def test_every_recipe_is_covered() -> None:
    assert CLASSES.keys() == set(LINEAR_RECIPES)
