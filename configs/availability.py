"""What the configuration can name and this version does not have yet: refused before anything is built.

Parsing accepts it all, so that files written for recsys-examples parse, print and compare; training and ``--check`` ask
here first.
"""

from __future__ import annotations

from collections.abc import Iterator

from genrec.configs.schema import (
    ATTENTION_QUANTIZATIONS,
    LATER_DATASET_NAMES,
    MOVIELENS_NAMES,
    BenchmarkDatasetArgs,
    ExperimentConfig,
    UnavailableError,
    find_cutlass_module,
)

SCALES_ACROSS_HEADS = ("fp8", "per-batch", "per-tensor")  # "fp8" scales gradients so
MAX_HEAD_DIM = 256  # of the Triton kernels


def check_available(config: ExperimentConfig) -> None:
    """Raise UnavailableError, naming every feature that a run would lack. What the device lacks is not asked here."""
    missing = [*_missing_of_run(config), *_missing_of_network(config), *_missing_of_data(config)]
    if missing:
        raise UnavailableError(f"not available in this version: {'; '.join(missing)}")


def _missing_of_run(config: ExperimentConfig) -> Iterator[str]:
    if config.task == "retrieval":
        yield "retrieval, ranking is"
    if config.tensor_parallel.tensor_model_parallel_size > 1:
        yield from _missing_of_tensor_parallelism(config)


def _missing_of_tensor_parallelism(config: ExperimentConfig) -> Iterator[str]:
    asked = f"TensorModelParallelArgs.tensor_model_parallel_size = {config.tensor_parallel.tensor_model_parallel_size}"
    if config.trainer.dense_parallel == "fsdp2":
        yield f"{asked} with TrainerArgs.dense_parallel = 'fsdp2', 'ddp' is"
    mode = config.mixed_precision.hstu_attn_quantization_mode
    if config.mixed_precision.has_fp8_attention and mode in SCALES_ACROSS_HEADS:
        # The scale would be that of a rank's heads, and change with the number of ranks.
        others = ", ".join(repr(m) for m in ATTENTION_QUANTIZATIONS if m not in (*SCALES_ACROSS_HEADS, "128x1"))
        yield f"{asked} with MixedPrecisionArgs.hstu_attn_quantization_mode = {mode!r}, {others} are"


def _missing_of_network(config: ExperimentConfig) -> Iterator[str]:
    network = config.network
    if config.mixed_precision.has_fp8_attention:
        yield from _missing_of_fp8_attention(config)
    if network.kernel_backend == "cutlass":
        yield from _missing_of_cutlass(config)
    if network.dtype_str == "float16":
        yield "NetworkArgs.dtype_str = 'float16', whose gradients need loss scaling, 'bfloat16' and 'float32' are"
    if network.embedding_backend is not None:
        yield f"NetworkArgs.embedding_backend = {network.embedding_backend!r}, an inference option, None is"


def _missing_of_fp8_attention(config: ExperimentConfig) -> Iterator[str]:
    network, precision = config.network, config.mixed_precision
    asked = f"MixedPrecisionArgs.hstu_attn_quantization_mode = {precision.hstu_attn_quantization_mode!r}"
    kind = network.relative_bias
    if kind in ("table", "smooth") or (kind == "auto" and network.layer_style == "research"):
        named = f"NetworkArgs.relative_bias = {kind!r}" if kind != "auto" else "NetworkArgs.layer_style = 'research'"
        yield f"{asked} with a relative bias ({named}), 'bf16' and NetworkArgs.relative_bias = 'none' are"
    if precision.backend == "emulated" and network.kernel_backend == "triton":
        emulated = f"{asked} with NetworkArgs.kernel_backend = 'triton' and MixedPrecisionArgs.backend = 'emulated'"
        yield f"{emulated}, which is PyTorch, 'auto' and 'pytorch' are"
    runs_in_triton = precision.backend == "te" and network.kernel_backend != "pytorch"
    if runs_in_triton and network.kv_channels > MAX_HEAD_DIM:
        wide = f"NetworkArgs.kv_channels = {network.kv_channels} with {asked}, at most {MAX_HEAD_DIM} is"
        yield f"{wide}, and any with MixedPrecisionArgs.backend = 'emulated'"


def _missing_of_cutlass(config: ExperimentConfig) -> Iterator[str]:
    if find_cutlass_module() is None:
        needs = "FBGEMM's HSTU attention (package fbgemm-gpu-hstu), which is not installed"
        yield f"NetworkArgs.kernel_backend = 'cutlass', which needs {needs}, 'auto', 'triton' and 'pytorch' are"
    if config.mixed_precision.has_fp8_attention:
        mode = config.mixed_precision.hstu_attn_quantization_mode
        asked = f"MixedPrecisionArgs.hstu_attn_quantization_mode = {mode!r}"
        yield f"NetworkArgs.kernel_backend = 'cutlass' with {asked}, 'auto', 'triton' and 'pytorch' are"


def _missing_of_data(config: ExperimentConfig) -> Iterator[str]:
    dataset = config.dataset
    if not isinstance(dataset, BenchmarkDatasetArgs):
        if dataset.dataset_name in LATER_DATASET_NAMES:
            yield f"DatasetArgs.dataset_name = {dataset.dataset_name!r}, {', '.join(map(repr, MOVIELENS_NAMES))} are"
        return
    for group in dataset.feature_args:
        several = group.is_jagged or group.max_sequence_length > 1
        for name in sorted(set(group.feature_names) & set(dataset.contextual_feature_names)):
            if several:
                yield f"contextual feature {name!r} with other than one value a user"
