"""Oracles and builders: HSTU written out with loops over users, rows and keys, and tiny networks and inputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from genrec.configs.schema import NetworkArgs
from genrec.hstu.encoder import HSTUEncoder
from genrec.hstu.preprocessor import HSTUInputs


@dataclass(frozen=True)
class UserTokens:
    """One user: tokens of each kind."""

    contexts: int = 0
    history: int = 0
    targets: int = 0

    @property
    def length(self):
        return self.contexts + self.history + self.targets


@dataclass(frozen=True)
class Masking:
    """The mask's knobs, named as in hstu_attention."""

    causal: bool = True
    contextual_mask: str = "prefix"
    max_attn_len: int = 0
    target_group_size: int = 1

    def kwargs(self):
        return vars(self)


@dataclass(frozen=True)
class Case:
    """Users, mask, and the tensors that describe them."""

    users: tuple[UserTokens, ...]
    masking: Masking = field(default_factory=Masking)

    @property
    def offsets(self):
        return torch.tensor([0, *itertools.accumulate(user.length for user in self.users)])

    @property
    def num_contexts(self):
        return torch.tensor([user.contexts for user in self.users], dtype=torch.int64)

    @property
    def num_targets(self):
        return torch.tensor([user.targets for user in self.users], dtype=torch.int64)

    @property
    def num_tokens(self):
        return sum(user.length for user in self.users)

    @property
    def max_seqlen(self):
        return max((user.length for user in self.users), default=0)


def sees(i: int, j: int, user: UserTokens, masking: Masking) -> bool:
    """Whether row i sees key j, in words."""
    history_end = user.contexts + user.history
    if i < user.contexts:
        return j < (user.contexts if masking.contextual_mask == "prefix" else history_end)
    if j < user.contexts:
        return True
    if j >= history_end:
        same_group = (i - history_end) // masking.target_group_size == (j - history_end) // masking.target_group_size
        return i >= history_end and same_group and (j <= i or not masking.causal)
    if masking.causal and j > i:
        return False
    place = min(i, history_end)
    return masking.max_attn_len == 0 or abs(place - j) <= masking.max_attn_len


@dataclass(frozen=True)
class LoopBias:
    """Relative bias as plain lists."""

    position: list
    time: list
    query_times: list
    key_times: list

    def indices(self, start: int, i: int, j: int, user: UserTokens):
        history_end = user.contexts + user.history
        place = len(self.position) // 2 + min(j, history_end) - min(i, history_end)
        gap = abs(self.query_times[start + i] - self.key_times[start + j])
        return place, min(int(math.log(max(gap, 1)) / 0.301), len(self.time) - 1)


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def loop_attention(q, k, v, grad, *, case: Case, alpha: float, scaling_seqlen: int, bias: LoopBias | None = None):
    """Output and gradients of q, k, v, position and time weights, from nested lists (T, H, d), by the paper's formulas.

    dS = dP * sigma(s)(1 + s(1 - sigma(s))) * M / N; dq = alpha dS k; dk = alpha dS^T q; dv = A^T do.
    """
    num_rows, num_heads, width, value_width = len(q), len(q[0]), len(q[0][0]), len(v[0][0])
    zeros = lambda d: [[[0.0] * d for _ in range(num_heads)] for _ in range(num_rows)]  # noqa: E731
    output, dq, dk, dv = zeros(value_width), zeros(width), zeros(width), zeros(value_width)
    dposition = [0.0] * (len(bias.position) if bias else 0)
    dtime = [0.0] * (len(bias.time) if bias else 0)
    start = 0
    for user in case.users:
        for i, j in itertools.product(range(user.length), repeat=2):
            if not sees(i, j, user, case.masking):
                continue
            place, bucket = bias.indices(start, i, j, user) if bias else (None, None)
            row, key = start + i, start + j
            for h in range(num_heads):
                s = alpha * dot(q[row][h], k[key][h])
                if bias:
                    s += bias.position[place] + bias.time[bucket]
                sigma = 1 / (1 + math.exp(-s))
                a = s * sigma / scaling_seqlen
                ds = dot(grad[row][h], v[key][h]) * sigma * (1 + s * (1 - sigma)) / scaling_seqlen
                for d in range(value_width):
                    output[row][h][d] += a * v[key][h][d]
                    dv[key][h][d] += a * grad[row][h][d]
                for d in range(width):
                    dq[row][h][d] += alpha * ds * k[key][h][d]
                    dk[key][h][d] += alpha * ds * q[row][h][d]
                if bias:
                    dposition[place] += ds
                    dtime[bucket] += ds
        start += user.length
    return output, dq, dk, dv, dposition, dtime


def layer_norm(x, epsilon):
    """Without parameters, one row."""
    centered = x - x.sum() / x.shape[0]
    return centered / torch.sqrt((centered * centered).sum() / x.shape[0] + epsilon)


def silu(x):
    return x / (1 + torch.exp(-x))


def loop_layer(layer, x, *, case: Case, alpha: float, scaling_seqlen: int, timestamps=None):
    """One HSTU layer over (T, D), row by row and key by key; ``layer`` lends only its parameters."""
    network, weights = layer.network, dict(layer.named_parameters())
    style, heads, d = network.layer_style, network.num_attention_heads, network.kv_channels
    epsilon = {"recsys_examples": 1e-5, "dlrm_v3": 1e-6, "research": 1e-6}[style]
    uvqk = []
    for row in x:
        normed = layer_norm(row, epsilon)
        if style != "research":
            normed = normed * weights["input_norm.weight"] + weights["input_norm.bias"]
        mixed = weights["uvqk.weight"] @ normed + weights.get("uvqk.bias", 0)
        parts = list(mixed.split(heads * d))
        activated = parts[:1] if style == "dlrm_v3" else parts
        uvqk.append([silu(part) for part in activated] + parts[len(activated) :])
    outputs, start = [], 0
    for user in case.users:
        for i in range(user.length):
            attended = []
            u, _, q, _ = uvqk[start + i]
            for h in range(heads):
                head, total = slice(h * d, (h + 1) * d), torch.zeros(d, dtype=x.dtype)
                for j in range(user.length):
                    if not sees(i, j, user, case.masking):
                        continue
                    _, v, _, k = uvqk[start + j]
                    score = alpha * (q[head] * k[head]).sum()
                    if layer.relative_bias is not None:
                        position, time = layer.relative_bias()
                        bias = LoopBias([0] * len(position), [0] * len(time), timestamps, timestamps)
                        place, bucket = bias.indices(start, i, j, user)
                        score = score + position[place] + time[bucket]
                    total = total + silu(score) / scaling_seqlen * v[head]
                attended.append(total)
            outputs.append(x[start + i] + loop_output(style, network, weights, u, attended, epsilon))
        start += user.length
    return torch.stack(outputs)


def loop_output(style, network, weights, u, attended, epsilon):
    """What the layer adds to one row."""
    joined = torch.cat(attended)
    if style == "dlrm_v3" and network.output_norm == "group":
        scale, shift = weights["output_norm.weight"], weights["output_norm.bias"]
        normed = torch.cat([layer_norm(a, epsilon) * scale[h] + shift[h] for h, a in enumerate(attended)])
    else:
        normed = layer_norm(joined, epsilon)
        if style != "research":
            normed = normed * weights["output_norm.weight"] + weights["output_norm.bias"]
    gate = torch.cat([u, joined, u * normed]) if style == "dlrm_v3" else u * normed
    return weights["output.weight"] @ gate + weights.get("output.bias", 0)


@pytest.fixture(scope="session")
def oracle():
    """The loops and their vocabulary, as a namespace."""

    class Oracle:
        pass

    for item in (UserTokens, Masking, Case, LoopBias, sees, loop_attention, loop_layer):
        setattr(Oracle, item.__name__, staticmethod(item))
    return Oracle


@pytest.fixture(scope="session")
def make_network() -> Callable[..., NetworkArgs]:
    """A tiny float32 network without dropout; keywords override."""

    def make(**changes) -> NetworkArgs:
        network = NetworkArgs(
            num_layers=2,
            hidden_size=12,
            num_attention_heads=2,
            kv_channels=8,
            hidden_dropout=0.0,
            dtype_str="float32",
            num_position_buckets=32,
        )
        return replace(network, **changes)

    return make


@pytest.fixture(scope="session")
def make_encoder(make_network) -> Callable[..., HSTUEncoder]:
    """A float64 encoder with every parameter away from its initialization, so that no term vanishes."""

    def make(*, item_dim=12, action_dim=12, context_dim=12, max_seqlen_tokens=64, seed=0, **network) -> HSTUEncoder:
        torch.manual_seed(seed)
        encoder = HSTUEncoder(
            make_network(**network),
            item_dim=item_dim,
            action_dim=action_dim,
            context_dim=context_dim,
            max_seqlen_tokens=max_seqlen_tokens,
        ).double()
        encoder.preprocessor.dtype = torch.float64
        with torch.no_grad():
            for parameter in encoder.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        return encoder

    return make


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., HSTUInputs]:
    """Inputs of users with the given numbers of events; every user's content depends on its seed alone."""

    def make(
        events: Sequence[int],
        *,
        candidates: Sequence[int] | None = None,
        contexts: Sequence[int] | None = None,
        actions: bool = True,
        seeds: Sequence[int] | None = None,
        width: int = 12,
    ) -> HSTUInputs:
        seeds = range(len(events)) if seeds is None else seeds
        rows = [
            _user_rows(e, c, s, width) for e, c, s in zip(events, contexts or [0] * len(events), seeds, strict=True)
        ]
        stack = lambda i: torch.cat([torch.empty(0, width, dtype=torch.float64), *(row[i] for row in rows)])  # noqa: E731
        times = torch.cat([torch.empty(0, dtype=torch.int64), *(row[3] for row in rows)])
        cumulate = lambda lengths: torch.tensor([0, *itertools.accumulate(lengths)])  # noqa: E731
        return HSTUInputs(
            item=stack(0).requires_grad_(),
            action=stack(1).requires_grad_() if actions else None,
            event_offsets=cumulate(events),
            timestamps=times,
            num_candidates=torch.tensor(candidates or [0] * len(events), dtype=torch.int64),
            context=stack(2).requires_grad_() if contexts is not None else None,
            context_offsets=cumulate(contexts) if contexts is not None else None,
            max_num_events=max(events, default=0),
            max_num_contexts=max(contexts or [0], default=0),
        )

    return make


def _user_rows(events: int, contexts: int, seed: int, width: int):
    generator = torch.Generator().manual_seed(1000 + seed)
    # One stream a kind, so that a user with fewer events is a prefix of the one with more.
    draw = lambda rows: torch.randn(64, width, generator=generator, dtype=torch.float64)[:rows]  # noqa: E731
    item, action, context = draw(events), draw(events), draw(contexts)
    gaps = torch.randint(0, 5000, (64,), generator=generator)[:events]
    return item, action, context, 10**9 + gaps.cumsum(0)


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """Every fresh uninitialised buffer is filled with NaN, so that a row nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
