import dataclasses

import pytest

from genrec.configs import availability, schema
from genrec.configs.availability import check_available
from genrec.configs.schema import UnavailableError

pytestmark = pytest.mark.usefixtures("no_cutlass")


def fp8_attention(**changes):
    return schema.MixedPrecisionArgs("fp8", hstu_attn_quantization_mode="per-block", **changes)


PEERS = schema.TensorModelParallelArgs(2)
MISSING = [
    ({"tensor_parallel": PEERS, "trainer": {"dense_parallel": "fsdp2"}},
     "tensor_model_parallel_size = 2 with TrainerArgs.dense_parallel = 'fsdp2', 'ddp' is"),
    *(({"tensor_parallel": PEERS,
        "mixed_precision": schema.MixedPrecisionArgs("fp8", None, hstu_attn_quantization_mode=m)},
       f"hstu_attn_quantization_mode = {m!r}, 'bf16', '1xdim', 'per-block', 'per-head' are")
      for m in ("fp8", "per-batch", "per-tensor")),
    ({"mixed_precision": fp8_attention(), "network": {"layer_style": "research"}},
     "MixedPrecisionArgs.hstu_attn_quantization_mode = 'per-block' with a relative bias (NetworkArgs.layer_style = "
     "'research'), 'bf16' and NetworkArgs.relative_bias = 'none' are"),
    ({"mixed_precision": fp8_attention(), "network": {"relative_bias": "smooth"}}, "relative_bias = 'smooth'), 'bf16'"),
    ({"mixed_precision": fp8_attention(), "network": {"kv_channels": 512}},
     "NetworkArgs.kv_channels = 512 with MixedPrecisionArgs.hstu_attn_quantization_mode = 'per-block', at most 256 is"),
    ({"mixed_precision": fp8_attention(backend="emulated"), "network": {"kernel_backend": "triton"}},
     "with NetworkArgs.kernel_backend = 'triton' and MixedPrecisionArgs.backend = 'emulated', which is PyTorch"),
    ({"network": {"kernel_backend": "cutlass"}},
     "NetworkArgs.kernel_backend = 'cutlass', which needs FBGEMM's HSTU attention (package fbgemm-gpu-hstu), which "),
    ({"network": {"kernel_backend": "cutlass"},
      "mixed_precision": schema.MixedPrecisionArgs("fp8", hstu_attn_quantization_mode="per-head")},
     "kernel_backend = 'cutlass' with MixedPrecisionArgs.hstu_attn_quantization_mode = 'per-head', 'auto', 'triton'"),
    ({"network": {"dtype_str": "float16"}}, "loss scaling"),
    ({"dataset": {"dataset_name": "kuairand-1k"}}, "DatasetArgs.dataset_name = 'kuairand-1k'"),
    ({"dataset": {"dataset_name": "custom"}}, "DatasetArgs.dataset_name = 'custom', 'ml-100k', 'ml-1m',"),
    ({"network": {"embedding_backend": "NVEmb"}}, "embedding_backend"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), MISSING)
def test_a_feature_of_a_later_version_parses_and_is_named(experiment, changes, named):
    with pytest.raises(UnavailableError, match="not available in this version") as caught:
        check_available(experiment(**changes))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_missing_features_are_named_at_once(experiment):
    config = experiment(network={"kernel_backend": "cutlass"}, dataset={"dataset_name": "custom"})
    with pytest.raises(UnavailableError, match=r"kernel_backend.*dataset_name"):
        check_available(config)


def test_cutlass_is_not_refused_where_it_is_installed(experiment, monkeypatch):
    monkeypatch.setattr(availability, "find_cutlass_module", lambda: "hstu")
    check_available(experiment(network={"kernel_backend": "cutlass"}))


def test_retrieval_is_named(experiment):
    config = dataclasses.replace(experiment(), task="retrieval", ranking=None, retrieval=schema.RetrievalArgs())
    with pytest.raises(UnavailableError, match="retrieval"):
        check_available(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel": PEERS},
        {"tensor_parallel": PEERS, "mixed_precision": fp8_attention(linear_recipe=None)},
        {"trainer": {"nonfinite": "locate"}},
        {"trainer": {"pipeline_type": "native"}},
        {"trainer": {"pipeline_type": "prefetch"}},
        {"mixed_precision": schema.MixedPrecisionArgs("fp8")},
        {"mixed_precision": schema.MixedPrecisionArgs(hstu_attn_quantization_mode="per-block")},
        {"mixed_precision": fp8_attention()},
        {"mixed_precision": fp8_attention(), "network": {"layer_style": "research", "relative_bias": "none"}},
        {"mixed_precision": fp8_attention(backend="emulated"), "network": {"kv_channels": 512}},
        {"mixed_precision": fp8_attention(), "network": {"kernel_backend": "pytorch", "kv_channels": 512}},
        {"mixed_precision": fp8_attention(), "network": {"kernel_backend": "triton"}},
    ],
)
def test_what_is_there_is_not_refused(experiment, changes):
    check_available(experiment(**changes))


def test_dynamic_tables_are_there(experiment):
    table = schema.DynamicEmbeddingArgs(("item",), "item", 10)
    dataset = schema.BenchmarkDatasetArgs((schema.FeatureArgs(("item",), 4),), (table,), "item", ())
    check_available(dataclasses.replace(experiment(), dataset=dataset))


def test_contexts_have_one_value(experiment):
    features = (schema.FeatureArgs(("item",), 4), schema.FeatureArgs(("tags",), 3))
    tables = (schema.EmbeddingArgs(("item",), "item", 10), schema.EmbeddingArgs(("tags",), "tags", 10))
    dataset = schema.BenchmarkDatasetArgs(features, tables, "item", ("tags",))
    with pytest.raises(UnavailableError, match="'tags' with other than one value a user"):
        check_available(dataclasses.replace(experiment(), dataset=dataset))


def test_the_default_configuration_is_available(experiment):
    check_available(experiment())
