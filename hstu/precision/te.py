"""Linears in FP8 by Transformer Engine, around parameters that stay ours.

``te.Linear`` is built on the meta device, without weights, and given the parameters of the :class:`Linear` it serves:
they stay float32, are quantized straight from float32 in each pass, and keep their names in checkpoints. Its cache of
quantized weights (``is_first_microbatch``) is never used: a cached weight is a stale weight as soon as a step is taken.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn

from genrec.hstu.precision.recipes import LinearRecipe
from genrec.hstu.precision.region import fp8_region

# Where a tensor's scale and amax lie in Transformer Engine's state of a linear: (which state, which column).
_PLACES = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad_output": ("scaling_bwd", 0)}


@functools.cache
def te_recipe(recipe: LinearRecipe) -> Any:
    """Transformer Engine's object for ``recipe``."""
    from transformer_engine.common import recipe as te

    hybrid = recipe.scaling_precision == "hybrid"
    format_ = te.Format.HYBRID if hybrid else te.Format.E4M3
    if recipe.name == "delayed":
        return te.DelayedScaling(
            margin=recipe.margin,
            fp8_format=format_,
            amax_history_len=recipe.amax_history_len,
            amax_compute_algo=recipe.amax_compute_algo,
        )
    kinds = {
        "tensorwise": te.Float8CurrentScaling,
        "blockwise": te.Float8BlockScaling,
        "mxfp8": te.MXFP8BlockScaling,
    }
    return kinds[recipe.name](fp8_format=format_)


class TransformerEngineLinear:
    """What computes a linear's product in FP8; built when it is first needed, which takes a GPU.

    Not a module: the parameters belong to the linear, and Transformer Engine's pickled state has no place in a
    checkpoint.
    """

    def __init__(self, linear: nn.Linear, recipe: LinearRecipe) -> None:
        self.linear = linear
        self.recipe = recipe
        self._module: Any = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in_features), T a multiple of the recipe's -> (T, out_features)."""
        module = self._with_parameters()
        with fp8_region() as region:
            if self.recipe not in region.autocasts:
                region.autocasts.add(self.recipe)
                region.exits.enter_context(_autocast(self.recipe))
            # Its product rounds a float32 bias to bfloat16; added afterwards the bias stays what it is.
            module.gemm_bias_unfused_add = module.apply_bias and x.dtype == torch.float32
            # float32 weights with 16-bit activations: Transformer Engine allows it under autocast alone.
            with torch.autocast("cuda", dtype=x.dtype, enabled=x.dtype != torch.float32):
                product: Tensor = module(x)
        return product

    def tensors(self) -> dict[str, Tensor]:
        """Amax histories (L,) and scales (1,) by role, as views of what Transformer Engine works with."""
        if not self.recipe.has_state:
            return {}
        module = self._with_parameters()
        if not module.fp8_meta_tensors_initialized:
            with torch.no_grad(), _autocast(self.recipe):
                module.init_fp8_metadata(num_gemms=1)
        views = {}
        for role, (place, column) in _PLACES.items():
            state = module.fp8_meta[place]
            views[f"amax_history.{role}"] = state.amax_history[:, column]
            views[f"scale.{role}"] = state.scale[column : column + 1]
        return views

    def _with_parameters(self) -> Any:
        linear = self.linear
        if self._module is None:
            import transformer_engine.pytorch as te

            self._module = te.Linear(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                params_dtype=torch.float32,
                device="meta",
            )
        # Each time: moving or casting a module may replace its parameters.
        self._module._parameters["weight"] = linear.weight
        if linear.bias is not None:
            self._module._parameters["bias"] = linear.bias
        return self._module


def _autocast(recipe: LinearRecipe) -> contextlib.AbstractContextManager[None]:
    """Transformer Engine's region. Without a group, delayed scaling reduces amaxes over all ranks."""
    import transformer_engine.pytorch as te

    region: contextlib.AbstractContextManager[None] = te.autocast(enabled=True, recipe=te_recipe(recipe))
    return region
