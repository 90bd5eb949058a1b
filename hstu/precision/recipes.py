"""What a linear's FP8 recipe is, resolved from ``MixedPrecisionArgs``; the names are those of its ``linear_recipe``.

==========  =================================================  ======================================
recipe      a scale for                                        known as, in Transformer Engine
==========  =================================================  ======================================
delayed     each tensor, from the amaxes of earlier passes     ``DelayedScaling``
tensorwise  each tensor, from its own amax                     ``Float8CurrentScaling``
blockwise   1 x 128 values; 128 x 128 of a weight              ``Float8BlockScaling``, power-of-two scales
mxfp8       1 x 32 values                                      ``MXFP8BlockScaling``, power-of-two scales
==========  =================================================  ======================================
"""

from __future__ import annotations

from dataclasses import dataclass

from genrec.configs.schema import FP8_DIM_MULTIPLES, FP8_ROW_MULTIPLES, MixedPrecisionArgs
from genrec.hstu.precision.formats import E4M3, E5M2, FP8Format


@dataclass(frozen=True)
class LinearRecipe:
    """How a linear computes in FP8.

    forward_format, backward_format: of inputs and weights, and of gradients. pad_multiple: what the number of rows must
    be a multiple of; dim_multiple: the same of in_features and out_features. The rest is read by "delayed" alone.
    """

    name: str
    forward_format: FP8Format
    backward_format: FP8Format
    pad_multiple: int
    dim_multiple: int
    amax_history_len: int
    amax_compute_algo: str
    margin: int

    @property
    def has_state(self) -> bool:
        """Whether scales depend on earlier passes, so that a checkpoint must hold them."""
        return self.name == "delayed"

    @property
    def scaling_precision(self) -> str:
        """MixedPrecisionArgs.linear_scaling_precision."""
        return "hybrid" if self.backward_format == E5M2 else "e4m3"


def linear_recipe(args: MixedPrecisionArgs | None) -> LinearRecipe | None:
    """The recipe that ``args`` choose for linears, None where these don't run in FP8."""
    if args is None or args.mixed_precision_dtype is None or args.linear_recipe is None:
        return None
    name = args.linear_recipe
    return LinearRecipe(
        name=name,
        forward_format=E4M3,
        backward_format=E5M2 if args.linear_scaling_precision == "hybrid" else E4M3,
        pad_multiple=args.pad_multiple or FP8_ROW_MULTIPLES[name],
        dim_multiple=FP8_DIM_MULTIPLES[name],
        amax_history_len=args.amax_history_len,
        amax_compute_algo=args.amax_compute_algo,
        margin=args.margin,
    )


def row_multiple(args: MixedPrecisionArgs | None) -> int:
    """What the encoder pads the number of tokens to a multiple of; 1 where nothing asks for it."""
    if args is None or args.mixed_precision_dtype is None:
        return 1
    recipe = linear_recipe(args)
    return (args.pad_multiple or 1) if recipe is None else recipe.pad_multiple


def num_pad_rows(num_rows: int, multiple: int) -> int:
    """Zero rows that bring ``num_rows`` to a positive multiple: FP8 products of nothing at all are not defined."""
    return -num_rows % multiple if num_rows > 0 or multiple == 1 else multiple
