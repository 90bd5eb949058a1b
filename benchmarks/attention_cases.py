"""The shapes that attention is timed with, and our side of the comparison."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from genrec.hstu.attention import hstu_attention

FULL_LENGTHS = (512, 1024, 2048, 4096, 8192)
FLOP_FACTOR = {"forward": 1.0, "backward": 2.5, "both": 3.5}
DIRECTIONS = tuple(FLOP_FACTOR)
# Name, users, shortest and longest; lengths between them are log-uniform, which is Zipf's law of exponent 1.
JAGGED = (("jagged long", 32, 128, 8192), ("jagged short", 512, 40, 700))


@dataclass(frozen=True)
class Case:
    """Users' lengths, all of whose users have this many contexts and targets (within those lengths)."""

    name: str
    lengths: tuple[int, ...]
    dim: int
    num_heads: int
    num_contexts: int = 0
    num_targets: int = 0

    @property
    def num_pairs(self) -> int:
        """Pairs of tokens that see each other, a head."""
        total = 0
        for length in self.lengths:
            c, end = self.num_contexts, length - self.num_targets
            total += c * end + (end * (end + 1) - c * (c + 1)) // 2 + self.num_targets * (end + 1)
        return total

    def flops(self, direction: str) -> float:
        """What the mathematics needs."""
        return FLOP_FACTOR[direction] * 4 * self.dim * self.num_heads * self.num_pairs


def make_cases(*, dims: Sequence[int], lengths: Sequence[int], batch_size: int, num_heads: int) -> Iterator[Case]:
    """All shapes, for all widths: full causal users, then jagged ones with contexts and targets."""
    for dim in dims:
        for length in lengths:
            yield Case(f"full {length}", (length,) * batch_size, dim, num_heads)
        for name, users, shortest, longest in JAGGED:
            drawn = draw_lengths(users, shortest, longest)
            yield Case(name, drawn, dim, num_heads, num_contexts=2, num_targets=20)


def draw_lengths(num_users: int, shortest: int, longest: int) -> tuple[int, ...]:
    """Log-uniform, the same in every call."""
    places = torch.rand(num_users, generator=torch.Generator().manual_seed(0)).tolist()
    return tuple(round(shortest * (longest / shortest) ** place) for place in places)


@dataclass(frozen=True)
class Inputs:
    """A case's tensors. ``fused``: u | v | q | k of every token."""

    case: Case
    fused: Tensor
    grad: Tensor
    offsets: Tensor
    num_contexts: Tensor | None
    num_targets: Tensor | None

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Slices of the fused projection."""
        heads = (-1, self.case.num_heads, self.case.dim)
        _, v, q, k = (part.view(heads) for part in self.fused.chunk(4, dim=1))
        return q, k, v


def draw(case: Case, dtype: torch.dtype) -> Inputs:
    """Normal numbers: zeros would cost less power, so run faster."""
    rows, width = sum(case.lengths), case.num_heads * case.dim
    generator = torch.Generator("cuda").manual_seed(0)
    users = len(case.lengths)
    return Inputs(
        case=case,
        fused=torch.randn(rows, 4 * width, device="cuda", dtype=dtype, generator=generator),
        grad=torch.randn(rows, case.num_heads, case.dim, device="cuda", dtype=dtype, generator=generator),
        offsets=torch.tensor([0, *itertools.accumulate(case.lengths)], device="cuda"),
        num_contexts=torch.full((users,), case.num_contexts, device="cuda") if case.num_contexts else None,
        num_targets=torch.full((users,), case.num_targets, device="cuda") if case.num_targets else None,
    )


# By direction ("forward", "backward", "both"), a call that returns what was computed: the output, gradients of q, k, v.
Contender = dict[str, Callable[[], tuple[Tensor, ...]]]


def ours(inputs: Inputs, backend: str = "triton", quantization: str = "bf16") -> Contender:
    """What the layer calls: autograd, quantization and launches included."""
    q, k, v = (x.detach().requires_grad_() for x in inputs.qkv)
    longest = max(inputs.case.lengths)

    def forward() -> Tensor:
        return hstu_attention(
            q,
            k,
            v,
            offsets=inputs.offsets,
            max_seqlen=longest,
            scaling_seqlen=longest,
            num_contexts=inputs.num_contexts,
            num_targets=inputs.num_targets,
            contextual_mask="history",
            backend=backend,
            quantization=quantization,
        )

    return differentiated(forward, (q, k, v), inputs.grad)


def differentiated(forward: Callable[[], Tensor], qkv: tuple[Tensor, ...], grad: Tensor) -> Contender:
    """The three directions of a function of q, k and v that autograd knows; calls it once."""
    output = forward()

    def forward_only() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (forward(),)

    return {
        "forward": forward_only,
        "backward": lambda: torch.autograd.grad(output, qkv, grad, retain_graph=True),
        "both": lambda: torch.autograd.grad(forward(), qkv, grad),
    }
