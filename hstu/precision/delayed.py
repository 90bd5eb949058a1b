"""Delayed scaling: a tensor is quantized with a scale that comes from the amaxes of earlier passes.

It saves reading a tensor twice, and costs state: for each tensor of a linear a history of amaxes and a scale. In a
pass every cast uses the scale that stood before it and takes its amax into history[0]; after it, the histories give the
next scales. For a history of 3 and "max" in e4m3 (max = 448), with amaxes 4, 2, 0, 7 in four passes:

    pass   quantized with   history at its end   history after the update   scale after the update
    1      1                [4, 0, 0]            [0, 0, 4]                  448 / 4
    2      112              [2, 0, 4]            [0, 4, 2]                  448 / 4
    3      112              [0, 4, 2]            [0, 4, 2]                  112, an amax of zero is no pass
    4      112              [7, 4, 2]            [0, 2, 7]                  448 / 7

Source: Transformer Engine 2.20, DelayedScaling: FP8GlobalStateManager.reduce_and_update_fp8_tensors
(pytorch/quantization.py) and kernel_bulk in recipe/delayed_scaling.cu, which is what it calls by default. An infinite
amax leaves the scale alone for as long as it is in the history.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from genrec.hstu.precision.formats import FP8Format
from genrec.hstu.precision.recipes import LinearRecipe
from genrec.hstu.precision.scaling import Quantized, quantize_with_scale, tensor_amax

ROLES = ("input", "weight", "grad_output")


class DelayedState:
    """What delayed scaling remembers of one linear: by role, ``amax_history`` (L,) and ``scale`` (1,), float32."""

    def __init__(self, recipe: LinearRecipe, device: torch.device | str) -> None:
        self.recipe = recipe
        self.amax_history = {role: torch.zeros(recipe.amax_history_len, device=device) for role in ROLES}
        self.scale = {role: torch.ones(1, device=device) for role in ROLES}

    def format(self, role: str) -> FP8Format:
        """The format that the tensor of ``role`` is quantized to."""
        return self.recipe.backward_format if role == "grad_output" else self.recipe.forward_format

    @torch.no_grad()
    def quantize(self, x: Tensor, role: str, *, record: bool) -> Quantized:
        """Quantize with the scale that stands; if ``record``, take the amax of ``x`` into the current pass."""
        if record:
            current = self.amax_history[role][:1]
            torch.maximum(current, tensor_amax(x), out=current)
        return quantize_with_scale(x, self.scale[role], self.format(role))

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors: "amax_history.input", "scale.input", "amax_history.weight", ..."""
        return {f"{kind}.{role}": tensors[role] for role in ROLES for kind, tensors in self._kinds().items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy ``tensors`` in. Raises ValueError unless names and shapes are those of ``state_dict``."""
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if given != shapes:
            raise ValueError(f"the state of delayed scaling must have the shapes {shapes}, got {given}")
        for name, tensor in own.items():
            tensor.copy_(tensors[name])

    def _kinds(self) -> dict[str, dict[str, Tensor]]:
        return {"amax_history": self.amax_history, "scale": self.scale}


@torch.no_grad()
def update_states(states: Sequence[DelayedState], roles: Sequence[str]) -> None:
    """End a pass: new scales for ``roles`` of ``states``, from amaxes that are the largest over all ranks.

    Collective: every rank must call it with the same linears in the same order.
    """
    updated = [(state, role) for state in states for role in roles]
    if not updated:
        return
    amaxes = torch.stack([state.amax_history[role][0] for state, role in updated])
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(amaxes, dist.ReduceOp.MAX)
    for (state, role), amax in zip(updated, amaxes, strict=True):
        _update(state.amax_history[role], state.scale[role], amax, recipe=state.recipe, fmt=state.format(role))


def _update(history: Tensor, scale: Tensor, amax: Tensor, *, recipe: LinearRecipe, fmt: FP8Format) -> None:
    """Roll ``history`` and set ``scale`` in place, without a device sync; ``amax`` () is that of the pass."""
    history[0] = amax
    chosen = amax if recipe.amax_compute_algo == "most_recent" else torch.nan_to_num(history, posinf=math.inf).amax()
    ran = amax != 0
    rolled = history.roll(-1)
    rolled[0] = 0.0
    history.copy_(torch.where(ran, rolled, history))
    new = torch.full_like(scale, fmt.max * 2.0**-recipe.margin) / chosen
    new = torch.where(new.isinf(), torch.finfo(torch.float32).max, new)
    scale.copy_(torch.where(ran & chosen.isfinite() & (chosen > 0), new, scale))
