"""Which FP8 linears and FP8 attention can run here; asked before anything is built.

The emulation runs every recipe on every device. Transformer Engine knows itself what the GPU and its libraries lack, in
version 2.20: "delayed" and "tensorwise" need compute capability 8.9, "blockwise" 9.0 and CUDA 12.9, "mxfp8" 10.0 (and
not yet 12.0). What a recipe needs of shapes is in ``FP8_ROW_MULTIPLES`` and ``FP8_DIM_MULTIPLES``; measured on an H200
for the first three recipes, hybrid and e4m3 alike (benchmarks/results/fp8_linear_shapes.json), that is:

====================  ====  ===========  ============
multiples of          rows  in_features  out_features
====================  ====  ===========  ============
forward alone            8           16             8
forward and backward    16           16            16
====================  ====  ===========  ============

"mxfp8" has 32 from its blocks of 32 values; there was no such GPU to measure on.

Attention in FP8 is ours, in Triton, in every mode from compute capability 8.9 on.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping

import torch

from genrec.configs.schema import LINEAR_RECIPES, MixedPrecisionArgs, NetworkArgs, UnavailableError

# The functions of transformer_engine.pytorch that say whether a recipe works here.
QUERIES = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
ATTENTION_CAPABILITY = (8, 9)
NOT_INSTALLED = "Transformer Engine is not installed (the head of requirements/cuda.txt has the commands)"


def check_linear_available(args: MixedPrecisionArgs, device_type: str) -> None:
    """Raise UnavailableError unless FP8 linears, if ``args`` ask for any, run on ``device_type`` ("cpu" or "cuda")."""
    if not args.has_fp8_linears or args.backend == "emulated":
        return
    assert args.linear_recipe is not None
    capabilities = linear_capabilities() if device_type == "cuda" else _nothing("it needs a GPU, this run is on a CPU")
    reason = capabilities[args.linear_recipe]
    if not reason:
        return
    asked = f"MixedPrecisionArgs.linear_recipe = {args.linear_recipe!r} with backend = 'te' (Transformer Engine)"
    working = [repr(recipe) for recipe, why_not in capabilities.items() if not why_not]
    others = f"{', '.join(working)} are, and " if working else ""
    emulated = "MixedPrecisionArgs.backend = 'emulated' runs the same recipe anywhere, slower than without FP8"
    raise UnavailableError(f"{asked} is not available here: {reason}; {others}{emulated}")


def check_attention_available(args: MixedPrecisionArgs, network: NetworkArgs, device_type: str) -> None:
    """Raise UnavailableError unless FP8 attention, if ``args`` ask for any, runs on ``device_type``."""
    is_emulated = args.backend == "emulated" or network.kernel_backend == "pytorch"
    if not args.has_fp8_attention or is_emulated:
        return
    reason = _attention_reason(device_type)
    if reason:
        mode = args.hstu_attn_quantization_mode
        asked = f"MixedPrecisionArgs.hstu_attn_quantization_mode = {mode!r} with backend = 'te' (Triton in attention)"
        emulated = "MixedPrecisionArgs.backend = 'emulated' runs the same mode anywhere, slower than without FP8"
        raise UnavailableError(f"{asked} is not available here: {reason}; {emulated}")


def _attention_reason(device_type: str) -> str:
    """Why attention in FP8 has no kernels on ``device_type``; "" where it has."""
    if device_type != "cuda":
        return "it needs a GPU, this run is on a CPU"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability()
    if capability < ATTENTION_CAPABILITY:
        needed = ".".join(map(str, ATTENTION_CAPABILITY))
        return f"it needs compute capability {needed}, and this GPU has {'.'.join(map(str, capability))}"
    return ""


@functools.cache
def linear_capabilities() -> Mapping[str, str]:
    """By recipe, why Transformer Engine does not run it on the current GPU; "" where it does."""
    if not torch.cuda.is_available():
        return _nothing("PyTorch sees no GPU")
    try:
        import transformer_engine.pytorch as te

        answers = {recipe: getattr(te, query)(return_reason=True) for recipe, query in QUERIES.items()}
    except ModuleNotFoundError as error:
        return _nothing(NOT_INSTALLED if error.name == "transformer_engine" else _broken(error))
    # A library that is missing, was built for another torch or CUDA, or has another version than its Python part.
    except (ImportError, OSError, RuntimeError, AssertionError, AttributeError, TypeError) as error:
        return _nothing(_broken(error))
    return {recipe: "" if works else _sentence(reason) for recipe, (works, reason) in answers.items()}


def _nothing(reason: str) -> Mapping[str, str]:
    return dict.fromkeys(LINEAR_RECIPES, reason)


def _broken(error: Exception) -> str:
    return f"the installed Transformer Engine does not work with this PyTorch ({_sentence(str(error))})"


def _sentence(text: str) -> str:
    """The first line of a foreign message, to go inside a sentence of ours."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].rstrip(".:;") if lines else "no reason given"
