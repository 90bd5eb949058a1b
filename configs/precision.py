"""``MixedPrecisionArgs``: what runs in FP8, and what FP8 products ask of shapes.

Part of :mod:`genrec.configs.schema`, from where other packages import it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from genrec.configs.checks import (
    convert_fields,
    refusal,
    require,
    require_at_least,
    require_choice,
    set_field,
)

# By linear_recipe, what an FP8 product needs its sizes to be multiples of: the number of rows (tokens), and both widths
# of the linear. cuBLAS takes FP8 matrices whose leading dimension is a multiple of 16, and as backward transposes them,
# that holds for rows and widths; those of "mxfp8" are its blocks of 32.
FP8_ROW_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
FP8_DIM_MULTIPLES = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32}
LINEAR_RECIPES = tuple(FP8_DIM_MULTIPLES)
ATTENTION_QUANTIZATIONS = ("bf16", "fp8", "1xdim", "128x1", "per-block", "per-head", "per-batch", "per-tensor")
DELAYED_FIELDS = ("amax_history_len", "amax_compute_algo", "margin")
# A tensor's largest number becomes 448 / 2^margin, and e4m3's smallest is 2^-9: much beyond, all of it rounds to zero.
MAX_MARGIN = 16
# Far beyond what is of use, and what memory takes.
MAX_PAD_MULTIPLE, MAX_AMAX_HISTORY_LEN = 2**16, 2**20


@dataclass(frozen=True)
class MixedPrecisionArgs:
    """What runs in FP8 inside the layers, independent of NetworkArgs.dtype_str, which is what flows between them.

    ``mixed_precision_dtype=None`` turns all of it off and leaves the other fields without effect, so that one file
    serves both runs of a comparison. Weights, gradients and optimizer state stay float32 under every choice here.
    """

    mixed_precision_dtype: str | None = None  # None (nothing in FP8), "fp8"
    # How linears are scaled: None (no FP8 linears), "delayed" (a scale a tensor, from earlier passes), "tensorwise" (a
    # scale a tensor, from its own values), "blockwise" (a scale for 1x128 values, 128x128 of a weight), "mxfp8" (1x32).
    linear_recipe: str | None = "tensorwise"
    # "hybrid": inputs and weights in e4m3, gradients in e5m2, of larger range; "e4m3": all three. For FP8 linears.
    linear_scaling_precision: str = "hybrid"
    enable_fp8_for_prediction_head: bool = False  # the head's hidden layers too; its last one is always float32
    # Attention: "bf16" (stays in dtype_str), "fp8" (plain cast), and scaled "1xdim" (alias "128x1"), "per-block",
    # "per-head", "per-batch", "per-tensor".
    hstu_attn_quantization_mode: str = "bf16"
    # genrec's own; the first three are read by linear_recipe = "delayed" alone
    amax_history_len: int = 1024  # passes whose largest values a scale is made from
    amax_compute_algo: str = "max"  # "max" of the history, "most_recent" of it
    margin: int = 0  # scales are 2^margin smaller than the history asks for: headroom for growth
    fp8_during_eval: bool = False  # evaluate in FP8 as well; else evaluation runs in dtype_str
    # The first and the last HSTU layer, and the projections before the first, stay in dtype_str.
    skip_first_last_layer: bool = False
    pad_multiple: int | None = None  # of the rows of FP8 linears; None: FP8_ROW_MULTIPLES, of which it is a multiple
    # "te": linears by Transformer Engine, attention by Triton, on a GPU; "emulated": both in plain PyTorch, anywhere.
    backend: str = "te"

    def __post_init__(self) -> None:
        convert_fields(self)
        require_choice(self, "mixed_precision_dtype", ("fp8",))
        require_choice(self, "linear_recipe", LINEAR_RECIPES)
        self._check_scaling_precision()
        require_choice(self, "hstu_attn_quantization_mode", ATTENTION_QUANTIZATIONS)
        if self.hstu_attn_quantization_mode == "128x1":
            set_field(self, "hstu_attn_quantization_mode", "1xdim")
        require_choice(self, "amax_compute_algo", ("max", "most_recent"))
        require_choice(self, "backend", ("te", "emulated"))
        require_at_least(self, 1, "amax_history_len", "pad_multiple")
        require_at_least(self, 0, "margin")
        too_much = f"must be at most {MAX_MARGIN}, since beyond e4m3 rounds all of a tensor to zero"
        require(self, "margin", self.margin <= MAX_MARGIN, too_much)
        if self.mixed_precision_dtype is not None:
            self._check_something_runs_in_fp8()
            self._check_recipe_options()

    @property
    def has_fp8_linears(self) -> bool:
        """Whether linears run in FP8 at all."""
        return self.mixed_precision_dtype is not None and self.linear_recipe is not None

    @property
    def has_fp8_attention(self) -> bool:
        """Whether attention runs in FP8."""
        return self.mixed_precision_dtype is not None and self.hstu_attn_quantization_mode != "bf16"

    def _check_scaling_precision(self) -> None:
        e5m2 = self.linear_scaling_precision.lower() == "e5m2"
        why = "its two bits of mantissa are too few for inputs and weights, and Transformer Engine trains in neither"
        allowed = "must be 'hybrid' (e4m3 forward, e5m2 gradients) or 'e4m3'"
        if e5m2:
            raise refusal(self, "linear_scaling_precision", f"{allowed}: {why}")
        require_choice(self, "linear_scaling_precision", ("hybrid", "e4m3"))

    def _check_something_runs_in_fp8(self) -> None:
        nothing = "must come with a linear_recipe or with hstu_attn_quantization_mode other than 'bf16'"
        require(self, "mixed_precision_dtype", self.has_fp8_linears or self.has_fp8_attention, nothing)
        without = self.enable_fp8_for_prediction_head and not self.has_fp8_linears
        require(self, "enable_fp8_for_prediction_head", not without, "must come with a linear_recipe")

    def _check_recipe_options(self) -> None:
        """Refuse sizes beyond reason, and options that the recipe would not read."""
        pads = self.pad_multiple is None or self.pad_multiple <= MAX_PAD_MULTIPLE
        require(self, "pad_multiple", pads, f"must be at most {MAX_PAD_MULTIPLE}")
        remembers = self.amax_history_len <= MAX_AMAX_HISTORY_LEN
        require(self, "amax_history_len", remembers, f"must be at most {MAX_AMAX_HISTORY_LEN}")
        recipe = self.linear_recipe
        defaults = {item.name: item.default for item in fields(self)}
        for name in DELAYED_FIELDS:
            read = recipe == "delayed" or getattr(self, name) == defaults[name]
            only = f"must stay {defaults[name]!r} with linear_recipe = {recipe!r}, since only 'delayed' reads it"
            require(self, name, read, only)
        if recipe is not None and self.pad_multiple is not None:
            own = FP8_ROW_MULTIPLES[recipe]
            allowed = f"must be None or a multiple of {own}, which {recipe!r} needs"
            require(self, "pad_multiple", self.pad_multiple % own == 0, allowed)
