"""What Transformer Engine's linear is told of the ranks that share it; with a stand-in for it, on any machine."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from genrec.configs.schema import MixedPrecisionArgs
from genrec.hstu.linear import make_linear
from genrec.hstu.parallel import TensorParallel
from genrec.hstu.precision import te as ours

GROUP = object()  # of the peers, which nothing here talks to


@pytest.fixture
def engine(monkeypatch):
    """``transformer_engine.pytorch`` with a linear that treats its quantizers as that of version 2.20 does."""
    linear = ModuleType("transformer_engine.pytorch.module.linear")

    def set_group(quantizer, group):
        quantizer.with_amax_reduction, quantizer.amax_reduction_group = group is not None, group

    linear.set_quantizer_amax_reduction_group = set_group

    class TELinear(torch.nn.Module):
        def __init__(self, in_features, out_features, **given):
            super().__init__()
            self.features, self.given, self.apply_bias = (in_features, out_features), given, given["bias"]
            self.quantizers = {}

        def init_fp8_metadata(self, num_gemms):
            if not self.quantizers:
                make = lambda count: [SimpleNamespace() for _ in range(count)]  # noqa: E731
                self.quantizers = {"scaling_fwd": make(3), "scaling_bwd": make(2)}

        def forward(self, x):
            self.init_fp8_metadata(1)
            for place in ("scaling_fwd", "scaling_bwd"):  # its weight's it leaves alone
                linear.set_quantizer_amax_reduction_group(self.quantizers[place][0], None)
            return torch.nn.functional.linear(x, self._parameters["weight"])

    pytorch = ModuleType("transformer_engine.pytorch")
    pytorch.Linear, pytorch.autocast = TELinear, lambda **given: contextlib.nullcontext()
    module = ModuleType("transformer_engine.pytorch.module")
    module.linear = linear
    package = ModuleType("transformer_engine")
    package.pytorch, pytorch.module = pytorch, module
    for name, stand_in in (("", package), (".pytorch", pytorch), (".pytorch.module", module)):
        monkeypatch.setitem(sys.modules, f"transformer_engine{name}", stand_in)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch.module.linear", linear)
    monkeypatch.setattr(ours, "te_recipe", lambda recipe: recipe)
    ours._keep_shared_amaxes.cache_clear()
    yield
    ours._keep_shared_amaxes.cache_clear()


def run(recipe, shares):
    args = MixedPrecisionArgs("fp8", recipe, backend="te")
    linear = make_linear(64, 128, bias=True, precision=args)
    if shares:
        linear.share_out(TensorParallel(rank=1, size=2, group=GROUP), shares)
    linear(torch.randn(32, linear.in_features))
    return linear._engine._module


def group_of(module, role):
    place, column = ours._PLACES[role]
    return getattr(module.quantizers[place][column], "amax_reduction_group", None)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(
    ("shares", "mode", "parts"),
    [("rows", "column", {"weight", "grad_output"}), ("columns", "row", {"input", "weight"})],
)
def test_a_shared_linear_talks_to_its_peers(shares, mode, parts):
    module = run("tensorwise", shares)
    assert module.features == (64, 128)  # the whole's, of which it takes its part
    assert (module.given["parallel_mode"], module.given["tp_size"], module.given["tp_group"]) == (mode, 2, GROUP)
    assert tuple(module._parameters["weight"].shape) == ((64, 64) if shares == "rows" else (128, 32))
    assert {role for role in ours._PLACES if group_of(module, role) is GROUP} == parts
    assert module.quantizers["scaling_fwd"][1].with_amax_reduction is True


@pytest.mark.usefixtures("engine")
def test_no_group_where_there_is_nothing_to_share():
    alone = run("tensorwise", "")
    assert (alone.given["parallel_mode"], alone.given["tp_size"], alone.given["tp_group"]) == (None, 1, None)
    blocks = run("blockwise", "rows")
    assert not any(group_of(module, role) for module in (alone, blocks) for role in ours._PLACES)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize(("shares", "apart"), [("rows", False), ("columns", True), ("", False)])
def test_a_bias_of_shared_columns_is_added_to_the_sum(shares, apart):
    module = run("tensorwise", shares)
    args = MixedPrecisionArgs("fp8", "tensorwise", backend="te")
    assert module.gemm_bias_unfused_add  # of float32 always
    linear = make_linear(64, 128, bias=True, precision=args)
    if shares:
        linear.share_out(TensorParallel(rank=1, size=2, group=GROUP), shares)
    linear._engine._module = module
    with pytest.raises(RuntimeError, match="dtype"):  # the stand-in has no autocast
        linear(torch.randn(32, linear.in_features, dtype=torch.bfloat16))
    assert module.gemm_bias_unfused_add == apart
