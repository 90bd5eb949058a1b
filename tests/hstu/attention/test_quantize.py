"""The kernels that quantize to FP8 are PyTorch to the bit: in Triton's interpreter, compiled where there is a GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from genrec.hstu.attention import launch, launch_fp8, triton_jit
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.quantization import BLOCK, SCALES, Places, grad_mode, quantize_batch, quantize_grad
from genrec.hstu.attention.request import Request, block_of

pytestmark = pytest.mark.usefixtures("interpreter")

DEVICE = "cpu" if triton_jit.INTERPRETED else "cuda"
LENGTHS = (0, 1, 15, 16, 17, 127, 0, 128, 129, 300)
PADDING = 5
MODES = [mode for mode in SCALES if mode != "128x1"]
# Triton's interpreter has no bfloat16.
DTYPES = (torch.float32, torch.float16) if triton_jit.INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)


def draw(*, width=32, value_width=40, dtype=torch.float32, heads=2):
    """q, k, v as slices of a projection, magnitudes from 2^-12 to 2^12, with all that may befall numbers."""
    rows = sum(LENGTHS) + PADDING
    generator = torch.Generator().manual_seed(0)
    widths = [heads * d for d in (value_width, value_width, width, width)]
    fused = torch.randn(rows, sum(widths), generator=generator)
    fused *= torch.exp2(torch.randint(-12, 12, (rows, 1), generator=generator).float())
    starts = [0, *itertools.accumulate(LENGTHS)]
    fused[starts[2] : starts[3]] = 0  # the user of 15: nothing but zeros
    fused[starts[4] : starts[5]] *= 1e-41 if dtype == torch.float32 else 1e-7  # of 17: amax is subnormal
    fused[starts[5] + 3] = 0
    fused[starts[5] + 5, ::3] = float("nan")
    fused[starts[7] + 5, 1::3] = float("inf")
    fused[starts[8] + 5, ::2] = -float("inf")
    fused[starts[8] + 6] = float("nan")
    fused[starts[9] + 7, 3] = 60000.0
    fused[-PADDING:] = float("nan")
    _, v, q, k = (x.unflatten(1, (heads, -1)) for x in fused.to(DEVICE, dtype).split(widths, dim=1))
    return q, k, v


def request_of(lengths=LENGTHS, alpha=0.6):
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], device=DEVICE)
    return Request(offsets, None, None, 100, alpha, MaskRules(), None)


def run(q, k, v, request, mode, **kwargs):
    """Of the kernels, and of PyTorch."""
    schedule = launch.make_schedule(q, request)
    mine = launch_fp8.quantize_batch(q, k, v, schedule, request, mode=mode, **{"needs_grad": True, **kwargs})
    padded = [torch.nn.functional.pad(x, (0, block_of(x.shape[2]) - x.shape[2])) for x in (q, k, v)]
    return mine, quantize_batch(*padded, mode=mode, offsets=request.offsets, alpha=request.alpha)


def assert_same(mine, truth, used=slice(None)):
    """Equal where ``used``, NaN being NaN whatever its sign."""
    assert mine.shape == truth.shape and mine.dtype == truth.dtype
    mine, truth = mine.float()[used], truth.float()[used]
    assert torch.equal(mine.isnan(), truth.isnan())
    assert torch.equal(mine.nan_to_num(0.0), truth.nan_to_num(0.0))


def written(mode, request, num_rows):
    """Which descales there are: those of users with tokens, of slots with a block, of all rows."""
    places = Places.of(request.offsets, num_rows)
    slots = places.slot[places.user < request.num_users].unique()
    return {"user": request.offsets.diff() > 0, "block": slots, "row": slice(None)}[SCALES[mode]], slots


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [(mode, dtype) for mode in MODES for dtype in DTYPES],
    ids=str,
)
def test_same_bits_as_pytorch(mode, dtype):
    request = request_of()
    q, k, v = draw(dtype=dtype)
    mine, truth = run(q, k, v, request, mode)
    used, slots = written(mode, request, q.shape[0])
    for a, b in zip((mine.q, mine.k, mine.v), (truth.q, truth.k, truth.v), strict=True):
        assert_same(a.values, b.values)
        assert_same(a.descale, b.descale, used)
        assert a.descale[used].isfinite().all() and (a.descale[used] > 0).all()
    assert_same(mine.v_tiles.values, truth.v_tiles.values, slots)
    assert_same(mine.v_tiles.descale, truth.v_tiles.descale, slots if SCALES[mode] == "row" else used)
    assert torch.equal(mine.weight_scale, truth.weight_scale)
    assert mine.q.values[-PADDING:].float().eq(0).all()
    assert_same_of_products(mine, truth, slots)


def assert_same_of_products(mine, truth, slots):
    """What the products of backward take besides, with scales of a user and coarser."""
    for a, b in ((mine.q_tiles, truth.q_tiles), (mine.k_tiles, truth.k_tiles)):
        assert (a is None) == (b is None)
        if a is not None:
            assert_same(a, b, slots)
    if truth.v_norm is not None:
        torch.testing.assert_close(mine.v_norm, truth.v_norm, rtol=1e-6, atol=0)


@pytest.mark.parametrize("largest", [1e11, 1e19])
def test_scores_that_no_weight_scale_fits_are_nan(largest):
    """Of the user that has them, in all modes: P would saturate, and an infinite S look finite."""
    request = request_of()
    q, k, v = draw()
    start = int(request.offsets[-2])
    q, k = q.clone(), k.clone()
    q[start], k[start] = largest, largest
    for batch in run(q, k, v, request, "per-head"):
        assert batch.weight_scale[-1].isnan().all()
        assert batch.weight_scale[:-1].isfinite().all()


def test_gradients_of_scores_that_no_scale_fits_are_nan():
    request = request_of()
    _, _, v = draw()
    v_norm = torch.full((request.num_users, v.shape[1]), 1e19, device=DEVICE)
    grad = torch.full_like(v, 1e19)
    mine = launch_fp8.quantize_grad(grad, launch.make_schedule(v, request), request, mode="per-head", v_norm=v_norm)
    truth = quantize_grad(grad, mode="per-head", offsets=request.offsets, v_norm=v_norm)
    for scale in (mine.score_scale, truth.score_scale):
        assert scale[request.offsets.diff() > 0].isnan().all()


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_the_output(mode):
    """The same bits as PyTorch's, also where it is one number all over; scaled in every mode, the plain cast's too."""
    request = request_of()
    _, _, v = draw(value_width=64)
    schedule = launch.make_schedule(v, request)
    v_norm = torch.rand(request.num_users, v.shape[1], device=DEVICE) if SCALES[mode] == "user" else None
    for grad in (v * 1e-6, torch.ones(1, 1, 1, device=DEVICE).expand(v.shape)):
        mine = launch_fp8.quantize_grad(grad, schedule, request, mode=mode, v_norm=v_norm)
        truth = quantize_grad(grad, mode=mode, offsets=request.offsets, v_norm=v_norm)
        used, slots = written(grad_mode(mode), request, v.shape[0])
        assert_same(mine.rows.values, truth.rows.values)
        assert_same(mine.rows.descale, truth.rows.descale, used)
        assert mine.rows.values.float().nan_to_num(0.0).abs().max() == 448
        if v_norm is not None:
            assert_same(mine.tiles, truth.tiles, slots)
            assert torch.equal(mine.score_scale, truth.score_scale)
            assert mine.score_scale[LENGTHS.index(0)].eq(1).all()  # of no number


@pytest.mark.parametrize("mode", ["per-head", "1xdim"])
@pytest.mark.parametrize(("width", "value_width"), [(32, 64), (64, 40), (128, 128), (256, 256), (8, 24)])
def test_widths(mode, width, value_width):
    request = request_of()
    mine, truth = run(*draw(width=width, value_width=value_width, heads=1), request, mode)
    slots = written(mode, request, mine.q.values.shape[0])[1]
    for a, b in ((mine.q, truth.q), (mine.k, truth.k), (mine.v, truth.v)):
        assert_same(a.values, b.values)
    assert_same(mine.v_tiles.values, truth.v_tiles.values, slots)
    assert torch.equal(mine.weight_scale, truth.weight_scale)
    assert_same_of_products(mine, truth, slots)


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("mode", MODES)
def test_without_gradient_there_is_what_forward_takes_alone(mode):
    request = request_of()
    q, k, v = draw(heads=1)
    mine, truth = run(q, k, v, request, mode, needs_grad=False)
    used, slots = written(mode, request, q.shape[0])
    assert mine.v is None and mine.q_tiles is None and mine.k_tiles is None and mine.v_norm is None
    assert_same(mine.v_tiles.values, truth.v_tiles.values, slots)
    assert_same(mine.v_tiles.descale, truth.v_tiles.descale, slots if SCALES[mode] == "row" else used)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(mode, lengths):
    for rows in (0, 3):
        q, k, v = (x[:rows] for x in draw())
        batch, _ = run(q, k, v, request_of(lengths), mode)
        assert batch.q.values.shape[0] == rows and (batch.q.values.float() == 0).all()


def test_other_layouts_of_the_inputs():
    request = request_of()
    q, k, v = draw(heads=2)
    across = [x.permute(1, 2, 0).contiguous().permute(2, 0, 1) for x in (q, k, v)]
    for a, b in zip((q, k, v), across, strict=True):
        assert a.stride() != b.stride()
    strided = dataclasses.replace(request, offsets=request.offsets.repeat_interleave(2)[::2])
    mine, other = run(q, k, v, request, "per-head")[0], run(*across, strided, "per-head")[0]
    assert_same(mine.q.values, other.q.values)
    assert torch.equal(mine.weight_scale, other.weight_scale)


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "per-tensor"])
def test_permuting_users_permutes_the_bits(mode):
    q, k, v = draw(heads=1)
    order = [9, 3, 0, 7, 5, 1, 8, 2, 6, 4]
    starts = [0, *itertools.accumulate(LENGTHS)]
    rows = torch.cat([torch.arange(starts[i], starts[i + 1]) for i in order]).to(DEVICE)
    together, _ = run(q, k, v, request_of(), mode)
    permuted, _ = run(q[rows], k[rows], v[rows], request_of([LENGTHS[i] for i in order]), mode)
    assert_same(permuted.q.values, together.q.values[rows])
    assert torch.equal(permuted.weight_scale, together.weight_scale[order])


def test_slots_of_the_schedule_are_those_of_places():
    request = request_of()
    q, _, _ = draw(heads=1)
    schedule = launch.make_schedule(q, request)
    places = Places.of(request.offsets, q.shape[0])
    firsts = [i for i, length in enumerate(LENGTHS) if length]
    starts = request.offsets[firsts]
    assert schedule[2][firsts].tolist() == places.slot[starts].tolist()
    assert places.slot.max() < q.shape[0] // BLOCK + len(LENGTHS) + 1
