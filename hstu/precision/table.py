"""Which linear and which attention of a model runs in which precision, as rows of a table."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from genrec.hstu.layer import HSTULayer
from genrec.hstu.linear import Linear

# The first number in a name: of the layer, or of an MLP's layer.
_INDEX = re.compile(r"\.(\d+)(?=\.|$)")


@dataclass(frozen=True)
class PrecisionRow:
    """One linear or attention.

    kind: "linear" or "attention". shape: "128 -> 512" or "4 heads of 64"; "128 -> 512 / 2" and "4 / 2 heads of 64"
    where 2 ranks share them. precision: "fp8 tensorwise hybrid (te)", "bfloat16"; evaluation: the same of evaluation
    mode. note: why it is not in FP8 where others may be.
    """

    module: str
    kind: str
    shape: str
    precision: str
    evaluation: str
    note: str = ""

    @property
    def is_fp8(self) -> bool:
        """Whether training runs it in FP8."""
        return self.precision.startswith("fp8")


def precision_rows(model: nn.Module, *, dtype: torch.dtype, float32_linears: Sequence[str] = ()) -> list[PrecisionRow]:
    """A row for every linear and attention of ``model``, in its order.

    dtype: of activations, which is what runs where FP8 does not; float32_linears: names of those fed in float32 all the
    same.
    """
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, HSTULayer):
            rows.append(_attention_row(name, module, _text(dtype)))
        elif isinstance(module, Linear):
            rows.append(_linear_row(name, module, _text(torch.float32 if name in float32_linears else dtype)))
    return rows


def collapsed(rows: Sequence[PrecisionRow]) -> list[PrecisionRow]:
    """Rows that differ in the number of their layer alone as one: "encoder.block.layers.0-7.uvqk"."""
    numbers: dict[PrecisionRow, list[int]] = {}
    for row in rows:
        match = _INDEX.search(row.module)
        alike = replace(row, module=_INDEX.sub(".#", row.module, count=1))
        numbers.setdefault(alike, []).extend([int(match[1])] if match else [])
    return [replace(row, module=row.module.replace(".#", f".{_ranges(found)}", 1)) for row, found in numbers.items()]


def _linear_row(name: str, linear: Linear, dtype: str) -> PrecisionRow:
    precision = dtype
    if linear.recipe is not None:
        precision = f"fp8 {linear.recipe.name} {linear.recipe.scaling_precision} ({linear.backend})"
    return PrecisionRow(
        module=name,
        kind="linear",
        shape=_linear_shape(linear),
        precision=precision,
        evaluation=precision if linear.during_eval else dtype,
        note=linear.why_not,
    )


def _attention_row(name: str, layer: HSTULayer, dtype: str) -> PrecisionRow:
    network, precision = layer.network, dtype
    if layer.quantization != "bf16":
        how = "emulated" if layer.attention_backend == "pytorch" else "triton"
        scaling = "plain cast" if layer.quantization == "fp8" else layer.quantization
        precision = f"fp8 {scaling} e4m3 ({how})"
    return PrecisionRow(
        module=name,
        kind="attention",
        shape=f"{network.num_attention_heads}{_shared(layer.tp.size)} heads of {network.kv_channels}",
        precision=precision,
        evaluation=precision if layer.quantizes_in_eval else dtype,
        note=layer.attention_why_not,
    )


def _linear_shape(linear: Linear) -> str:
    size = linear.tp.size
    if linear.shares == "rows":
        return f"{linear.in_features} -> {linear.out_features * size}{_shared(size)}"
    if linear.shares == "columns":
        return f"{linear.in_features * size}{_shared(size)} -> {linear.out_features}"
    return f"{linear.in_features} -> {linear.out_features}"


def _shared(num_ranks: int) -> str:
    return f" / {num_ranks}" if num_ranks > 1 else ""


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2,5"; in rising order."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
