"""Every linear of genrec is made here, so that what runs in which precision is decided in one place."""

from __future__ import annotations

from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrec.configs.schema import ConfigError, MixedPrecisionArgs
from genrec.hstu.parallel import (
    ALONE,
    PARTS,
    Split,
    TensorParallel,
    copy_to_region,
    reduce_from_region,
    share_parameter,
)
from genrec.hstu.precision.delayed import ROLES, DelayedState
from genrec.hstu.precision.emulation import emulated_linear
from genrec.hstu.precision.recipes import LinearRecipe, linear_recipe, num_pad_rows
from genrec.hstu.precision.region import FINITE_WATCH, fp8_region
from genrec.hstu.precision.te import TransformerEngineLinear


class Linear(nn.Linear):
    """y = x W^T + b in the dtype of ``x``, by PyTorch, by Transformer Engine in FP8 or by the emulation of FP8.

    Parameters are the same under all three and stay float32, which is what the optimizer updates: PyTorch casts them to
    the dtype of ``x`` where it uses them, FP8 quantizes them straight from float32, so that checkpoints fit each other
    and no cast of an old weight is ever used. FP8 needs rows in multiples of ``recipe.pad_multiple``: others are
    completed with zero rows here, whose results are cut off again. Without rows there is one multiple of zero rows.

    recipe: None for PyTorch. backend: "torch", "te" or "emulated". during_eval: whether FP8 stays on in evaluation
    mode. why_not: why this linear is not in FP8 where others may be.

    Shared between ranks (``share_out``), it holds its part of the weight and has the features of that part; ``tp`` are
    the ranks, ``shares`` is "rows" or "columns" of the weight, and ``splits`` says how each parameter is shared.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        recipe: LinearRecipe | None = None,
        backend: str = "torch",
        during_eval: bool = False,
        why_not: str = "",
    ) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.recipe = recipe
        self.backend = backend
        self.during_eval = during_eval
        self.why_not = why_not
        self.tp = ALONE
        self.shares = ""
        self.splits: dict[str, Split] = {}
        self.state: DelayedState | None = None
        self._engine: TransformerEngineLinear | None = None
        if recipe is not None and backend == "te":
            self._engine = TransformerEngineLinear(self, recipe)

    def reset_parameters(self) -> None:
        """Xavier-uniform weights and zero biases, drawn from torch's global generator."""
        nn.init.xavier_uniform_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def share_out(self, tp: TensorParallel, shares: str, *, num_blocks: int = 1) -> None:
        """Keep this rank's part of the weight, and let ``forward`` work with the peers.

        shares: "rows" of the weight and the bias: from an x that peers have alike to this rank's part of y.
        "columns": from this rank's part of x to a y that peers have alike, a bias with them.
        """
        assert not self.shares and shares in ("rows", "columns")
        self.tp, self.shares = tp, shares
        self.splits = {"weight": Split(0 if shares == "rows" else 1, num_blocks)}
        if shares == "rows" and self.bias is not None:
            self.splits["bias"] = Split(0, num_blocks)
        for name, split in self.splits.items():
            share_parameter(self, name, split, tp)
        self.out_features, self.in_features = self.weight.shape
        if self._engine is not None:
            self._engine.share_out(tp, shares)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., in_features) -> (..., out_features)."""
        in_fp8 = self.recipe is not None and (self.training or self.during_eval)
        if in_fp8 and self._engine is not None:  # which talks to the peers itself
            return self._padded_product(x, self.bias)
        if self.shares == "rows":
            x = copy_to_region(x, self.tp)
        bias = None if self.shares == "columns" else self.bias
        if in_fp8:
            product = self._padded_product(x, bias)
        else:
            product = F.linear(x, self.weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
        if self.shares == "columns":
            product = reduce_from_region(product, self.tp)
            product = product if self.bias is None else product + self.bias.to(x.dtype)
        return product

    def fp8_tensors(self) -> dict[str, Tensor]:
        """What delayed scaling remembers, as the live tensors; empty where there is nothing to remember.

        "amax_history.input" (L,), "scale.input" (1,), and the same of "weight" and "grad_output".
        """
        if self.recipe is None or not self.recipe.has_state:
            return {}
        if self._engine is not None:
            return self._engine.tensors()
        return self._delayed_state().state_dict()

    def scaling_report(self) -> dict[str, float]:
        """The amax and scale of each role, for messages: the last amaxes under delayed scaling, else the weight's.

        Scales of the other recipes are made in the cast and not kept; that of "tensorwise" follows from the amax.
        """
        assert self.recipe is not None
        tensors = self.fp8_tensors()
        if not tensors:
            amax = float(self.weight.detach().abs().max())
            scale = {"scale.weight": self.recipe.forward_format.max / amax} if amax else {}
            # Of a part the scale is that of the whole, whose amax is not known here.
            scales_by_own = self.recipe.name == "tensorwise" and not self.shares
            return {"amax.weight": amax, **(scale if scales_by_own else {})}
        # Before a pass ends, its amax is first in the history; afterwards it is last.
        histories = {role: tensors[f"amax_history.{role}"] for role in ROLES}
        report = {f"amax.{role}": float(torch.maximum(h[0], h[-1])) for role, h in histories.items()}
        return report | {f"scale.{role}": float(tensors[f"scale.{role}"]) for role in ROLES}

    def _padded_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (..., in_features) -> (..., out_features), in FP8 by rows in multiples of the recipe's."""
        assert self.recipe is not None
        rows = x.reshape(-1, self.in_features)
        num_padding = num_pad_rows(rows.shape[0], self.recipe.pad_multiple)
        if num_padding:
            product = self._product(F.pad(rows, (0, 0, 0, num_padding)), bias)[: rows.shape[0]]
        else:  # without the slice, whose backward copies the gradient
            product = self._product(rows, bias)
        return product.view(*x.shape[:-1], self.out_features)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: (T, in_features), T a positive multiple of the recipe's -> (T, out_features)."""
        assert self.recipe is not None
        if torch.is_grad_enabled():
            FINITE_WATCH.watch(x)
        if self._engine is not None:
            product = self._engine(x)
        else:
            state = self._delayed_state() if self.recipe.has_state else None
            with fp8_region() as region:
                product = emulated_linear(
                    x,
                    self.weight,
                    bias,
                    recipe=self.recipe,
                    state=state,
                    region=region,
                    parts=PARTS[self.shares],
                    tp=self.tp,
                )
        # A bias is a witness of its own: its gradient sums what enters the backward products, unquantized.
        if bias is None and product.requires_grad:
            product.register_hook(FINITE_WATCH.watch)
        return product

    def _delayed_state(self) -> DelayedState:
        """Made where the weight is, once that is not the meta device."""
        assert self.recipe is not None
        device = self.weight.device
        if self.state is None or self.state.scale["weight"].device != device:
            state = DelayedState(self.recipe, device)
            if self.state is not None and self.state.scale["weight"].device.type != "meta":
                state.load_state_dict(self.state.state_dict())
            self.state = state
        return self.state


def is_fp8(module: nn.Module) -> TypeGuard[Linear]:
    """Whether ``module`` is a linear that runs in FP8."""
    return isinstance(module, Linear) and module.recipe is not None


def make_linear(
    in_features: int,
    out_features: int,
    *,
    bias: bool,
    precision: MixedPrecisionArgs | None = None,
    why_not: str = "",
) -> Linear:
    """A linear as ``precision`` has it; with ``why_not``, in the network's dtype all the same, for that reason.

    Raises ConfigError for dimensions that the recipe can't take.
    """
    recipe = linear_recipe(precision)
    if precision is None or recipe is None or why_not:
        return Linear(in_features, out_features, bias=bias, why_not=why_not if recipe is not None else "")
    check_dims(in_features, out_features, recipe)
    return Linear(
        in_features,
        out_features,
        bias=bias,
        recipe=recipe,
        backend=precision.backend,
        during_eval=precision.fp8_during_eval,
    )


def check_dims(in_features: int, out_features: int, recipe: LinearRecipe) -> None:
    """Raise ConfigError unless both are multiples of what the recipe's products need."""
    multiple = recipe.dim_multiple
    if in_features % multiple or out_features % multiple:
        raise ConfigError(
            f"a linear of {in_features} -> {out_features} can't run in FP8 ({recipe.name}), which takes multiples of "
            f"{multiple} alone: choose other dimensions, or MixedPrecisionArgs.linear_recipe = None"
        )
