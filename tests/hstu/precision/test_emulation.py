"""The emulated linear against products of dequantized operands in float64, and what zero rows must not change."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from genrec.hstu.precision.delayed import DelayedState
from genrec.hstu.precision.emulation import emulated_linear
from genrec.hstu.precision.formats import E4M3, E5M2
from genrec.hstu.precision.recipes import LinearRecipe
from genrec.hstu.precision.region import fp8_region
from genrec.hstu.precision.scaling import quantize_blockwise, quantize_mxfp8, quantize_tensorwise, quantize_with_scale

RECIPES = pytest.mark.parametrize("name", ["delayed", "tensorwise", "blockwise", "mxfp8"])
PRECISIONS = pytest.mark.parametrize("precision", ["hybrid", "e4m3"])
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])


def make_recipe(name: str, precision: str = "hybrid") -> LinearRecipe:
    return LinearRecipe(
        name=name,
        forward_format=E4M3,
        backward_format=E5M2 if precision == "hybrid" else E4M3,
        pad_multiple=16,
        dim_multiple=16,
        amax_history_len=4,
        amax_compute_algo="max",
        margin=0,
    )


def make_state(recipe: LinearRecipe) -> DelayedState | None:
    """A state in the middle of training, for recipes that have one."""
    if not recipe.has_state:
        return None
    state = DelayedState(recipe, "cpu")
    for role, scale in {"input": 90.0, "weight": 700.0, "grad_output": 3e4}.items():
        state.scale[role].fill_(scale)
    return state


def normal(*shape: int, seed: int, wide: float = 0.0) -> Tensor:
    """Standard normal, times 2^u with u from -wide to 0."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(*shape, generator=generator) * -wide
    return torch.randn(*shape, generator=generator) * torch.exp2(exponents)


def run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dy: Tensor,
    *,
    recipe: LinearRecipe,
    state: DelayedState | None = None,
) -> dict[str, Tensor | None]:
    """Output and gradients of one pass. ``state`` is by default a fresh one in the middle of training."""
    state = make_state(recipe) if state is None else state
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    with fp8_region() as region:
        y = emulated_linear(*leaves, recipe=recipe, state=state, region=region)
    y.backward(dy)
    gradients = [None if leaf is None else leaf.grad for leaf in leaves]
    return dict(zip(("y", "dx", "dw", "db"), (y.detach(), *gradients), strict=True))


def by_rows_and_columns(tensor: Tensor, role: str, recipe: LinearRecipe) -> tuple[Tensor, Tensor]:
    """Dequantized, as the product that contracts the columns sees it, and as the one that contracts the rows does."""
    fmt = recipe.backward_format if role == "grad_output" else recipe.forward_format
    state = make_state(recipe)
    if state is not None:
        both = quantize_with_scale(tensor, state.scale[role], fmt).dequantize()
        return both, both
    if recipe.name == "tensorwise":
        both = quantize_tensorwise(tensor, fmt).dequantize()
        return both, both
    if recipe.name == "blockwise" and role == "weight":
        both = quantize_blockwise(tensor, fmt, (128, 128)).dequantize()
        return both, both
    quantize = quantize_blockwise if recipe.name == "blockwise" else quantize_mxfp8
    return quantize(tensor, fmt).dequantize(), quantize(tensor.t(), fmt).dequantize().t()


def assert_rounded(actual: Tensor, exact: Tensor, dtype: torch.dtype, terms: Tensor) -> None:
    """``actual`` is ``exact`` rounded to ``dtype`` by way of float32; ``terms`` is the sum of the terms' sizes."""
    relative = torch.finfo(dtype).eps / 2 + 2.0**-24
    assert ((actual.double() - exact).abs() <= exact.abs() * relative + terms * 1e-13).all()


@RECIPES
@PRECISIONS
@DTYPES
@pytest.mark.parametrize(
    ("num_tokens", "in_features", "out_features"),
    [(1, 16, 16), (17, 48, 32), (128, 144, 16), (130, 272, 144), (300, 32, 80)],
)
def test_against_float64(num_tokens, in_features, out_features, name, precision, dtype) -> None:
    recipe = make_recipe(name, precision)
    x, dy = normal(num_tokens, in_features, seed=1, wide=8), normal(num_tokens, out_features, seed=2, wide=12)
    x, dy = x.to(dtype), dy.to(dtype)
    weight, bias = normal(out_features, in_features, seed=3) / 4, normal(out_features, seed=4)
    got = run(x, weight, bias, dy, recipe=recipe)

    x_rows, x_columns = by_rows_and_columns(x, "input", recipe)
    weight_rows, weight_columns = by_rows_and_columns(weight, "weight", recipe)
    dy_rows, dy_columns = by_rows_and_columns(dy, "grad_output", recipe)
    bias_rounded = bias.to(dtype).double()
    expected = {
        "y": (x_rows @ weight_rows.t() + bias_rounded, x_rows.abs() @ weight_rows.abs().t() + bias_rounded.abs()),
        "dx": (dy_rows @ weight_columns, dy_rows.abs() @ weight_columns.abs()),
        "dw": (dy_columns.t() @ x_columns, dy_columns.abs().t() @ x_columns.abs()),
    }
    for key, (exact, terms) in expected.items():
        assert_rounded(got[key], exact, dtype, terms)
    assert got["y"].dtype == got["dx"].dtype == dtype
    assert got["dw"].dtype == got["db"].dtype == torch.float32
    assert torch.equal(got["dw"], got["dw"].to(dtype).float())
    assert_rounded(got["db"], dy.double().sum(0), torch.float32, dy.double().abs().sum(0))


@RECIPES
@PRECISIONS
def test_is_near_the_unquantized_linear(name, precision) -> None:
    """A wrong orientation, a lost scale or a swapped format would be far off; quantizing costs some percent."""
    recipe = make_recipe(name, precision)
    x, dy = normal(160, 64, seed=1), normal(160, 96, seed=2) * 1e-4
    weight, bias = normal(96, 64, seed=3) / 8, normal(96, seed=4)
    state = DelayedState(recipe, "cpu") if recipe.has_state else None
    for _ in range(2):  # delayed scaling starts with a scale of 1
        got = run(x, weight, bias, dy, recipe=recipe, state=state)
    expected = {"y": x @ weight.t() + bias, "dx": dy @ weight, "dw": dy.t() @ x, "db": dy.sum(0)}
    for key, value in expected.items():
        assert (got[key] - value).norm() <= (0.08 if key != "db" else 1e-6) * value.norm(), key


@RECIPES
@PRECISIONS
@DTYPES
@pytest.mark.parametrize("num_tokens", [0, 1, 17, 33, 120, 128])
def test_zero_rows_change_no_bit(num_tokens, name, precision, dtype) -> None:
    recipe = make_recipe(name, precision)
    # Values over 30 binary orders: sums in float64 are not exact, so that their order would show.
    x = normal(num_tokens, 80, seed=1, wide=30).to(dtype)
    dy = normal(num_tokens, 48, seed=2, wide=30).to(dtype)
    weight, bias = normal(48, 80, seed=3, wide=30), normal(48, seed=4)
    alone = run(x, weight, bias, dy, recipe=recipe)
    for num_zeros in (1, 9, 15):
        zeros = torch.zeros(num_zeros, 80, dtype=dtype), torch.zeros(num_zeros, 48, dtype=dtype)
        padded = run(torch.cat([x, zeros[0]]), weight, bias, torch.cat([dy, zeros[1]]), recipe=recipe)
        for key in ("y", "dx"):
            assert torch.equal(padded[key][:num_tokens], alone[key]), key
        for key in ("dw", "db"):
            assert torch.equal(padded[key], alone[key]), key
        assert torch.equal(padded["y"][num_tokens:], bias.to(dtype).expand(num_zeros, -1))
        assert not padded["dx"][num_tokens:].any()


def mirrored(tensor: Tensor, dim: int, sign: float) -> Tensor:
    return torch.cat([tensor, sign * tensor.flip(dim)], dim)


@RECIPES
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5, 33, 64])
def test_zero_rows_change_no_bit_of_sums_that_cancel(num_tokens, name) -> None:
    """Every term has its negative, so that what is left is the rounding of float64, by the order of the terms.

    As one product of all rows, y and dx of the block recipes came out otherwise with more rows.
    """
    recipe = make_recipe(name)
    for seed in range(4):
        x = mirrored(normal(num_tokens, 130, seed=seed, wide=80), 1, 1.0)
        dy = mirrored(normal(num_tokens, 130, seed=seed + 10, wide=80), 1, 1.0)
        weight = mirrored(mirrored(normal(130, 130, seed=seed + 20, wide=80), 1, -1.0), 0, -1.0)
        for num_repeats in (1, 2):
            if num_repeats == 2:  # for dw too
                x, dy = mirrored(x, 0, 1.0), mirrored(dy, 0, -1.0)
            alone = run(x, weight, None, dy, recipe=recipe)
            for num_zeros in (1, 9, 15):
                zeros = torch.zeros(num_zeros, 260)
                padded = run(torch.cat([x, zeros]), weight, None, torch.cat([dy, zeros]), recipe=recipe)
                assert torch.equal(padded["y"][: len(x)], alone["y"])
                assert torch.equal(padded["dx"][: len(x)], alone["dx"])
                assert torch.equal(padded["dw"], alone["dw"])


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    num_tokens=st.integers(0, 40),
    num_zeros=st.integers(1, 140),
    wide=st.floats(0, 60),
    name=st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
)
def test_zero_rows_change_no_bit_whatever_the_values(seed, num_tokens, num_zeros, wide, name) -> None:
    recipe = make_recipe(name)
    x, dy = normal(num_tokens, 35, seed=seed, wide=wide), normal(num_tokens, 19, seed=seed + 1, wide=wide)
    weight, bias = normal(19, 35, seed=seed + 2, wide=wide), normal(19, seed=seed + 3)
    alone = run(x, weight, bias, dy, recipe=recipe)
    padding = torch.zeros(num_zeros, 35), torch.zeros(num_zeros, 19)
    padded = run(torch.cat([x, padding[0]]), weight, bias, torch.cat([dy, padding[1]]), recipe=recipe)
    assert torch.equal(padded["y"][:num_tokens], alone["y"])
    assert torch.equal(padded["dx"][:num_tokens], alone["dx"])
    assert torch.equal(padded["dw"], alone["dw"])
    assert torch.equal(padded["db"], alone["db"])


def test_zero_rows_leave_the_state_of_delayed_scaling() -> None:
    recipe = make_recipe("delayed")
    x, dy, weight = normal(9, 16, seed=1), normal(9, 32, seed=2), normal(32, 16, seed=3)
    states = [DelayedState(recipe, "cpu") for _ in range(2)]
    run(x, weight, None, dy, recipe=recipe, state=states[0])
    zeros = torch.zeros(7, 16), torch.zeros(7, 32)
    run(torch.cat([x, zeros[0]]), weight, None, torch.cat([dy, zeros[1]]), recipe=recipe, state=states[1])
    for name, tensor in states[0].state_dict().items():
        assert torch.equal(tensor, states[1].state_dict()[name]), name


@RECIPES
def test_no_tokens(name) -> None:
    weight, bias = normal(32, 16, seed=1), normal(32, seed=2)
    got = run(torch.zeros(0, 16), weight, bias, torch.zeros(0, 32), recipe=make_recipe(name))
    assert got["y"].shape == (0, 32)
    assert got["dx"].shape == (0, 16)
    assert torch.equal(got["dw"], torch.zeros(32, 16))
    assert torch.equal(got["db"], torch.zeros(32))


@RECIPES
def test_without_bias(name) -> None:
    recipe = make_recipe(name)
    x, dy, weight = normal(9, 16, seed=1), normal(9, 32, seed=2), normal(32, 16, seed=3)
    with_zeros = run(x, weight, torch.zeros(32), dy, recipe=recipe)
    without = run(x, weight, None, dy, recipe=recipe)
    assert without["db"] is None
    assert all(torch.equal(without[key], with_zeros[key]) for key in ("y", "dx", "dw"))


@RECIPES
def test_strides_do_not_matter(name) -> None:
    recipe = make_recipe(name)
    x, weight, dy = normal(66, 40, seed=1)[::2, ::2], normal(20, 48, seed=2).t(), normal(48, 1, seed=3).t()
    dy = dy.expand(33, 48)
    got = run(x, weight, None, dy, recipe=recipe)
    expected = run(x.contiguous(), weight.contiguous(), None, dy.contiguous(), recipe=recipe)
    assert all(torch.equal(got[key], expected[key]) for key in ("y", "dx", "dw"))


def saved_by(x: Tensor, weight: Tensor, bias: Tensor, recipe: LinearRecipe) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), fp8_region() as region:
        emulated_linear(x, weight, bias, recipe=recipe, state=make_state(recipe), region=region)
    return saved


@RECIPES
def test_backward_keeps_operands_in_fp8(name) -> None:
    x, weight, bias = normal(256, 128, seed=1), normal(384, 128, seed=2), normal(384, seed=3)
    leaves = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    saved = saved_by(*leaves, make_recipe(name))
    in_fp8 = [tensor for tensor in saved if tensor.dtype == E4M3.dtype]
    assert sorted(tensor.numel() for tensor in in_fp8) == [256 * 128, 384 * 128]
    others = sum(tensor.untyped_storage().nbytes() for tensor in saved if tensor.dtype != E4M3.dtype)
    assert others <= (256 + 384) * 128 // 32 * 4, "beside them, scales"


@RECIPES
@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_wanted_gradients_are_computed(wanted, name) -> None:
    recipe = make_recipe(name)
    x, weight, bias = normal(20, 32, seed=1), normal(48, 32, seed=2), normal(48, seed=3)
    dy = normal(20, 48, seed=4)
    everything = run(x, weight, bias, dy, recipe=recipe)
    leaves = [tensor.clone().requires_grad_(want) for tensor, want in zip((x, weight, bias), wanted, strict=True)]
    with fp8_region() as region:
        y = emulated_linear(*leaves, recipe=recipe, state=make_state(recipe), region=region)
    y.backward(dy)
    for leaf, want, key in zip(leaves, wanted, ("dx", "dw", "db"), strict=True):
        assert torch.equal(leaf.grad, everything[key]) if want else leaf.grad is None
    kept = sum(tensor.numel() for tensor in saved_by(*leaves, recipe) if tensor.dtype == E4M3.dtype)
    assert kept == weight.numel() * wanted[0] + x.numel() * wanted[1]


@RECIPES
@PRECISIONS
@DTYPES
def test_small_gradients_survive(name, precision, dtype) -> None:
    """Gradients around 1e-6, over three decades, of which a cast without a scale keeps a tenth."""
    recipe = make_recipe(name, precision)
    state = DelayedState(recipe, "cpu") if recipe.has_state else None
    generator = torch.Generator().manual_seed(1)
    sizes = 10.0 ** (-8.0 + 3.0 * torch.rand(256, 128, generator=generator))
    dy = (sizes * torch.randn(256, 128, generator=generator).sign()).to(dtype)
    unscaled = dy.to(recipe.backward_format.dtype).float()
    assert (unscaled != 0).float().mean() < 0.1
    x, identity = normal(256, 128, seed=2).to(dtype), torch.eye(128)
    for _ in range(2):  # delayed scaling starts with a scale of 1
        got = run(x, identity, None, dy, recipe=recipe, state=state)
    assert (got["dx"] != 0).float().mean() >= 0.99
    assert (got["dx"].float() - dy.float()).norm() <= 0.1 * dy.float().norm()
    assert (got["dw"] != 0).float().mean() >= 0.99


@RECIPES
def test_large_gradients_saturate(name) -> None:
    """Far beyond what the scale of the last pass expects, and beyond FP8 if unscaled: finite all the same."""
    x, weight = normal(20, 32, seed=1), normal(48, 32, seed=2)
    for precision in ("hybrid", "e4m3"):
        dy = normal(20, 48, seed=3) * 1e6
        got = run(x, weight, None, dy, recipe=make_recipe(name, precision))
        assert all(got[key].isfinite().all() for key in ("y", "dx", "dw"))


@RECIPES
def test_nan_is_passed_on(name) -> None:
    x, weight, dy = normal(20, 32, seed=1), normal(48, 32, seed=2), normal(20, 48, seed=3)
    x[3, 4] = math.nan
    got = run(x, weight, None, dy, recipe=make_recipe(name))
    assert got["y"].isnan().any(1).tolist() == [row == 3 for row in range(20)]
    assert got["dw"].isnan().any(0).tolist() == [column == 4 for column in range(32)]


def test_delayed_scales_by_pass() -> None:
    """First scale 1 everywhere; a forward pass updates inputs and weights at its end, its backward gradients."""
    recipe = make_recipe("delayed")
    state = DelayedState(recipe, "cpu")
    x, weight = torch.tensor([[2.0, -7.0], [0.1, 1.0]]), torch.tensor([[3.5, 0.3]]).requires_grad_()
    with fp8_region() as region:
        y = emulated_linear(x, weight, None, recipe=recipe, state=state, region=region)
        assert [state.scale[role].item() for role in ("input", "weight", "grad_output")] == [1.0, 1.0, 1.0]
    # In e4m3 with scale 1, 0.1 is 0.1015625 and 0.3 is 0.3125.
    assert y.tolist() == [[2.0 * 3.5 - 7.0 * 0.3125], [0.1015625 * 3.5 + 0.3125]]
    assert [state.scale[role].item() for role in ("input", "weight", "grad_output")] == [64.0, 128.0, 1.0]
    y.backward(torch.tensor([[0.5], [1.75]]))
    assert [state.scale[role].item() for role in ("input", "weight", "grad_output")] == [64.0, 128.0, 32768.0]
    assert weight.grad.tolist() == [[0.5 * 2.0 + 1.75 * 0.1015625, 0.5 * -7.0 + 1.75]]
    assert state.amax_history["grad_output"].tolist() == [0.0, 0.0, 0.0, 1.75]


def test_the_first_linear_of_a_region_closes_its_backward() -> None:
    recipe = make_recipe("delayed")
    first, second = DelayedState(recipe, "cpu"), DelayedState(recipe, "cpu")
    weight = torch.eye(4).requires_grad_()
    x = normal(3, 4, seed=1).requires_grad_()
    scales: list[float] = []
    with fp8_region() as region:
        hidden = emulated_linear(x, weight, None, recipe=recipe, state=first, region=region)
        hidden.register_hook(lambda _: scales.append(second.scale["grad_output"].item()))
        y = emulated_linear(hidden, weight, None, recipe=recipe, state=second, region=region)
    assert [state is other for state, other in zip(region.states, (first, second), strict=True)] == [True, True]
    y.backward(torch.full((3, 4), 7.0))
    assert scales == [1.0], "not before the backward of the whole region is done"
    assert [state.scale["grad_output"].item() for state in (first, second)] == [8192.0, 8192.0]


def test_evaluation_records_nothing() -> None:
    recipe = make_recipe("delayed")
    state = make_state(recipe)
    before = {name: tensor.clone() for name, tensor in state.state_dict().items()}
    x, weight = normal(3, 4, seed=1), normal(5, 4, seed=2).requires_grad_()
    with torch.no_grad(), fp8_region() as region:
        evaluated = emulated_linear(x, weight, None, recipe=recipe, state=state, region=region)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.state_dict().items())
    assert region.states == []
    with fp8_region() as region:
        trained = emulated_linear(x, weight, None, recipe=recipe, state=state, region=region)
    assert torch.equal(evaluated, trained), "the same scales serve both"
    assert state.amax_history["input"][-1] == x.abs().amax()


def _train_on_rank(rank: int, directory: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    recipe = make_recipe("delayed")
    state = DelayedState(recipe, "cpu")
    for x, dy, weight in torch.load(Path(directory) / "inputs.pt", weights_only=True)[rank]:
        run(x, weight, None, dy, recipe=recipe, state=state)
    torch.save(state.state_dict(), Path(directory) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_have_the_scales_of_one(tmp_path) -> None:
    """Three passes, in the last of which one rank has no tokens."""
    weights = [normal(8, 16, seed=seed) for seed in range(3)]
    shares = [[4, 5], [6, 1], [3, 0]]
    inputs = [
        [(normal(n[rank], 16, seed=9 * i + rank), normal(n[rank], 8, seed=9 * i + 5 - rank), weights[i])
         for i, n in enumerate(shares)]
        for rank in range(2)
    ]  # fmt: skip
    torch.save(inputs, tmp_path / "inputs.pt")
    mp.spawn(_train_on_rank, args=(str(tmp_path),), nprocs=2)

    recipe = make_recipe("delayed")
    state = DelayedState(recipe, "cpu")
    for (x, dy, weight), (other_x, other_dy, _) in zip(*inputs, strict=True):
        run(torch.cat([x, other_x]), weight, None, torch.cat([dy, other_dy]), recipe=recipe, state=state)
    for rank in range(2):
        on_rank = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for name, tensor in state.state_dict().items():
            assert torch.equal(on_rank[name], tensor), name
