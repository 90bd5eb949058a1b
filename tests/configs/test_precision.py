"""What MixedPrecisionArgs and a configuration around them refuse: each in one sentence, on any machine."""

import dataclasses

import pytest

from genrec.configs.schema import (
    FP8_DIM_MULTIPLES,
    FP8_ROW_MULTIPLES,
    BenchmarkDatasetArgs,
    ConfigError,
    EmbeddingArgs,
    FeatureArgs,
    MixedPrecisionArgs,
    RetrievalArgs,
    TensorModelParallelArgs,
)

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
FP8 = "MixedPrecisionArgs.mixed_precision_dtype = 'fp8'\n"

# What is added to the minimal file, in FP8 from its line 13 on, and the sentence. hidden_size is 16, kv_channels 8 in 2
# heads, prediction_head_arch [16, 1], one layer.
REFUSED = {
    "width": (["NetworkArgs.hidden_size = 1000"],
        "NetworkArgs.hidden_size = 1000 must be a multiple of 16 with MixedPrecisionArgs.linear_recipe = 'tensorwise', "
        "such as 992 or 1008"),
    "width below the first multiple": (["NetworkArgs.hidden_size = 8"],
        "NetworkArgs.hidden_size = 8 must be a multiple of 16 with MixedPrecisionArgs.linear_recipe = 'tensorwise', "
        "such as 16"),
    "width for blocks of 32": (["NetworkArgs.hidden_size = 48", "MixedPrecisionArgs.linear_recipe = 'mxfp8'"],
        "NetworkArgs.hidden_size = 48 must be a multiple of 32 with MixedPrecisionArgs.linear_recipe = 'mxfp8', "
        "such as 32 or 64"),
    "attention heads": (["NetworkArgs.num_attention_heads = 3", "NetworkArgs.kv_channels = 24"],
        "NetworkArgs.kv_channels = 24 times num_attention_heads = 3 must be a multiple of 16 with "
        "MixedPrecisionArgs.linear_recipe = 'tensorwise', such as kv_channels = 16 or 32"),
    "item embeddings": (["NetworkArgs.item_embedding_dim = 24"],
        "NetworkArgs.item_embedding_dim = 24 must be a multiple of 16 with MixedPrecisionArgs.linear_recipe = "
        "'tensorwise', such as 16 or 32"),
    "contextual embeddings": (["NetworkArgs.contextual_embedding_dim = 40"],
        "NetworkArgs.contextual_embedding_dim = 40 must be a multiple of 16 with MixedPrecisionArgs.linear_recipe = "
        "'tensorwise', such as 32 or 48"),
    "head": (["RankingArgs.prediction_head_arch = [32, 100, 1]",
              "MixedPrecisionArgs.enable_fp8_for_prediction_head = True"],
        "RankingArgs.prediction_head_arch = (32, 100, 1) has the hidden width 100, which must be a multiple of 16 with "
        "MixedPrecisionArgs.linear_recipe = 'tensorwise', such as 96 or 112"),
    "head without hidden layers": (["RankingArgs.prediction_head_arch = [1]",
                                    "MixedPrecisionArgs.enable_fp8_for_prediction_head = True"],
        "RankingArgs.prediction_head_arch = (1,) must have a hidden layer with "
        "MixedPrecisionArgs.enable_fp8_for_prediction_head = True, since the last layer is always float32"),
    "nothing left": (["NetworkArgs.num_layers = 2", "MixedPrecisionArgs.skip_first_last_layer = True"],
        "MixedPrecisionArgs.skip_first_last_layer = True must be False with NetworkArgs.num_layers = 2, since it takes "
        "3 to leave one for FP8"),
    "recipe": (["MixedPrecisionArgs.linear_recipe = 'rowwise'"],
        "MixedPrecisionArgs.linear_recipe = 'rowwise' must be one of 'delayed', 'tensorwise', 'blockwise', 'mxfp8'"),
    "e5m2": (["MixedPrecisionArgs.linear_scaling_precision = 'E5M2'"],
        "MixedPrecisionArgs.linear_scaling_precision = 'E5M2' must be 'hybrid' (e4m3 forward, e5m2 gradients) or "
        "'e4m3': ...Transformer Engine trains in neither"),
    "history": (["MixedPrecisionArgs.amax_history_len = 16"],
        "MixedPrecisionArgs.amax_history_len = 16 must stay 1024 with linear_recipe = 'tensorwise', since only "
        "'delayed' reads it"),
    "algorithm": (["MixedPrecisionArgs.amax_compute_algo = 'most_recent'",
                   "MixedPrecisionArgs.linear_recipe = 'blockwise'"],
        "MixedPrecisionArgs.amax_compute_algo = 'most_recent' must stay 'max' with linear_recipe = 'blockwise', since "
        "only 'delayed' reads it"),
    "margin": (["MixedPrecisionArgs.margin = 1", "MixedPrecisionArgs.linear_recipe = 'mxfp8'"],
        "MixedPrecisionArgs.margin = 1 must stay 0 with linear_recipe = 'mxfp8', since only 'delayed' reads it"),
    "rows": (["MixedPrecisionArgs.pad_multiple = 24"],
        "MixedPrecisionArgs.pad_multiple = 24 must be None or a multiple of 16, which 'tensorwise' needs"),
    "rows beyond reason": (["MixedPrecisionArgs.pad_multiple = 160000000"],
        "MixedPrecisionArgs.pad_multiple = 160000000 must be at most 65536"),
    "history beyond memory": (
        ["MixedPrecisionArgs.linear_recipe = 'delayed'", "MixedPrecisionArgs.amax_history_len = 1000000000000"],
        "MixedPrecisionArgs.amax_history_len = 1000000000000 must be at most 1048576"),
    "rows for blocks of 32": (["MixedPrecisionArgs.pad_multiple = 16", "MixedPrecisionArgs.linear_recipe = 'mxfp8'"],
        "MixedPrecisionArgs.pad_multiple = 16 must be None or a multiple of 32, which 'mxfp8' needs"),
    "head without linears": (["MixedPrecisionArgs.linear_recipe = None",
                              "MixedPrecisionArgs.hstu_attn_quantization_mode = 'per-block'",
                              "MixedPrecisionArgs.enable_fp8_for_prediction_head = True"],
        "MixedPrecisionArgs.enable_fp8_for_prediction_head = True must come with a linear_recipe"),
}  # fmt: skip


@pytest.mark.parametrize("backend", ["te", "emulated"])
@pytest.mark.parametrize(("lines", "sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_through_the_loader_for_either_backend(refused, minimal_text, lines, sentence, backend):
    text = minimal_text + FP8 + "\n".join([f"MixedPrecisionArgs.backend = {backend!r}", *lines])
    message = refused(text)
    place, _, rest = message.partition(": ")
    start, _, end = sentence.partition("...")
    assert place.startswith("run.gin:") and int(place.removeprefix("run.gin:")) >= 15
    assert rest.startswith(start) and rest.endswith(end)
    assert end or rest == start


@pytest.mark.parametrize(("lines", "_sentence"), REFUSED.values(), ids=REFUSED.keys())
def test_what_fp8_needs_is_free_without_it(load, refused, minimal_text, lines, _sentence):
    """One file serves both runs of a comparison; only a value that has no meaning at all is refused all the same."""
    text = minimal_text + "\n".join(lines)
    if any(word in text for word in ("'rowwise'", "'E5M2'")):
        assert "MixedPrecisionArgs.linear_" in refused(text)
    else:
        assert not load(text).mixed_precision.has_fp8_linears


@pytest.fixture
def fp8_experiment(experiment):
    """fp8_experiment(network={...}, recipe=..., skip_first_last_layer=True, ...): a configuration in FP8."""

    def build(*, recipe="tensorwise", network=None, dataset=None, ranking=None, **precision):
        wide = {"hidden_size": 32, "kv_channels": 16, **(network or {})}
        args = MixedPrecisionArgs("fp8", linear_recipe=recipe, backend="emulated", **precision)
        return experiment(network=wide, dataset=dataset, ranking=ranking, mixed_precision=args)

    return build


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_multiple_of_the_recipe_is_accepted(fp8_experiment, recipe):
    multiple = FP8_DIM_MULTIPLES[recipe]
    for factor in (1, 3):
        width = factor * multiple
        network = {"hidden_size": width, "item_embedding_dim": 2 * width, "kv_channels": width // 2}
        config = fp8_experiment(
            recipe=recipe,
            network=network,
            ranking={"prediction_head_arch": (width, 7)},
            enable_fp8_for_prediction_head=True,
            pad_multiple=factor * FP8_ROW_MULTIPLES[recipe],
        )
        assert config.mixed_precision.linear_recipe == recipe
        for other in (width - 1, width + 1, width + multiple // 2):
            with pytest.raises(ConfigError, match=rf"hidden_size = {other} must be a multiple of {multiple} with"):
                fp8_experiment(recipe=recipe, network={**network, "hidden_size": other})


def test_widths_of_linears_that_are_not_in_fp8_are_free(fp8_experiment):
    assert fp8_experiment(ranking={"prediction_head_arch": (100, 1)})
    assert fp8_experiment(network={"item_embedding_dim": -1, "contextual_embedding_dim": 32})
    skipping = {"num_layers": 3, "item_embedding_dim": 20, "contextual_embedding_dim": 20}
    assert fp8_experiment(network=skipping, skip_first_last_layer=True)
    with pytest.raises(ConfigError, match="item_embedding_dim = 20"):
        fp8_experiment(network=skipping)
    no_contexts = {"contextual_features": ()}
    assert fp8_experiment(network={"contextual_embedding_dim": 20}, dataset=no_contexts)
    with pytest.raises(ConfigError, match="contextual_embedding_dim = 20"):
        fp8_experiment(network={"contextual_embedding_dim": 20}, dataset={"contextual_features": ("age",)})
    only_head = {"num_layers": 2, "kv_channels": 8, "num_attention_heads": 1}
    assert fp8_experiment(network=only_head, skip_first_last_layer=True, enable_fp8_for_prediction_head=True)
    with pytest.raises(ConfigError, match="kv_channels = 8 times num_attention_heads = 1"):
        fp8_experiment(network=only_head, enable_fp8_for_prediction_head=True)


def test_the_head_alone_still_needs_the_width_that_it_takes(fp8_experiment):
    options = {"skip_first_last_layer": True, "enable_fp8_for_prediction_head": True}
    with pytest.raises(ConfigError, match="hidden_size = 20 must be a multiple of 16"):
        fp8_experiment(network={"hidden_size": 20}, **options)


@pytest.mark.parametrize("contexts", [(), ("age",)])
def test_contexts_of_synthetic_data_have_a_projection_where_there_are_any(fp8_experiment, contexts):
    names = ("item", *contexts)
    dataset = BenchmarkDatasetArgs(
        tuple(FeatureArgs((name,), 1) for name in names),
        tuple(EmbeddingArgs((name,), name, 10) for name in names),
        "item",
        contexts,
    )
    config = dataclasses.replace(fp8_experiment(), dataset=dataset)
    network = dataclasses.replace(config.network, contextual_embedding_dim=20)
    if not contexts:
        assert dataclasses.replace(config, network=network)
        return
    with pytest.raises(ConfigError, match="contextual_embedding_dim = 20 must be a multiple of 16"):
        dataclasses.replace(config, network=network)


@pytest.mark.parametrize(("heads", "kv_channels", "allowed"), [(3, 24, "16 or 32"), (1, 8, "16"), (5, 40, "32 or 48")])
def test_the_suggested_kv_channels_are_accepted(fp8_experiment, heads, kv_channels, allowed):
    network = {"num_attention_heads": heads}
    with pytest.raises(ConfigError, match=f"such as kv_channels = {allowed}$"):
        fp8_experiment(network={**network, "kv_channels": kv_channels})
    for suggestion in allowed.split(" or "):
        assert fp8_experiment(network={**network, "kv_channels": int(suggestion)})


def test_parts_of_widths_suit_the_recipe_too(fp8_experiment):
    """Of ranks that share the heads."""
    peers = {"tensor_parallel": TensorModelParallelArgs(2)}
    four_heads = fp8_experiment(network={"num_attention_heads": 4, "kv_channels": 8})
    assert dataclasses.replace(four_heads, **peers)
    with pytest.raises(ConfigError, match="kv_channels = 8 times num_attention_heads = 4 / 4 must be a multiple of 16"):
        dataclasses.replace(four_heads, tensor_parallel=TensorModelParallelArgs(4))
    for hidden, fits in (((32, 1), True), ((16, 1), False), ((32, 16, 1), True), ((32, 16, 16, 1), False)):
        ranking = {"prediction_head_arch": hidden}
        config = fp8_experiment(ranking=ranking, enable_fp8_for_prediction_head=True)
        if fits:
            assert dataclasses.replace(config, **peers)
            continue
        with pytest.raises(ConfigError, match="hidden width 16, whose part on each rank must be a multiple of 16"):
            dataclasses.replace(config, **peers)


def test_retrieval_has_no_head_for_fp8(fp8_experiment):
    config = fp8_experiment(enable_fp8_for_prediction_head=True)
    retrieval = {"task": "retrieval", "ranking": None, "retrieval": RetrievalArgs()}
    with pytest.raises(ConfigError, match="enable_fp8_for_prediction_head = True must be False in a retrieval run"):
        dataclasses.replace(config, **retrieval)
    assert dataclasses.replace(fp8_experiment(), **retrieval)


def test_delayed_reads_its_options_in_fp8():
    args = MixedPrecisionArgs("fp8", "delayed", amax_history_len=4, amax_compute_algo="Most_Recent", margin=16)
    assert (args.amax_history_len, args.amax_compute_algo, args.margin) == (4, "most_recent", 16)


@pytest.mark.parametrize(
    ("args", "linears", "attention"),
    [
        (MixedPrecisionArgs(hstu_attn_quantization_mode="per-block"), False, False),
        (MixedPrecisionArgs("FP8"), True, False),
        (MixedPrecisionArgs("fp8", linear_recipe=None, hstu_attn_quantization_mode="128x1"), False, True),
        (MixedPrecisionArgs("fp8", hstu_attn_quantization_mode="fp8"), True, True),
    ],
)
def test_linears_and_attention_are_chosen_independently(args, linears, attention):
    assert (args.has_fp8_linears, args.has_fp8_attention) == (linears, attention)
