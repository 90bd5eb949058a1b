"""Names, shapes and backends: what is refused, and how it is said."""

from __future__ import annotations

import logging

import pytest
import torch

from genrec.configs.schema import ATTENTION_QUANTIZATIONS, UnavailableError
from genrec.hstu.attention import hstu_attention, interface


def attend(**changes):
    x = torch.ones(3, 1, 8)
    kwargs = {"offsets": torch.tensor([0, 3]), "max_seqlen": 3, "scaling_seqlen": 3, **changes}
    q, k, v = (kwargs.pop(name, x) for name in "qkv")
    return hstu_attention(q, k, v, **kwargs)


@pytest.mark.usefixtures("no_cutlass")
def test_backend_that_is_not_there():
    with pytest.raises(UnavailableError, match=r"kernel_backend 'cutlass' needs FBGEMM.*not installed: 'auto'"):
        attend(backend="cutlass")


def test_kernels_are_asked_for_before_anything_is_built():
    with pytest.raises(UnavailableError, match=r"kernel_backend = 'triton' needs a GPU, and this run is on 'cpu'"):
        interface.check_device("triton", "cpu")
    with pytest.raises(UnavailableError, match=r"kernel_backend = 'cutlass' needs a GPU, and this run is on 'cpu'"):
        interface.check_device("cutlass", "cpu")
    for backend, device in (("triton", "cuda"), ("auto", "cpu"), ("pytorch", "cpu")):
        interface.check_device(backend, device)


@pytest.mark.parametrize("quantization", ATTENTION_QUANTIZATIONS)
def test_every_quantization_is_there(quantization):
    output = attend(quantization=quantization, v=torch.full((3, 1, 8), 2.0, dtype=torch.bfloat16))
    assert output.shape == (3, 1, 8) and (output > 0).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backend": "cuda"}, "kernel_backend 'cuda' is not one of auto, cutlass, triton"),
        ({"quantization": "int8"}, "hstu_attn_quantization_mode 'int8' is not one of bf16"),
        ({"contextual_mask": "all"}, "contextual_mask 'all' is not one of prefix, history"),
        ({"max_attn_len": -1}, "max_attn_len -1 is negative"),
        ({"target_group_size": 0}, "target_group_size 0 is less than 1"),
        ({"scaling_seqlen": -1}, "scaling_seqlen -1 must be at least 1"),
        ({"max_seqlen": -1}, "max_seqlen -1 is negative"),
        ({"q": torch.ones(3, 1, 4)}, r"q \(3, 1, 4\), k \(3, 1, 8\)"),
        ({"v": torch.ones(3, 2, 8)}, r"v \(3, 2, 8\)"),
        ({"q": torch.ones(3, 8), "k": torch.ones(3, 8)}, r"q \(3, 8\), k \(3, 8\)"),
        ({name: torch.ones(3, 0, 8) for name in "qkv"}, r"with H and d from 1 on"),
        ({"v": torch.ones(3, 1, 0)}, r"with H and d from 1 on"),
        ({"offsets": torch.tensor(0)}, r"offsets must be \(B \+ 1,\)"),
        ({"offsets": torch.tensor([1, 3])}, "offsets must start at 0, not 1"),
        ({"offsets": torch.tensor([0, 4])}, "offsets end at 4, but there are only 3 rows"),
        ({"offsets": torch.tensor([0, 3, 2])}, "user 1 of the batch has -1 tokens"),
        ({"num_targets": torch.tensor([4])}, "3 tokens, which 0 contexts and 4 targets don't fit"),
        ({"num_contexts": torch.tensor([2]), "num_targets": torch.tensor([2])}, "which 2 contexts and 2 targets"),
        ({"num_targets": torch.tensor([-1])}, "which 0 contexts and -1 targets"),
        ({"num_targets": torch.tensor([1, 1])}, "one entry for each of 1 users"),
    ],
)
def test_arguments_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(**changes)


def test_auto_says_once_what_it_picked(caplog):
    interface._log_choice.cache_clear()
    with caplog.at_level(logging.INFO):
        attend(), attend(), attend(backend="pytorch")
    assert [record.getMessage() for record in caplog.records] == ["attention backend: pytorch (kernel_backend 'auto')"]


def test_value_width_may_differ():
    assert attend(v=torch.ones(3, 1, 5)).shape == (3, 1, 5)
