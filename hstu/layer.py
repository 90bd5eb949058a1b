"""The HSTU layer ("Actions Speak Louder than Words", Zhai et al. 2024), in the three forms that go by its name.

Tokens x (T, D), H heads of d; every style computes ``[u | v | q | k] = act(N(x) W1 + b1)``, ``O = attention(q, k, v)``,
``y = x + Dropout(gate) W2 + b2``, and they differ in this:

================  ===============  ========  ===============  ======  ==================  ====
layer_style       act on           norms     gate             biases  scores              eps
================  ===============  ========  ===============  ======  ==================  ====
recsys_examples   u, v, q, k       affine    u * N(O)         b1      q.k / sqrt(d)       1e-5
dlrm_v3           u                affine    [u, O, u * N(O)] b1      q.k / sqrt(d)       1e-6
research          u, v, q, k       no params u * N(O)         b2      q.k + bias(i, j)    1e-6
================  ===============  ========  ===============  ======  ==================  ====

"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from genrec.configs.schema import MixedPrecisionArgs, NetworkArgs
from genrec.hstu.attention import RelativeBias, hstu_attention
from genrec.hstu.attention.interface import check_available
from genrec.hstu.dropout import shared_dropout
from genrec.hstu.jagged import JaggedSequence
from genrec.hstu.linear import make_linear
from genrec.hstu.norm import HeadNorm, Norm
from genrec.hstu.parallel import ALONE, Split, TensorParallel, copy_to_region
from genrec.hstu.recompute import recomputed
from genrec.hstu.relative_bias import RELATIVE_BIASES


@dataclass(frozen=True)
class LayerStyle:
    """What tells the three layers apart; see the module's table."""

    activates_all: bool
    affine_norms: bool
    concatenates: bool
    input_bias: bool
    output_bias: bool
    relative_bias: bool
    epsilon: float


LAYER_STYLES = {
    "recsys_examples": LayerStyle(
        activates_all=True,
        affine_norms=True,
        concatenates=False,
        input_bias=True,
        output_bias=False,
        relative_bias=False,
        epsilon=1e-5,
    ),
    "dlrm_v3": LayerStyle(
        activates_all=False,
        affine_norms=True,
        concatenates=True,
        input_bias=True,
        output_bias=False,
        relative_bias=False,
        epsilon=1e-6,
    ),
    "research": LayerStyle(
        activates_all=True,
        affine_norms=False,
        concatenates=False,
        input_bias=False,
        output_bias=True,
        relative_bias=True,
        epsilon=1e-6,
    ),
}


class HSTULayer(nn.Module):
    """One layer. ``max_seqlen_tokens`` is N where ``scaling_seqlen`` is -1, and the reach of the relative bias.

    Start values, of every style and at every parallel size: W1 (one matrix u | v | q | k) and W2 Xavier-uniform over
    their whole shape, biases 0, the q and k part of b1 ``qk_bias_init``, relative biases normal with deviation 0.02.
    why_not: why this layer runs in the network's dtype where ``precision`` has others in FP8; "" where it doesn't.
    quantization, attention_backend: of its attention where that is in FP8, quantizes_in_eval: in evaluation mode too.
    """

    def __init__(
        self,
        network: NetworkArgs,
        *,
        max_seqlen_tokens: int,
        precision: MixedPrecisionArgs | None = None,
        why_not: str = "",
    ) -> None:
        super().__init__()
        self.network = network
        self.tp = ALONE
        self.num_heads = network.num_attention_heads  # of this rank
        self.style = LAYER_STYLES[network.layer_style]
        self.quantization, self.attention_backend, self.quantizes_in_eval = "bf16", network.kernel_backend, False
        asked = precision is not None and precision.has_fp8_attention
        self.attention_why_not = why_not if asked else ""
        if precision is not None and asked and not why_not:
            self.quantization = precision.hstu_attn_quantization_mode
            self.attention_backend = fp8_attention_backend(network, precision)
            self.quantizes_in_eval = precision.fp8_during_eval
        kind = relative_bias_kind(network)
        check_available(network.kernel_backend, self.quantization, has_bias=kind != "none")
        self.scaling_seqlen = max_seqlen_tokens if network.scaling_seqlen == -1 else network.scaling_seqlen
        self.alpha = network.attn_alpha
        if self.alpha is None:
            self.alpha = 1.0 if self.style.relative_bias else 1.0 / math.sqrt(network.kv_channels)
        width = network.num_attention_heads * network.kv_channels
        epsilon = self.style.epsilon if network.norm_epsilon is None else network.norm_epsilon
        affine = self.style.affine_norms
        self.input_norm = Norm(network.hidden_size, epsilon=epsilon, affine=affine)
        self.uvqk = make_linear(
            network.hidden_size, 4 * width, bias=self.style.input_bias, precision=precision, why_not=why_not
        )
        by_head = self.style.concatenates and network.output_norm == "group"
        self.output_norm = (
            HeadNorm(network.num_attention_heads, network.kv_channels, epsilon=epsilon)
            if by_head
            else Norm(width, epsilon=epsilon, affine=affine)
        )
        self.output = make_linear(
            self._num_gate_parts * width,
            network.hidden_size,
            bias=self.style.output_bias,
            precision=precision,
            why_not=why_not,
        )
        self.relative_bias = None if kind == "none" else RELATIVE_BIASES[kind](max_seqlen_tokens=max_seqlen_tokens)
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """The initialization that its parts don't set themselves: the query and key part of b1."""
        if self.uvqk.bias is not None:
            with torch.no_grad():
                self.uvqk.bias[self.uvqk.out_features // 2 :] = self.network.qk_bias_init

    def share_out(self, tp: TensorParallel) -> None:
        """Keep this rank's heads: their rows of W1 in u, v, q and k, their columns of W2 in each part of the gate."""
        assert self.num_heads % tp.size == 0
        self.tp = tp
        self.num_heads //= tp.size
        self.uvqk.share_out(tp, "rows", num_blocks=4)
        self.output_norm.share_out(tp)
        self.output.share_out(tp, "columns", num_blocks=self._num_gate_parts)

    @property
    def _num_gate_parts(self) -> int:
        return 3 if self.style.concatenates else 1

    def forward(self, sequence: JaggedSequence) -> JaggedSequence:
        """The same tokens, one layer on."""
        mixed = self._project(sequence)
        width = mixed.shape[1] // 4
        parts = mixed.split(width, dim=1)
        raw = mixed if self.style.activates_all else parts[0]
        activated = self._activate(raw)
        with _maybe_recomputed(self.network.recompute_input_silu, activated, lambda: self._activate(raw)):
            u, v, q, k = activated.split(width, dim=1) if self.style.activates_all else (activated, *parts[1:])
            attended = self._attend(sequence, q=q, k=k, v=v)
            gated = self._gate(sequence.real_rows(u), sequence.real_rows(attended))
        gated = shared_dropout(
            gated,
            p=self.network.hidden_dropout,
            training=self.training,
            split=Split(1, self._num_gate_parts),
            tp=self.tp,
        )
        return replace(sequence, values=sequence.values + self.output(sequence.padded(gated)))

    def _activate(self, raw: Tensor) -> Tensor:
        return F.silu(raw)

    def _project(self, sequence: JaggedSequence) -> Tensor:
        """u, v, q and k before their activation, (T + P, 4 * H * d)."""
        x = sequence.real_rows(sequence.values)
        normed = sequence.padded(self.input_norm(x))

        def again() -> Tensor:
            return sequence.padded(self.input_norm(x))

        with _maybe_recomputed(self.network.recompute_input_layernorm, normed, again):
            mixed: Tensor = self.uvqk(normed)
        return mixed

    def _attend(self, sequence: JaggedSequence, *, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(T + P, H * d), of this rank's heads."""
        heads = (-1, self.num_heads, self.network.kv_channels)
        is_fp8 = self.quantization != "bf16" and (self.training or self.quantizes_in_eval)
        attended = hstu_attention(
            q.view(heads),
            k.view(heads),
            v.view(heads),
            offsets=sequence.offsets,
            max_seqlen=sequence.max_seqlen,
            scaling_seqlen=self.scaling_seqlen,
            alpha=self.alpha,
            num_contexts=None if self.network.disable_contextual_mask else sequence.num_contexts,
            num_targets=sequence.num_targets,
            target_group_size=self.network.target_group_size,
            causal=self.network.is_causal,
            contextual_mask=self.network.contextual_mask,
            max_attn_len=self.network.max_attn_len,
            bias=self._relative_bias(sequence),
            backend=self.attention_backend if is_fp8 else self.network.kernel_backend,
            quantization=self.quantization if is_fp8 else "bf16",
        )
        return attended.flatten(1)

    def _relative_bias(self, sequence: JaggedSequence) -> RelativeBias | None:
        if self.relative_bias is None:
            return None
        assert sequence.timestamps is not None
        # All heads read them, so their gradient is a sum over all ranks' heads.
        position_weight, time_weight = (copy_to_region(weight, self.tp) for weight in self.relative_bias())
        # A row's time is its own. The research code takes the next item's, which tells history about the future.
        return RelativeBias(position_weight, time_weight, sequence.timestamps, sequence.timestamps)

    def _gate(self, u: Tensor, attended: Tensor) -> Tensor:
        """The input of the output projection: (T, H * d), or (T, 3 * H * d) where the parts are concatenated."""
        gated = u * self.output_norm(attended)
        return torch.cat([u, attended, gated], dim=1) if self.style.concatenates else gated


def fp8_attention_backend(network: NetworkArgs, precision: MixedPrecisionArgs) -> str:
    """The backend of attention in FP8: "pytorch" emulates it, which is what ``precision.backend`` may ask for."""
    return "pytorch" if precision.backend == "emulated" else network.kernel_backend


def relative_bias_kind(network: NetworkArgs) -> str:
    """The kind of relative bias: ``relative_bias``, where "auto" is what the layer_style itself has."""
    if network.relative_bias != "auto":
        return network.relative_bias
    return "table" if LAYER_STYLES[network.layer_style].relative_bias else "none"


def _maybe_recomputed(wanted: bool, result: Tensor, function: Callable[[], Tensor]) -> AbstractContextManager[None]:
    return recomputed(result, function) if wanted else nullcontext()
