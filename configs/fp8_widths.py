"""What FP8 asks of the rest of a configuration: something left to run in it, and widths that its products can have."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from genrec.configs.checks import refusal, require
from genrec.configs.precision import FP8_DIM_MULTIPLES

if TYPE_CHECKING:
    from genrec.configs.schema import ExperimentConfig


def check_fp8(config: ExperimentConfig) -> None:
    """Refuse FP8 that nothing would run in, and linears in FP8 whose widths its products can't have.

    Raises ConfigError. For configurations whose ``mixed_precision_dtype`` is not None.
    """
    precision, network = config.mixed_precision, config.network
    if precision.enable_fp8_for_prediction_head:
        _check_fp8_head(config)
    skips = precision.skip_first_last_layer
    has_fp8_layers = network.num_layers > 2 or not skips
    if not (has_fp8_layers or precision.enable_fp8_for_prediction_head):
        few = f"must be False with NetworkArgs.num_layers = {network.num_layers}, since it takes 3 to leave one for FP8"
        raise refusal(precision, "skip_first_last_layer", few)
    if not precision.has_fp8_linears:
        return
    _require_fp8_width(config, network, "hidden_size", network.hidden_size)
    if has_fp8_layers:
        _check_fp8_attention_heads(config)
    for name in () if skips else _projected_embeddings(config):
        _require_fp8_width(config, network, name, getattr(network, name))


def _check_fp8_head(config: ExperimentConfig) -> None:
    """The prediction head's hidden layers, which alone run in FP8."""
    ranking = config.ranking
    has_head = f"must be False in a {config.task} run, which has no prediction head"
    require(config.mixed_precision, "enable_fp8_for_prediction_head", ranking is not None, has_head)
    assert ranking is not None
    hidden = ranking.prediction_head_arch[:-1]
    asked = "MixedPrecisionArgs.enable_fp8_for_prediction_head = True"
    none_hidden = f"must have a hidden layer with {asked}, since the last layer is always float32"
    require(ranking, "prediction_head_arch", bool(hidden), none_hidden)
    for width in hidden:
        _require_fp8_width(config, ranking, "prediction_head_arch", width, how=f"has the hidden width {width}, which ")
    for width in _shared_widths(config, ranking.prediction_head_arch):
        how = f"has the hidden width {width}, whose part on each rank "
        part = width // _num_peers(config)
        _require_fp8_width(config, ranking, "prediction_head_arch", part, how=how)


def _shared_widths(config: ExperimentConfig, layer_sizes: Sequence[int]) -> Iterator[int]:
    """The widths of a head that ranks share: between its first and second layer, third and fourth, ..."""
    num_peers = _num_peers(config)
    return (width for width in layer_sizes[:-1:2] if num_peers > 1 and width % num_peers == 0)


def _num_peers(config: ExperimentConfig) -> int:
    return config.tensor_parallel.tensor_model_parallel_size


def _check_fp8_attention_heads(config: ExperimentConfig) -> None:
    """The width of a rank's heads together, of which both linears of a layer have a multiple on one side."""
    network = config.network
    heads = network.num_attention_heads // _num_peers(config)
    step = _fp8_multiple(config) // math.gcd(_fp8_multiple(config), heads)
    such_as = f"kv_channels = {_nearest_multiples(network.kv_channels, step)}"
    shared = f" / {_num_peers(config)}" if _num_peers(config) > 1 else ""
    how = f"times num_attention_heads = {network.num_attention_heads}{shared} "
    _require_fp8_width(config, network, "kv_channels", network.kv_channels * heads, how=how, such_as=such_as)


def _projected_embeddings(config: ExperimentConfig) -> Iterator[str]:
    """The fields of NetworkArgs with the widths of embeddings that a projection brings to ``hidden_size``."""
    network, dataset = config.network, config.dataset
    if network.item_embedding_dim not in (-1, network.hidden_size):
        yield "item_embedding_dim"
    # Of prepared data None means all contexts there are.
    contexts = getattr(dataset, "contextual_feature_names", None) or getattr(dataset, "contextual_features", ())
    if contexts != () and network.contextual_embedding_dim not in (-1, network.hidden_size):
        yield "contextual_embedding_dim"


def _require_fp8_width(
    config: ExperimentConfig, args: Any, name: str, width: int, *, how: str = "", such_as: str = ""
) -> None:
    """Refuse field ``name`` of ``args`` where the width that comes of it, as ``how`` says, does not suit the recipe."""
    multiple = _fp8_multiple(config)
    recipe = f"MixedPrecisionArgs.linear_recipe = {config.mixed_precision.linear_recipe!r}"
    nearest = such_as or _nearest_multiples(width, multiple)
    allowed = f"{how}must be a multiple of {multiple} with {recipe}, such as {nearest}"
    require(args, name, width % multiple == 0, allowed)


def _fp8_multiple(config: ExperimentConfig) -> int:
    assert config.mixed_precision.linear_recipe is not None
    return FP8_DIM_MULTIPLES[config.mixed_precision.linear_recipe]


def _nearest_multiples(value: int, multiple: int) -> str:
    below = value // multiple * multiple
    return f"{below} or {below + multiple}" if below else f"{multiple}"
