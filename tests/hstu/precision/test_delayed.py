"""Delayed scaling's histories and scales, traced by hand and against a slow definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genrec.hstu.precision.delayed import ROLES, DelayedState, update_states
from genrec.hstu.precision.formats import E4M3, E5M2
from genrec.hstu.precision.recipes import LinearRecipe

FLOAT32_MAX = torch.finfo(torch.float32).max


def make_state(*, length: int = 3, algo: str = "max", margin: int = 0) -> DelayedState:
    recipe = LinearRecipe(
        name="delayed",
        forward_format=E4M3,
        backward_format=E5M2,
        pad_multiple=16,
        dim_multiple=16,
        amax_history_len=length,
        amax_compute_algo=algo,
        margin=margin,
    )
    return DelayedState(recipe, "cpu")


def run_pass(state: DelayedState, amax: float, role: str = "input") -> None:
    state.quantize(torch.tensor([[amax / 2, -amax]]), role, record=True)
    update_states([state], [role])


def test_starts_with_scale_one_and_an_empty_history() -> None:
    state = make_state(length=5)
    for role in ROLES:
        assert state.scale[role].tolist() == [1.0]
        assert state.amax_history[role].tolist() == [0.0] * 5


def test_five_passes_by_hand() -> None:
    state = make_state(length=3)
    trace = []
    for amax in (4.0, 2.0, 0.0, 7.0, 1.0):
        run_pass(state, amax)
        trace.append((state.amax_history["input"].tolist(), state.scale["input"].item()))
    assert trace == [
        ([0.0, 0.0, 4.0], 112.0),
        ([0.0, 4.0, 2.0], 112.0),  # the 4 is still remembered
        ([0.0, 4.0, 2.0], 112.0),  # an amax of zero is no pass: Transformer Engine doesn't even roll
        ([0.0, 2.0, 7.0], 64.0),
        ([0.0, 7.0, 1.0], 64.0),
    ]


def test_five_passes_by_hand_most_recent() -> None:
    state = make_state(length=3, algo="most_recent", margin=1)
    trace = []
    for amax in (4.0, 2.0, 0.0, 7.0, 1.0):
        run_pass(state, amax, "grad_output")
        trace.append((state.amax_history["grad_output"].tolist(), state.scale["grad_output"].item()))
    assert trace == [
        ([0.0, 0.0, 4.0], 7168.0),  # 57344 / 4 / 2
        ([0.0, 4.0, 2.0], 14336.0),
        ([0.0, 4.0, 2.0], 14336.0),
        ([0.0, 2.0, 7.0], 4096.0),
        ([0.0, 7.0, 1.0], 28672.0),
    ]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_a_history_of_one_remembers_the_last_pass_alone(algo) -> None:
    state = make_state(length=1, algo=algo)
    for amax, scale in ((4.0, 112.0), (2.0, 224.0), (0.0, 224.0), (7.0, 64.0)):
        run_pass(state, amax)
        assert state.amax_history["input"].tolist() == [0.0]
        assert state.scale["input"].tolist() == [scale]


def test_an_old_amax_is_forgotten() -> None:
    state = make_state(length=2)
    for amax, scale in ((7.0, 64.0), (1.0, 64.0), (1.0, 448.0)):
        run_pass(state, amax)
        assert state.scale["input"].tolist() == [scale]


def test_quantizes_with_the_scale_from_before_the_pass() -> None:
    state = make_state()
    first = state.quantize(torch.tensor([[4.0, 0.3]]), "input", record=True)
    assert first.scale_inv.tolist() == [1.0]
    assert first.values.float().tolist() == [[4.0, 0.3125]]
    second = state.quantize(torch.tensor([[4.0, 600.0]]), "input", record=True)
    assert second.values.float().tolist() == [[4.0, 448.0]], "what a stale scale can't hold must saturate"
    update_states([state], ["input"])
    assert state.scale["input"].tolist() == [np.float32(448.0) / np.float32(600.0)]
    assert state.quantize(torch.tensor([[600.0]]), "input", record=True).values.float().item() == 448.0


def test_history_collects_the_largest_of_several_casts() -> None:
    state = make_state()
    for amax in (2.0, 5.0, 3.0):
        state.quantize(torch.tensor([[amax]]), "weight", record=True)
    assert state.amax_history["weight"].tolist() == [5.0, 0.0, 0.0]
    assert state.scale["weight"].tolist() == [1.0]
    update_states([state], ["weight"])
    assert state.amax_history["weight"].tolist() == [0.0, 0.0, 5.0]
    assert state.amax_history["input"].tolist() == [0.0, 0.0, 0.0]


def test_without_recording_nothing_is_remembered() -> None:
    state = make_state()
    run_pass(state, 4.0)
    before = {name: tensor.clone() for name, tensor in state.state_dict().items()}
    assert state.quantize(torch.tensor([[3.0]]), "input", record=False).scale_inv.tolist() == [np.float32(1 / 112)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.state_dict().items())


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_an_infinite_amax_leaves_the_scale(algo) -> None:
    state = make_state(length=2, algo=algo)
    run_pass(state, 4.0)
    run_pass(state, math.inf)
    assert state.scale["input"].tolist() == [112.0]
    run_pass(state, 7.0)  # "max" still sees the infinity
    assert state.scale["input"].tolist() == [112.0 if algo == "max" else 64.0]
    run_pass(state, 7.0)
    assert state.scale["input"].tolist() == [64.0]


def test_nan_is_not_taken_for_an_amax() -> None:
    state = make_state()
    state.quantize(torch.tensor([[math.nan, 4.0]]), "input", record=True)
    assert state.amax_history["input"].tolist() == [4.0, 0.0, 0.0]


def test_a_scale_beyond_float32_is_its_largest_value() -> None:
    state = make_state()
    run_pass(state, 1e-40)
    assert state.scale["input"].tolist() == [FLOAT32_MAX]
    assert state.quantize(torch.tensor([[1e-40]]), "input", record=True).dequantize().isfinite().all()


def test_empty_tensors_leave_the_state() -> None:
    state = make_state()
    run_pass(state, 4.0)
    state.quantize(torch.zeros(0, 16), "input", record=True)
    update_states([state], ["input"])
    assert state.amax_history["input"].tolist() == [0.0, 0.0, 4.0]
    assert state.scale["input"].tolist() == [112.0]


@settings(max_examples=100, deadline=None)
@given(
    amaxes=st.lists(st.one_of(st.just(0.0), st.just(math.inf), st.floats(2.0**-149, 2.0**127, width=32)), max_size=12),
    length=st.integers(1, 5),
    algo=st.sampled_from(["max", "most_recent"]),
    margin=st.integers(0, 3),
)
def test_against_a_slow_definition(amaxes, length, algo, margin) -> None:
    state = make_state(length=length, algo=algo, margin=margin)
    window: list[float] = []
    scale = 1.0
    for amax in amaxes:
        history = state.amax_history["input"]
        history[0] = amax
        update_states([state], ["input"])
        if amax != 0.0:
            window = [*window, amax][-length:]
            chosen = max(window) if algo == "max" else amax
            if not math.isinf(chosen):
                with np.errstate(over="ignore"):
                    scale = float(np.float32(448.0 / 2**margin) / np.float32(chosen))
                scale = min(scale, FLOAT32_MAX)
            # The oldest is dropped as its place, history[0], is cleared for the next pass.
            window = window[-(length - 1) :] if length > 1 else []
        assert state.scale["input"].tolist() == [scale]
        assert history.tolist() == [0.0] * (length - len(window)) + [float(value) for value in window]


def test_state_dict_is_live_and_loads_back() -> None:
    state, other = make_state(), make_state()
    names = {f"{kind}.{role}" for role in ROLES for kind in ("amax_history", "scale")}
    assert set(state.state_dict()) == names
    run_pass(state, 4.0)
    state.quantize(torch.tensor([[9.0]]), "grad_output", record=True)
    assert state.state_dict()["scale.input"].tolist() == [112.0]
    other.load_state_dict(state.state_dict())
    state.scale["input"].fill_(5.0)
    assert other.scale["input"].tolist() == [112.0], "loading copies"
    assert other.amax_history["grad_output"].tolist() == [9.0, 0.0, 0.0]


def test_loading_refuses_another_length_or_missing_tensors() -> None:
    tensors = make_state(length=4).state_dict()
    with pytest.raises(ValueError, match=r"amax_history\.input"):
        make_state(length=3).load_state_dict(tensors)
    del tensors["scale.weight"]
    with pytest.raises(ValueError, match=r"scale\.weight"):
        make_state(length=4).load_state_dict(tensors)


def test_updating_nothing_is_allowed() -> None:
    update_states([], ["input"])
