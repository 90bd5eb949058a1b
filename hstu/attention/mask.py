"""Who sees whom: the one definition of HSTU's attention mask.

A user's tokens are c contexts, then history, then n targets. With 1 context (x), 3 history tokens and 2 targets, each a
group of its own, a row sees the marked columns::

         x h h h t t
    x    1 . . . . .      contexts see each other, both ways ("history": all of the history too)
    h    1 1 . . . .      history sees contexts and what came before
    h    1 1 1 . . .
    h    1 1 1 1 . .
    t    1 1 1 1 1 .      a target sees contexts, history and its own group up to itself
    t    1 1 1 1 . 1

A window (``max_attn_len`` > 0) hides history further back than that many tokens. Targets all stand at the place right
after the history, so that what one sees doesn't depend on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from genrec.configs.schema import CONTEXTUAL_MASKS


@dataclass(frozen=True)
class MaskRules:
    """What every user of a batch has in common; lengths are in tokens, ``max_attn_len=0`` means no window.

    ``causal=False`` lets history look ahead within the history and targets within their group; contexts still see what
    ``contextual_mask`` says, and nothing but a target's own group ever sees a target.
    """

    causal: bool = True
    contextual_mask: str = "prefix"
    max_attn_len: int = 0
    target_group_size: int = 1

    def __post_init__(self) -> None:
        if self.contextual_mask not in CONTEXTUAL_MASKS:
            raise ValueError(f"contextual_mask {self.contextual_mask!r} is not one of {', '.join(CONTEXTUAL_MASKS)}")
        if self.max_attn_len < 0:
            raise ValueError(f"max_attn_len {self.max_attn_len} is negative (0: no window)")
        if self.target_group_size < 1:
            raise ValueError(f"target_group_size {self.target_group_size} is less than 1")


def visible(
    rows: Tensor,
    columns: Tensor,
    *,
    lengths: Tensor,
    num_contexts: Tensor,
    num_targets: Tensor,
    rules: MaskRules,
) -> Tensor:
    """Whether the token at place ``rows`` of its user sees that at ``columns``; all arguments broadcast, bool result.

    Nothing sees a column at or beyond the user's length. Rows beyond it are meaningless.
    """
    history_end = lengths - num_targets
    is_context = columns < num_contexts
    seen = columns <= rows if rules.causal else columns < lengths
    if rules.max_attn_len > 0:
        gap = torch.minimum(rows, history_end) - columns
        gap = gap if rules.causal else gap.abs()
        # Columns in the target part are no history: the group rule below alone decides about them.
        seen = seen & ((gap <= rules.max_attn_len) | is_context | (columns >= history_end))
    # History rows have negative groups: they are in no target's.
    row_group = torch.div(rows - history_end, rules.target_group_size, rounding_mode="floor")
    column_group = torch.div(columns - history_end, rules.target_group_size, rounding_mode="floor")
    seen = seen & ((columns < history_end) | (row_group == column_group))
    context_sees = is_context if rules.contextual_mask == "prefix" else columns < history_end
    seen = torch.where(rows < num_contexts, context_sees, seen)
    return seen & (columns < lengths)
