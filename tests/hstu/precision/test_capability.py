"""What FP8 linears run with is asked once, of a Transformer Engine that may be whole, broken or not there at all."""

import sys
import types

import pytest
import torch

from genrec.configs.schema import MixedPrecisionArgs, NetworkArgs, UnavailableError
from genrec.hstu.precision import capability
from genrec.hstu.precision.capability import (
    QUERIES,
    check_attention_available,
    check_linear_available,
    linear_capabilities,
)

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
NO_MXFP8 = "Device compute capability 10.0 or higher required for MXFP8 execution."
NO_BLOCKS = "FP8 block scaled GEMM requires compute capability 9.0 or higher and CUDA >= 12.9."


@pytest.fixture(autouse=True)
def _asked_anew():
    linear_capabilities.cache_clear()
    yield
    linear_capabilities.cache_clear()


@pytest.fixture
def install(monkeypatch):
    """install(mxfp8="reason", ...): a GPU, and a Transformer Engine that gives these answers; records the questions."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def fake(**reasons):
        asked = []
        module = types.ModuleType("transformer_engine.pytorch")

        def answer(query):
            def is_available(return_reason=False):
                assert return_reason
                asked.append(query)
                reason = next((reasons[recipe] for recipe in reasons if QUERIES[recipe] == query), "")
                return not reason, reason

            return is_available

        for query in QUERIES.values():
            setattr(module, query, answer(query))
        package = types.ModuleType("transformer_engine")
        package.pytorch = module
        monkeypatch.setitem(sys.modules, "transformer_engine", package)
        monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
        return asked

    return fake


@pytest.fixture
def importing(monkeypatch):
    """importing(error): a GPU, and a Transformer Engine whose import raises ``error``."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    class Finder:
        def __init__(self, error):
            self.error = error

        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "transformer_engine":
                raise self.error

    def fail(error):
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [Finder(error), *sys.meta_path])

    return fail


def args(recipe="tensorwise", **changes):
    return MixedPrecisionArgs(**{"mixed_precision_dtype": "fp8", "linear_recipe": recipe, **changes})


def refusal(recipe="tensorwise", device_type="cuda", **changes):
    with pytest.raises(UnavailableError) as caught:
        check_linear_available(args(recipe, **changes), device_type)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"MixedPrecisionArgs.linear_recipe = {recipe!r} with backend = 'te' (Transformer Engine)")
    assert message.endswith(
        "MixedPrecisionArgs.backend = 'emulated' runs the same recipe anywhere, slower than without FP8"
    )
    return message


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_emulation_runs_everywhere_and_asks_nobody(importing, recipe, device_type):
    importing(ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine"))
    check_linear_available(args(recipe, backend="emulated"), device_type)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_without_fp8_linears_nothing_is_asked(importing, device_type):
    importing(ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine"))
    check_linear_available(MixedPrecisionArgs(), device_type)
    check_linear_available(args(None, hstu_attn_quantization_mode="per-block"), device_type)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_cpu_has_no_transformer_engine(install, recipe):
    """Also where there is a GPU that the run does not use."""
    asked = install()
    assert "is not available here: it needs a GPU, this run is on a CPU; MixedPrecisionArgs" in refusal(recipe, "cpu")
    assert not asked


def test_without_a_gpu_it_is_not_even_imported(importing, monkeypatch):
    importing(AssertionError("imported"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert set(linear_capabilities().values()) == {"PyTorch sees no GPU"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_not_installed(importing, recipe):
    importing(ModuleNotFoundError("No module named 'transformer_engine'", name="transformer_engine"))
    assert "Transformer Engine is not installed (the head of requirements/cuda.txt has the commands)" in refusal(recipe)


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("No module named 'transformer_engine_torch'", name="transformer_engine_torch"),
        ImportError("libtransformer_engine.so: undefined symbol: _ZN3c10\n  from torch 2.10\n"),
        OSError("libcublas.so.13: cannot open shared object file: No such file or directory"),
        FileNotFoundError("Could not find shared object file for Transformer Engine torch lib."),
        RuntimeError("Transformer Engine requires cuDNN 9.12.0 or later, but the cuDNN runtime is 9.1.0."),
        AssertionError("Transformer Engine package version mismatch."),
        AttributeError("module 'torch' has no attribute 'float4_e2m1fn_x2'"),
        RuntimeError(),
    ],
    ids=lambda error: f"{type(error).__name__} {str(error)[:20]}",
)
def test_a_broken_installation_says_in_one_sentence_what_is_broken(importing, error):
    importing(error)
    message = refusal()
    said = str(error).partition("\n")[0].rstrip(".") or "no reason given"
    assert f"the installed Transformer Engine does not work with this PyTorch ({said});" in message
    assert "not installed" not in message


def test_an_old_version_without_the_questions_is_broken(install, monkeypatch):
    install()
    monkeypatch.delattr(sys.modules["transformer_engine.pytorch"], "is_mxfp8_available")
    assert "does not work with this PyTorch (module 'transformer_engine.pytorch' has no attribute" in refusal()


def test_mxfp8_on_hopper_lists_what_works(install):
    install(mxfp8=NO_MXFP8)
    assert linear_capabilities() == dict.fromkeys(RECIPES[:3], "") | {"mxfp8": NO_MXFP8.rstrip(".")}
    message = refusal("mxfp8")
    assert (
        f"is not available here: {NO_MXFP8.rstrip('.')}; 'delayed', 'tensorwise', 'blockwise' are, and Mixed" in message
    )
    for recipe in RECIPES[:3]:
        check_linear_available(args(recipe), "cuda")


def test_where_nothing_works_nothing_is_listed(install):
    no_fp8 = "Device compute capability 8.9 or higher required for FP8 execution."
    install(delayed=no_fp8, blockwise=NO_BLOCKS, mxfp8=NO_MXFP8)
    assert f"not available here: {no_fp8.rstrip('.')}; MixedPrecisionArgs.backend" in refusal("tensorwise")
    assert NO_BLOCKS.rstrip(".") in refusal("blockwise")


def test_the_machine_is_asked_once(install):
    asked = install(mxfp8=NO_MXFP8)
    for recipe in RECIPES[:3]:
        check_linear_available(args(recipe), "cuda")
    refusal("mxfp8")
    assert sorted(asked) == sorted(QUERIES.values())


def test_every_recipe_has_a_question():
    assert tuple(capability.QUERIES) == capability.LINEAR_RECIPES == RECIPES


@pytest.mark.gpu
def test_this_gpu_answers_for_every_recipe():
    """A GPU of compute capability below 10.0 has no MXFP8, whatever else is installed."""
    answers = linear_capabilities()
    assert tuple(answers) == RECIPES
    if torch.cuda.get_device_capability() < (10, 0):
        assert answers["mxfp8"]


def attention_refusal(network, device_type, **changes):
    precision = args(None, hstu_attn_quantization_mode="per-head", **changes)
    with pytest.raises(UnavailableError) as caught:
        check_attention_available(precision, network, device_type)
    message = str(caught.value)
    asked = "MixedPrecisionArgs.hstu_attn_quantization_mode = 'per-head' with backend = 'te' (Triton in attention)"
    assert message.startswith(f"{asked} is not available here: ")
    assert message.endswith("'emulated' runs the same mode anywhere, slower than without FP8") and "\n" not in message
    return message


def network_of(**changes):
    return NetworkArgs(num_layers=1, hidden_size=16, num_attention_heads=1, kv_channels=16, **changes)


def test_attention_in_fp8_needs_a_gpu_with_fp8_and_triton(monkeypatch):
    assert "it needs a GPU, this run is on a CPU" in attention_refusal(network_of(), "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    message = attention_refusal(network_of(kernel_backend="triton"), "cuda")
    assert "it needs compute capability 8.9, and this GPU has 8.0" in message
    monkeypatch.setattr(capability.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in attention_refusal(network_of(), "cuda")


@pytest.mark.parametrize("found", [(8, 9), (9, 0), (12, 0)])
def test_attention_in_fp8_runs_on_a_gpu_with_fp8(monkeypatch, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: found)
    check_attention_available(args(None, hstu_attn_quantization_mode="per-head"), network_of(), "cuda")


def test_attention_emulated_or_without_fp8_runs_anywhere():
    check_attention_available(args("tensorwise"), network_of(), "cpu")
    emulated = args(None, hstu_attn_quantization_mode="per-head", backend="emulated")
    check_attention_available(emulated, network_of(), "cpu")
    by_name = args(None, hstu_attn_quantization_mode="per-head")
    check_attention_available(by_name, network_of(kernel_backend="pytorch"), "cpu")
