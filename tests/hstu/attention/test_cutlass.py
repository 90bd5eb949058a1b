"""The cutlass backend: what reaches FBGEMM's function, of every build, what comes back, and what is refused.

The function is played by one that keeps its arguments, computes by the reference and, as the real one, leaves what lies
beyond the last user unwritten.
"""

import itertools
import sys

import pytest
import torch

from genrec.configs.schema import UnavailableError, find_cutlass_module
from genrec.hstu.attention import RelativeBias, cutlass, hstu_attention, interface
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.reference import reference_attention

NAMES = ["hstu", "fbgemm_gpu.experimental.hstu"]
# Arguments of hstu_attn_varlen_func: FBGEMM from May 2025 and from July 2026, recsys-examples' copy in between.
BUILDS = {
    "longest": "seq_offsets_q, seq_offsets_k, max_seqlen_q, max_seqlen_k, num_contexts, num_targets, "
    "target_group_size=1, window_size=(-1, -1), alpha=1.0, rab=None, has_drab=False, is_delta_q=False",
    "scaled": "cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k, scaling_seqlen, "
    "num_contexts, num_targets, target_group_size=1, window_size=(-1, -1), alpha=1.0, rab=None, has_drab=False",
    "copy": "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, num_contexts=None, num_targets=None, "
    "target_group_size=1, window_size=(-1, -1), alpha=1.0, rab=None, has_drab=False, scaling_seqlen=-1",
}
SOURCE = """
calls = []

def hstu_attn_varlen_func(q, k, v, {arguments}):
    given = dict(locals())
    calls.append(given)
    return play(given.pop("q"), given.pop("k"), given.pop("v"), given)
"""
LENGTHS = (5, 1, 0, 9, 4)
PADDING = 3


class Unwritten(torch.autograd.Function):
    """What lies beyond the last user is NaN, and so is its gradient."""

    @staticmethod
    def forward(ctx, x, end):
        ctx.end = end
        return torch.cat([x[:end], torch.full_like(x[end:], torch.nan)])

    @staticmethod
    def backward(ctx, grad):
        return torch.cat([grad[: ctx.end], torch.full_like(grad[ctx.end :], torch.nan)]), None


def play(q, k, v, arguments):
    """The real function's result: its masks, its divisor, its checks."""
    offsets = arguments.get("cu_seqlens_q", arguments.get("seq_offsets_q"))
    contexts, targets = arguments["num_contexts"], arguments["num_targets"]
    assert all(x.is_contiguous() for x in (q, k, v))
    assert all(x is None or (x.dtype == torch.int32 and x.is_contiguous()) for x in (offsets, contexts, targets))
    assert arguments["max_seqlen_q"] == arguments["max_seqlen_k"]
    left, right = arguments["window_size"]
    assert (left, right) == (-1, 0) or (contexts is None and targets is None)
    assert right in (0, left)
    end = int(offsets[-1])
    output = reference_attention(
        *(Unwritten.apply(x, end) for x in (q, k, v)),
        offsets=offsets,
        scaling_seqlen=arguments.get("scaling_seqlen", arguments["max_seqlen_q"]),
        alpha=arguments["alpha"],
        num_contexts=contexts,
        num_targets=targets,
        rules=MaskRules(right == 0, "history", max(left, 0), arguments["target_group_size"]),
        bias=None,
    )
    return Unwritten.apply(output, end)


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Puts a package with that function where Python finds it, for this test alone."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("hstu", "fbgemm_gpu")]
    kept = {name: sys.modules.pop(name) for name in names}
    monkeypatch.syspath_prepend(tmp_path)

    def put(name="hstu", build="scaled"):
        folder = tmp_path.joinpath(*name.split("."))
        folder.mkdir(parents=True)
        for parent in [folder, *folder.parents][: len(name.split("."))]:
            (parent / "__init__.py").touch()
        (folder / "cuda_hstu_attention.py").touch()
        (folder / "__init__.py").write_text(SOURCE.format(arguments=BUILDS[build]))
        forget()
        module = __import__(name, fromlist=["calls"])
        module.play = play
        return module

    def forget():
        find_cutlass_module.cache_clear()
        cutlass._load.cache_clear()

    monkeypatch.setattr(cutlass, "_why_not_on", lambda device: None)
    yield put
    forget()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hstu", "fbgemm_gpu")]:
        del sys.modules[name]
    sys.modules.update(kept)


def draw(*, dtype=torch.float16, width=32):
    """Slices of a fused projection that ends with NaN, and a gradient that does."""
    rows, generator = sum(LENGTHS) + PADDING, torch.Generator().manual_seed(0)
    fused = torch.randn(rows, 3 * 2 * width, generator=generator).to(dtype)
    grad = torch.randn(rows, 2, width, generator=generator).to(dtype)
    fused[-PADDING:], grad[-PADDING:] = torch.nan, torch.nan
    return fused, grad


def run(fused, grad, **kwargs):
    """Output and gradient of the projection."""
    fused = fused.detach().requires_grad_()
    q, k, v = (part.unflatten(1, (2, -1)) for part in fused.chunk(3, dim=1))
    offsets = torch.tensor([0, *itertools.accumulate(LENGTHS)])
    output = hstu_attention(q, k, v, **{"offsets": offsets, "max_seqlen": max(LENGTHS), "scaling_seqlen": 16, **kwargs})
    return output.detach(), torch.autograd.grad(output, fused, grad)[0]


CONTEXTS, TARGETS = torch.tensor([2, 0, 0, 3, 1]), torch.tensor([2, 1, 0, 4, 0])
SERVED = {
    "causal": {},
    "causal, where contexts would see only themselves": {"contextual_mask": "prefix"},
    "both ways": {"causal": False},
    "window": {"max_attn_len": 2},
    "window both ways": {"max_attn_len": 2, "causal": False},
    "targets": {"num_targets": TARGETS},
    "groups": {"num_targets": TARGETS, "target_group_size": 2},
    "contexts": {"num_contexts": CONTEXTS, "contextual_mask": "history"},
    "all": {
        "num_contexts": CONTEXTS, "contextual_mask": "history", "num_targets": TARGETS, "target_group_size": 3,
        "alpha": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("case", SERVED)
def test_result_is_that_of_the_plain_backend(install, case, build, name):
    module = install(name, build)
    fused, grad = draw()
    got = run(fused, grad, backend="cutlass", **SERVED[case])
    wanted = run(fused, grad, backend="pytorch", **SERVED[case])
    assert len(module.calls) == 1
    for mine, plain in zip(got, wanted, strict=True):
        assert mine.dtype == torch.float16
        assert (mine[-PADDING:] == 0).all()
        # Of the largest: a few roundings of half precision, one of them that of the factor max_seqlen / scaling_seqlen.
        torch.testing.assert_close(mine, plain, rtol=0, atol=float(4 * 2**-11 * plain.abs().max()))


@pytest.mark.parametrize("build", BUILDS)
def test_where_there_are_no_tokens_nothing_is_launched(install, build):
    module = install(build=build)
    for rows, offsets in ((0, [0]), (3, [0]), (0, [0, 0]), (3, [0, 0, 0])):
        q, k, v = (torch.full((rows, 2, 32), torch.nan, dtype=torch.float16, requires_grad=True) for _ in range(3))
        output = hstu_attention(
            q, k, v, offsets=torch.tensor(offsets), max_seqlen=0, scaling_seqlen=4, backend="cutlass"
        )
        grads = torch.autograd.grad(output.sum(), (q, k, v))
        assert all(x.shape == (rows, 2, 32) and (x == 0).all() for x in (output, *grads))
    assert not module.calls


def relative_bias():
    rows = sum(LENGTHS) + PADDING
    return RelativeBias(torch.zeros(17), torch.zeros(9), torch.zeros(rows).long(), torch.zeros(rows).long())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_contexts": CONTEXTS}, r"contexts see all of the history there \(contextual_mask = 'history'\)"),
        ({"max_attn_len": 3, "num_targets": TARGETS}, r"no window \(max_attn_len\) together with contexts or targets"),
        ({"max_attn_len": 3, "num_contexts": CONTEXTS, "contextual_mask": "history"}, "no window"),
        ({"causal": False, "num_targets": TARGETS}, "no contexts or targets without a causal mask"),
        ({"causal": False, "num_contexts": CONTEXTS, "contextual_mask": "history"}, "without a causal mask"),
        ({"bias": relative_bias()}, "it has no relative bias"),
        ({"dtype": torch.float32}, "must share bfloat16 or float16, not torch.float32"),
        ({"width": 48}, "heads are 32, 64, 128, 256 wide, the same for q and v, not 48 and 48"),
    ],
)
def test_what_it_lacks_is_refused_in_one_sentence(install, changes, why):
    module = install()
    fused, grad = draw(**{name: changes.pop(name) for name in ("dtype", "width") if name in changes})
    with pytest.raises(UnavailableError, match=why) as caught:
        run(fused, grad, backend="cutlass", **changes)
    assert str(caught.value).startswith("kernel_backend 'cutlass' can't serve this attention: ")
    assert str(caught.value).endswith("; 'auto' and 'pytorch' can")
    assert "\n" not in str(caught.value) and not module.calls


def test_values_of_another_width_are_refused(install):
    install()
    q, v = torch.zeros(3, 1, 64, dtype=torch.float16), torch.zeros(3, 1, 32, dtype=torch.float16)
    with pytest.raises(UnavailableError, match="the same for q and v, not 64 and 32"):
        hstu_attention(q, q, v, offsets=torch.tensor([0, 3]), max_seqlen=3, scaling_seqlen=3, backend="cutlass")


def test_a_build_without_the_dtype_is_refused(install, monkeypatch):
    module = install()

    def lacking(*args, **kwargs):
        raise RuntimeError("This hstu attention build does not support fp16.\nException raised from somewhere")

    monkeypatch.setattr(module, "play", lacking)
    with pytest.raises(
        UnavailableError, match=r"made without it \(This hstu attention build does not support fp16.\);"
    ):
        run(*draw(), backend="cutlass")
    monkeypatch.setattr(module, "play", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(*draw(), backend="cutlass")


def test_quantization_is_refused(install):
    install()
    with pytest.raises(UnavailableError, match="kernel_backend 'cutlass' serves hstu_attn_quantization_mode 'bf16' al"):
        interface._check_cutlass("per-head")
    interface._check_cutlass("bf16")


def test_other_devices_are_refused(monkeypatch):
    assert cutlass._why_not_on(torch.device("cpu")) == "it needs a CUDA device, and q is on 'cpu'"
    for capability, why in (((8, 6), None), ((9, 0), None), ((10, 0), "compute capability 8 and 9, not 10.0")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        got = cutlass._why_not_on(torch.device("cuda", 0))
        assert got is None if why is None else why in got


def test_auto_never_takes_it(install):
    module = install()
    run(*draw(), backend="auto")
    assert not module.calls


def test_a_folder_of_that_name_is_not_the_package(install, tmp_path):
    """This repository has a folder named hstu, and it may be the working directory."""
    (tmp_path / "hstu").mkdir()
    (tmp_path / "hstu" / "__init__.py").touch()
    find_cutlass_module.cache_clear()
    assert find_cutlass_module() is None


@pytest.mark.gpu
@pytest.mark.skipif(find_cutlass_module() is None, reason="FBGEMM's HSTU attention is not installed")
@pytest.mark.parametrize("width", cutlass.DIMS)
@pytest.mark.parametrize("case", SERVED)
def test_the_real_kernels_agree(case, width):
    lengths = torch.tensor([300, 1, 0, 129, 64])
    offsets = torch.tensor([0, *lengths.cumsum(0).tolist()], device="cuda")
    rows, generator = int(lengths.sum()) + PADDING, torch.Generator("cuda").manual_seed(0)
    fused = torch.randn(rows, 3 * 2 * width, generator=generator, device="cuda").bfloat16()
    grad = torch.randn(rows, 2, width, generator=generator, device="cuda").bfloat16()
    fused[-PADDING:], grad[-PADDING:] = torch.nan, torch.nan
    counts = {name: x.cuda() if torch.is_tensor(x) else x for name, x in SERVED[case].items()}
    kwargs = {"offsets": offsets, "max_seqlen": 300, "scaling_seqlen": 512, **counts}
    got, wanted = (run(fused, grad, backend=backend, **kwargs) for backend in ("cutlass", "pytorch"))
    for mine, plain in zip(got, wanted, strict=True):
        assert (mine[-PADDING:] == 0).all()
        assert (mine.double() - plain.double()).norm() <= 2**-6 * plain.double().norm()
