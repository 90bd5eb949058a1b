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

from genrec.hstu.parallel import ALONE, PARTS, TensorParallel
from genrec.hstu.precision.recipes import LinearRecipe
from genrec.hstu.precision.region import fp8_region

# Where a tensor's scale and amax lie in Transformer Engine's state of a linear: (which state, which column).
_PLACES = {"input": ("scaling_fwd", 0), "weight": ("scaling_fwd", 1), "grad_output": ("scaling_bwd", 0)}
# Transformer Engine's names for what of a weight is shared.
_PARALLEL_MODES = {"": None, "rows": "column", "columns": "row"}
_SHARED_AMAX = "genrec_tp_group"


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
        self.tp = ALONE
        self.shares = ""
        self._module: Any = None

    def share_out(self, tp: TensorParallel, shares: str) -> None:
        """The linear has become this rank's part of one that ``tp`` share; ``shares`` as in ``Linear``."""
        assert self._module is None
        self.tp, self.shares = tp, shares

    def __call__(self, x: Tensor) -> Tensor:
        """x: (T, in_features), T a multiple of the recipe's -> (T, out_features)."""
        module = self._with_parameters()
        with fp8_region() as region:
            if self.recipe not in region.autocasts:
                region.autocasts.add(self.recipe)
                region.exits.enter_context(_autocast(self.recipe))
            if self.shares and self.recipe.name == "tensorwise":
                self._share_amaxes(module)
            # Its product rounds a float32 bias to bfloat16; added afterwards the bias stays what it is. A bias of
            # shared columns is added once, to the sum over ranks.
            module.gemm_bias_unfused_add = module.apply_bias and (x.dtype == torch.float32 or self.shares == "columns")
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

    def _share_amaxes(self, module: Any) -> None:
        """Let a scale be that of the whole tensor where this rank has a part: Transformer Engine would take the part's.

        Its own amaxes of delayed scaling it reduces over all ranks.
        """
        module.init_fp8_metadata(num_gemms=1)
        _keep_shared_amaxes()
        for role in PARTS[self.shares]:
            place, column = _PLACES[role]
            quantizer = module.quantizers[place][column]
            setattr(quantizer, _SHARED_AMAX, self.tp.group)
            quantizer.with_amax_reduction, quantizer.amax_reduction_group = True, self.tp.group

    def _with_parameters(self) -> Any:
        linear = self.linear
        if self._module is None:
            import transformer_engine.pytorch as te

            # It wants the features of the whole.
            in_parts, out_parts = {"": (1, 1), "rows": (1, self.tp.size), "columns": (self.tp.size, 1)}[self.shares]
            self._module = te.Linear(
                linear.in_features * in_parts,
                linear.out_features * out_parts,
                bias=linear.bias is not None,
                params_dtype=torch.float32,
                device="meta",
                parallel_mode=_PARALLEL_MODES[self.shares],
                tp_group=self.tp.group,
                tp_size=self.tp.size,
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


@functools.cache
def _keep_shared_amaxes() -> None:
    """Let te.Linear leave the groups alone that ``_share_amaxes`` has given to quantizers.

    From version 2.18 on it sets them in each pass: to None without sequence parallelism.
    """
    from transformer_engine.pytorch.module import linear

    name = "set_quantizer_amax_reduction_group"
    theirs = getattr(linear, name, None)
    if theirs is None:
        return

    def ours(quantizer: Any, group: Any) -> None:
        theirs(quantizer, getattr(quantizer, _SHARED_AMAX, group))

    setattr(linear, name, ours)
