"""HSTU attention behind one function, :func:`hstu_attention`; the backends sit beside it."""

from __future__ import annotations

from genrec.hstu.attention.bias import RelativeBias as RelativeBias
from genrec.hstu.attention.interface import hstu_attention as hstu_attention
