"""The compiled attention kernels on a GPU: every mask, dtype and width at the lengths where tiles begin and end.

"fastest" are the kernels that this GPU gets; "triton" is without those for Hopper, where they differ. Each has tiles
for long users and for short ones.

The budget: at most twice (gradients: three times) the error that the formula in PyTorch has in the same precision, both
measured against float32. FP8 is held to its emulation. Kernels compile for minutes: `-k "bfloat16 and 64"` takes a
part.
"""

from __future__ import annotations

import dataclasses
import itertools
import os

import pytest
import torch
import torch.nn.functional as F

from genrec.configs.schema import ATTENTION_QUANTIZATIONS
from genrec.hstu.attention import hopper_backward, hopper_forward, hstu_attention, tuning
from genrec.hstu.attention.mask import MaskRules, visible
from genrec.hstu.attention.quantization import SCALES
from genrec.hstu.attention.reference import reference_attention

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read as cuBLAS starts, for deterministic products

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000)
PADDING = 70
MASKS = {
    "causal": {},
    "contexts": {"num_contexts": 3},
    "many contexts see the history": {"num_contexts": 70, "contextual_mask": "history"},
    "targets": {"num_targets": 20},
    "contexts, targets in groups": {"num_contexts": 3, "num_targets": 20, "target_group_size": 3},
    "contexts see the history, targets": {"num_contexts": 2, "num_targets": 70, "contextual_mask": "history"},
    "window": {"max_attn_len": 100},
    "window, contexts, targets": {"max_attn_len": 50, "num_contexts": 3, "num_targets": 20, "target_group_size": 2},
    "both ways": {"causal": False},
    "both ways, window, contexts, targets": {
        "causal": False, "max_attn_len": 80, "num_contexts": 3, "num_targets": 30, "target_group_size": 4,
    },
}  # fmt: skip
WIDTHS = [(32, 32), (64, 64), (128, 128), (256, 256), (64, 128), (40, 24)]
HOPPER_WIDTHS = [64, 128, 256]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CASES = [
    *(("fastest", dtype, *widths) for dtype in DTYPES for widths in WIDTHS),
    *(("triton", dtype, width, width) for dtype in DTYPES[:2] for width in HOPPER_WIDTHS),
    *((f"{kernels}, short users", torch.bfloat16, d, d) for kernels in ("fastest", "triton") for d in HOPPER_WIDTHS),
]


def batch(num_contexts=0, num_targets=0, **masking):
    """Arguments of hstu_attention for users of all LENGTHS, with at most that many contexts and targets each."""
    lengths = torch.tensor(LENGTHS)
    contexts = torch.minimum(torch.tensor(num_contexts), lengths)
    targets = torch.minimum(torch.tensor(num_targets), lengths - contexts)
    return {
        "offsets": torch.tensor([0, *itertools.accumulate(LENGTHS)]).cuda(),
        "scaling_seqlen": 128,
        "num_contexts": contexts.cuda() if num_contexts else None,
        "num_targets": targets.cuda() if num_targets else None,
        **masking,
    }


def draw(dtype, width, value_width, *, num_heads=2, score_size=1.0):
    """u | v | q | k, NaN in the padding, and a gradient; q and k times the root of ``score_size``, a power of four."""
    rows, generator = sum(LENGTHS) + PADDING, torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(rows, 2 * num_heads * (width + value_width), generator=generator, device="cuda").to(dtype)
    grad = torch.randn(rows, num_heads, value_width, generator=generator, device="cuda").to(dtype)
    fused[:, 2 * num_heads * value_width :] *= score_size**0.5
    fused[-PADDING:], grad[-PADDING:] = float("nan"), float("nan")
    return fused, grad


def run(function, fused, grad, width):
    """Output and gradient of the projection, without the padding."""
    num_heads, value_width = grad.shape[1:]
    widths = [num_heads * d for d in (value_width, value_width, width, width)]
    fused = fused.detach().requires_grad_()
    _, v, q, k = (part.unflatten(1, (num_heads, -1)) for part in fused.split(widths, dim=1))
    output = function(q, k, v)
    return output.detach(), torch.autograd.grad(output, fused, grad)[0]


def plain(q, k, v, *, offsets, scaling_seqlen, num_contexts, num_targets, **masking):
    """The formula in the precision of q, user by user."""
    outputs = []
    for user, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        query, key, value = (x[start:stop].transpose(0, 1) for x in (q, k, v))
        places = torch.arange(stop - start, device=q.device)
        parts = [torch.tensor(0, device=q.device) if x is None else x[user] for x in (num_contexts, num_targets)]
        length = torch.tensor(stop - start, device=q.device)
        mask = visible(
            places[:, None],
            places[None, :],
            lengths=length,
            num_contexts=parts[0],
            num_targets=parts[1],
            rules=MaskRules(**masking),
        )
        weights = F.silu(query @ key.transpose(1, 2) * q.shape[2] ** -0.5) * mask / scaling_seqlen
        outputs.append((weights @ value).transpose(0, 1))
    return torch.cat([*outputs, v[offsets[-1] :] * 0])


def exact(q, k, v, *, offsets, scaling_seqlen, num_contexts, num_targets, **masking):
    return reference_attention(
        q,
        k,
        v,
        offsets=offsets,
        scaling_seqlen=scaling_seqlen,
        alpha=q.shape[2] ** -0.5,
        num_contexts=num_contexts,
        num_targets=num_targets,
        rules=MaskRules(**masking),
        bias=None,
    )


@pytest.fixture
def poisoned():
    """Fresh buffers hold NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def kernels(request, monkeypatch):
    """With the tiles for long users, whatever their lengths, or for short ones."""
    monkeypatch.setattr("genrec.hstu.attention.request.SHORT", 2**31 if "short users" in request.param else 0)
    if request.param.startswith("triton"):
        for module, name in (
            (hopper_forward, "why_not"),
            (hopper_forward, "why_not_fp8"),
            (hopper_backward, "why_not"),
            (hopper_backward, "why_not_fp8"),
        ):
            monkeypatch.setattr(module, name, lambda *_: "not wanted")
    return request.param


def relative_errors(x, true, offsets):
    """The largest error of each user over the largest magnitude, 0 without tokens."""
    users = [(x[a:b].double() - true[a:b], true[a:b]) for a, b in itertools.pairwise(offsets.tolist())]
    return [float(error.abs().max() / exact.abs().max()) if len(exact) else 0.0 for error, exact in users]


def assert_within_budget(mask, dtype, width, value_width):
    kwargs = batch(**MASKS[mask])
    fused, grad = draw(dtype, width, value_width)
    mine = run(lambda *x: hstu_attention(*x, max_seqlen=max(LENGTHS), backend="triton", **kwargs), fused, grad, width)
    theirs = run(lambda *x: plain(*x, **kwargs), fused, grad, width)
    truth = run(lambda *x: exact(*x, **kwargs), fused.double(), grad.double(), width)
    for name, got, other, true, times in zip(("output", "gradient"), mine, theirs, truth, (2, 3), strict=True):
        assert got.dtype == dtype
        assert (got[-PADDING:] == 0).all()
        # By user, against its own magnitude. The budget is PyTorch's worst: of a user of few tokens it errs by luck.
        errors, others_errors = (relative_errors(x, true, kwargs["offsets"]) for x in (got, other))
        budget = times * max(others_errors)
        for length, error in zip(LENGTHS, errors, strict=True):
            assert error <= budget, f"{name} of the user of {length}: {error:.3e}, budget {budget:.3e}"


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize(("kernels", "dtype", "width", "value_width"), CASES, indirect=["kernels"], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_error_within_budget(mask, dtype, width, value_width):
    assert_within_budget(mask, dtype, width, value_width)


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize("kernels", ["fastest", "triton"], indirect=True)
@pytest.mark.parametrize("width", HOPPER_WIDTHS)
def test_error_with_huge_scores(width):
    """Beside them float32 has no 1 left, which the derivative of SiLU is there. v, q, k: of sizes far apart."""
    kwargs = batch(**MASKS["targets"])
    fused, grad = draw(torch.bfloat16, width, width, score_size=2.0**30)
    functions = (
        lambda *x: hstu_attention(*x, max_seqlen=max(LENGTHS), backend="triton", **kwargs),
        lambda *x: plain(*x, **kwargs),
        lambda *x: exact(*x, **kwargs),
    )
    inputs = ((fused, grad), (fused, grad), (fused.double(), grad.double()))
    parts = [run(f, *x, width)[1][: sum(LENGTHS)].chunk(4, dim=1)[1:] for f, x in zip(functions, inputs, strict=True)]
    for name, got, other, true in zip("vqk", *parts, strict=True):
        error, others_error = ((x.double() - true).norm() / true.norm() for x in (got, other))
        assert error <= 3 * others_error, f"d{name}: {error:.3e}, PyTorch's {others_error:.3e}"


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize(
    "option", [{"tma": True}, {"fused": True}, {"tanh": "approx_pair"}, {"tanh": "exact"}], ids=str
)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("mask", ["causal", "window, contexts, targets"])
def test_error_of_other_ways_to_run_the_kernels(monkeypatch, mask, width, option):
    tiles = dataclasses.replace(tuning.HALF_PRECISION_TILES[width], **option)
    if "fused" in option:  # room for the sums of dQ
        tile = dataclasses.replace(tiles.key_grad, rows=32, num_warps=4 if width == 64 else 8, num_stages=2)
        tiles = dataclasses.replace(tiles, key_grad=tile)
    monkeypatch.setitem(tuning.HALF_PRECISION_TILES, width, tiles)
    assert_within_budget(mask, torch.bfloat16, width, width)


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize(
    ("kernels", "width"), [*(("fastest", w) for w in HOPPER_WIDTHS), ("triton", 64)], indirect=["kernels"]
)
def test_results_are_the_same_every_time(width):
    kwargs = batch(**MASKS["contexts, targets in groups"])
    fused, grad = draw(torch.bfloat16, width, width)

    def attend(*x):
        return hstu_attention(*x, max_seqlen=max(LENGTHS), backend="triton", **kwargs)

    first = run(attend, fused, grad, width)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(attend, fused, grad, width), first, strict=True))


def test_the_host_never_waits_and_auto_takes_triton():
    kwargs = batch(**MASKS["targets"])
    fused, grad = draw(torch.bfloat16, 64, 64)

    def attend(*x, backend="auto"):
        return hstu_attention(*x, max_seqlen=max(LENGTHS), backend=backend, **kwargs)

    named = run(lambda *x: attend(*x, backend="triton"), fused, grad, 64)
    torch.cuda.set_sync_debug_mode("error")
    try:
        chosen = run(attend, fused, grad, 64)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(chosen, named, strict=True))


def test_rows_beyond_32_bits_of_elements():
    """The last user lies 2.4e9 numbers into a buffer; alone at its start it comes out the same."""
    wide = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device="cuda")
    last = torch.randn(1000, 3 * 64, device="cuda").to(torch.bfloat16)
    wide[-1000:, : 3 * 64] = last

    def attend(x, offsets):
        x = x.detach().requires_grad_()
        q, k, v = (part.unflatten(1, (1, 64)) for part in x[:, : 3 * 64].split(64, dim=1))
        output = hstu_attention(
            q, k, v, offsets=offsets, max_seqlen=299_000, scaling_seqlen=1000, max_attn_len=500, backend="triton"
        )
        grads = torch.autograd.grad(output, (q, k, v), torch.ones_like(output))
        return [y[-1000:] for y in (output, *grads)]

    far = attend(wide, torch.tensor([0, 299_000, 300_000], device="cuda"))
    near = attend(last, torch.tensor([0, 1000], device="cuda"))
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


@pytest.mark.parametrize("quantization", ["bf16", "per-head"])
def test_results_beyond_32_bits_of_elements(quantization):
    """The last user lies 2.17e9 numbers into q, k and v, in FP8 too, and every result; alone, it comes out the same."""
    rows, heads, width = 266_000, 32, 256
    last = torch.randn(1000, 3 * heads * width, device="cuda").to(torch.bfloat16)
    wide = torch.zeros(rows, 3 * heads * width, dtype=torch.bfloat16, device="cuda")
    wide[-1000:] = last

    def attend(x, offsets):
        q, k, v = (part.unflatten(1, (heads, width)) for part in x.requires_grad_().chunk(3, dim=1))
        output = hstu_attention(
            q,
            k,
            v,
            offsets=torch.tensor(offsets, device="cuda"),
            max_seqlen=rows - 1000,
            scaling_seqlen=1000,
            max_attn_len=500,
            backend="triton",
            quantization=quantization,
        )
        return output[-1000:], torch.autograd.grad(output, x, torch.ones_like(output))[0][-1000:]

    near, far = attend(last, [0, 1000]), attend(wide, [0, rows - 1000, rows])
    assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


def test_torch_compile_takes_the_operator_whole():
    kwargs = batch(**MASKS["causal"])
    fused, grad = draw(torch.bfloat16, 64, 64)

    def attend(*x):
        return hstu_attention(*x, max_seqlen=max(LENGTHS), backend="triton", **kwargs)

    compiled = torch.compile(attend, fullgraph=True)
    for a, b in zip(run(compiled, fused, grad, 64), run(attend, fused, grad, 64), strict=True):
        assert torch.equal(a, b)


# Kernel and emulation have the same FP8 operands to the bit. The kernel's S and dP differ by e = 2^-10 or so of their
# size (FP8 tensor cores add up with 14 bits, tanh.approx has 11), so a share e / u of the P, and of the dS where they
# are FP8, falls on the other side of a border of e4m3 and moves by its step, u = 2^-3.5 on the average: of the norm
# sqrt(e u) = 2^-6.75.
# That holds for the many scores of a long user. Of few, all may move: by no more than the largest step.
FP8_MODES = ATTENTION_QUANTIZATIONS[1:]
FEW, FP8_TOLERANCE, FP8_TOLERANCE_OF_FEW = 63, 2**-6, 2**-3
# How much too large or small sums of one sign are: where tiles are added in float32, and where Hopper's tensor cores
# keep the sum over a whole user.
BIAS_OF_OUTPUT, BIAS_OF_SCORES, BIAS_OF_TENSOR_CORES = 2**-10, 2**-8, 2**-7


def fp8(mode, kwargs, backend="triton"):
    return lambda *x: hstu_attention(*x, max_seqlen=max(LENGTHS), backend=backend, quantization=mode, **kwargs)


def assert_agrees_with_emulation(mask, mode, dtype, width):
    kwargs = batch(**MASKS[mask])
    fused, grad = draw(dtype, width, width)
    mine = run(fp8(mode, kwargs), fused, grad, width)
    theirs = run(fp8(mode, kwargs, backend="pytorch"), fused, grad, width)
    part = fused.shape[1] // 4
    for name, columns in (
        ("output", slice(None)),
        *((n, slice(i * part, (i + 1) * part)) for i, n in enumerate("uvqk")),
    ):
        got, emulated = ((x[0].flatten(1) if name == "output" else x[1][:, columns]) for x in (mine, theirs))
        assert got.dtype == dtype
        assert (got[-PADDING:] == 0).all()
        for length, (start, stop) in zip(LENGTHS, itertools.pairwise(kwargs["offsets"].tolist()), strict=True):
            difference = (got[start:stop].double() - emulated[start:stop].double()).norm()
            bound = (FP8_TOLERANCE if length >= FEW else FP8_TOLERANCE_OF_FEW) * emulated[start:stop].double().norm()
            assert difference <= bound, f"{name} of the user of {length}: {difference:.3e}, bound {bound:.3e}"


@pytest.mark.usefixtures("poisoned", "kernels")
@pytest.mark.parametrize("kernels", ["fastest", "triton"], indirect=True)
@pytest.mark.parametrize("width", HOPPER_WIDTHS)
@pytest.mark.parametrize("mode", FP8_MODES)
@pytest.mark.parametrize("mask", MASKS)
def test_fp8_agrees_with_its_emulation(mask, mode, width):
    assert_agrees_with_emulation(mask, mode, torch.bfloat16, width)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("mode", ["per-head", "per-block", "1xdim"])
def test_fp8_of_float16(mode):
    assert_agrees_with_emulation("window, contexts, targets", mode, torch.float16, 64)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width", HOPPER_WIDTHS)
@pytest.mark.parametrize("mode", ["per-tensor", "per-block", "1xdim"])
def test_fp8_results_are_the_same_every_time(mode, width):
    kwargs = batch(**MASKS["contexts, targets in groups"])
    fused, grad = draw(torch.bfloat16, width, width)
    first = run(fp8(mode, kwargs), fused, grad, width)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(run(fp8(mode, kwargs), fused, grad, width), first, strict=True))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("mode", ATTENTION_QUANTIZATIONS)
@pytest.mark.parametrize("mask", ["causal", "window, contexts, targets", "both ways"])
def test_what_is_not_finite_stays_with_its_user(mask, mode, width):
    """Every second user's rows are zeros, then NaN or infinite: others' results stay as they are, to the bit."""
    kwargs = batch(**MASKS[mask])
    fused, grad = draw(torch.bfloat16, width, width)
    users = list(itertools.pairwise(kwargs["offsets"].tolist()))
    spoiled = torch.zeros(len(fused), dtype=torch.bool, device="cuda")
    for start, stop in users[1::2]:
        spoiled[start:stop] = True

    def results(value):
        filled = [torch.where(spoiled.view(-1, *[1] * (x.ndim - 1)), value, x) for x in (fused, grad)]
        return run(fp8(mode, kwargs), *filled, width)

    clean = results(0.0)
    for value in (float("nan"), float("inf")):
        for name, got, wanted in zip(("output", "gradient"), results(value), clean, strict=True):
            assert torch.equal(got[~spoiled], wanted[~spoiled]), f"{name} of the others with {value}"
            for start, stop in users[1::2]:
                assert not got[start:stop].isfinite().all(), f"{name} of the user of {stop - start} hides {value}"


@pytest.mark.parametrize("kernels", ["fastest", "triton"], indirect=True)
@pytest.mark.parametrize("width", HOPPER_WIDTHS)
@pytest.mark.parametrize("mode", ["per-head", "1xdim"])
def test_fp8_sums_of_one_sign_over_a_long_user(mode, width, kernels):
    """Nothing cancels in sums over 8,192 tokens: what tensor cores drop of each addition would add up to a bias."""
    length, generator = 8192, torch.Generator("cuda").manual_seed(0)
    fused, grad = (torch.randn(length, n, width, generator=generator, device="cuda") for n in (4, 1))
    fused[:, 1], grad = fused[:, 1].abs(), grad.abs()
    fused, grad = fused.flatten(1).to(torch.bfloat16), grad.to(torch.bfloat16)
    kwargs = {"offsets": torch.tensor([0, length], device="cuda"), "max_seqlen": length, "scaling_seqlen": length}
    results = [
        run(
            lambda *x, backend=backend: hstu_attention(*x, backend=backend, quantization=mode, **kwargs),
            fused,
            grad,
            width,
        )
        for backend in ("triton", "pytorch")
    ]
    mine, theirs = ((output.flatten(1), *grads.chunk(4, dim=1)[1:]) for output, grads in results)
    found, good = {}, True
    for name, got, emulated in zip(("output", "dv", "dq", "dk"), mine, theirs, strict=True):
        got, emulated = got.double(), emulated.double()
        bias = float((got * emulated).sum() / (emulated * emulated).sum()) - 1
        error = float((got - emulated).norm() / emulated.norm())
        found[name] = f"bias {bias:.2e}, error {error:.2e}"
        bound = BIAS_OF_OUTPUT if name in ("output", "dv") else BIAS_OF_SCORES
        if kernels == "fastest" and SCALES[mode] == "user":
            bound = BIAS_OF_TENSOR_CORES
        good &= abs(bias) <= bound and error <= FP8_TOLERANCE
    assert good, found
