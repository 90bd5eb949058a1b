"""Which tiles the attention kernels use: tables, so that no run spends its first minutes on tuning.

Tuning is done on request: ``benchmarks/attention_tiles.py`` times candidates and writes the best to a file, which
``TrainerArgs.attention_tiles``, or :func:`load`, puts in the place of what is built in::

    {"device": "NVIDIA H200", ..., "tables": {"triton": {"64": {"forward": {"rows": 64, "keys": 64, ...}, ...}}}}

By table, then by the width of heads, each entry has the fields of the dataclass that it replaces.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import torch

from genrec.configs.schema import UserError
from genrec.hstu.attention.quantization import BLOCK

T = TypeVar("T")

TANHS = ("approx", "approx_pair", "exact")
LEAST_FP8_SUM = 32  # over which an FP8 instruction of tensor cores sums
_TABLES: dict[str, dict[int, Any]] = {}
_CHECKS: dict[str, Callable[[Any, int], None]] = {}
_logger = logging.getLogger(__name__)


def tunable(name: str, table: dict[int, T], *, check: Callable[[T, int], None] | None = None) -> dict[int, T]:
    """Let files replace entries of ``table``, which has a dataclass for each width of heads; returns it.

    check: of an entry and its width; raises ValueError for what this table can't have.
    """
    _TABLES[name] = table
    if check is not None:
        _CHECKS[name] = check
    return table


def check_number(name: str, value: int, least: int, most: int, *, power_of_two: bool = False) -> None:
    """Raise ValueError unless a tile's number is within its limits."""
    if not least <= value <= most or (power_of_two and value & (value - 1)):
        allowed = f"{'a power of two ' if power_of_two else ''}from {least} to {most}" if least < most else f"{least}"
        raise ValueError(f"{name} = {value!r} must be {allowed}")


@dataclass(frozen=True)
class KernelTile:
    """Rows against keys that a program takes at a time, its warps, and how many tiles are in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        check_number("rows", self.rows, 16, 256, power_of_two=True)
        check_number("keys", self.keys, 16, 256, power_of_two=True)
        check_number("num_warps", self.num_warps, 1, 16, power_of_two=True)
        check_number("num_stages", self.num_stages, 1, 8)


@dataclass(frozen=True)
class Tiles:
    """Tiles of the three kernels, and what they have in common.

    tanh: "approx" (one instruction a score), "approx_pair" (one for two scores, at half precision) or "exact". tma:
    whether tiles without a mask are loaded by TMA, which takes registers and instructions off the warps. fused: one
    backward kernel, which takes five products a tile and not seven, but adds dQ up in memory: no two runs are the same.
    """

    forward: KernelTile
    key_grad: KernelTile
    query_grad: KernelTile
    tanh: str = "approx"
    tma: bool = False
    fused: bool = False

    def __post_init__(self) -> None:
        if self.tanh not in TANHS:
            raise ValueError(f"tanh = {self.tanh!r} is not one of {', '.join(TANHS)}")


# By the larger of d_qk and d_v, rounded up. Of 64, 128 and 256: the best of a sweep over simpler kernels on an H200,
# with Triton 3.6 at L = 4096. Of 32: not measured.
HALF_PRECISION_TILES = {
    32: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(64, 128, num_warps=4, num_stages=3),
    ),
    64: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(64, 128, num_warps=4, num_stages=3),
    ),
    128: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(128, 64, num_warps=8, num_stages=3),
    ),
    256: Tiles(
        forward=KernelTile(128, 64, num_warps=8, num_stages=2),
        key_grad=KernelTile(64, 64, num_warps=8, num_stages=2),
        query_grad=KernelTile(64, 64, num_warps=4, num_stages=2),
    ),
}
tunable("triton", HALF_PRECISION_TILES)

# Of users with few tokens: 512 of 40 to 700, the best of some on the same GPU.
SHORT_TILES = {
    32: HALF_PRECISION_TILES[32],
    64: Tiles(
        forward=KernelTile(64, 32, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(64, 32, num_warps=4, num_stages=3),
    ),
    128: Tiles(
        forward=KernelTile(64, 32, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=3),
        query_grad=KernelTile(64, 32, num_warps=4, num_stages=3),
    ),
    256: Tiles(
        forward=KernelTile(128, 64, num_warps=8, num_stages=2),
        key_grad=KernelTile(32, 32, num_warps=4, num_stages=2),
        query_grad=KernelTile(32, 64, num_warps=4, num_stages=2),
    ),
}
tunable("triton_short", SHORT_TILES)

# FP8: the largest tiles that keep their numbers in registers. What products sum over must divide blocks of 128. Not
# measured.
FP8_TILES = {
    32: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=2),
        query_grad=KernelTile(64, 64, num_warps=4, num_stages=2),
    ),
    64: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=2),
        query_grad=KernelTile(128, 64, num_warps=8, num_stages=2),
    ),
    128: Tiles(
        forward=KernelTile(64, 64, num_warps=4, num_stages=3),
        key_grad=KernelTile(32, 64, num_warps=4, num_stages=2),
        query_grad=KernelTile(128, 64, num_warps=8, num_stages=2),
    ),
    256: Tiles(
        forward=KernelTile(64, 64, num_warps=8, num_stages=2),
        key_grad=KernelTile(32, 64, num_warps=8, num_stages=2),
        query_grad=KernelTile(64, 64, num_warps=8, num_stages=2),
    ),
}


def check_fp8(tiles: Tiles) -> None:
    """Raise ValueError where tiles of what a product sums over don't fill blocks, or FP8 products can't take them."""
    sums = {"forward keys": tiles.forward.keys, "key_grad rows": tiles.key_grad.rows}
    for name, size in {**sums, "query_grad keys": tiles.query_grad.keys}.items():
        if BLOCK % size or size < LEAST_FP8_SUM:
            raise ValueError(f"FP8 takes {name} from {LEAST_FP8_SUM} on that divide {BLOCK}, not {size}")


def _check_fp8_entry(tiles: Tiles, width: int) -> None:
    check_fp8(tiles)
    if tiles.fused:
        raise ValueError("fused = True doesn't go with FP8")


tunable("triton_fp8", FP8_TILES, check=_check_fp8_entry)

# For tests: exact in every step, so without tensor cores, where larger tiles compile for minutes.
_SMALL = KernelTile(16, 16, num_warps=4, num_stages=1)
FLOAT32_TILES = Tiles(forward=_SMALL, key_grad=_SMALL, query_grad=_SMALL, tanh="exact")
FLOAT32_FP8_TILES = replace(
    FLOAT32_TILES,
    forward=KernelTile(64, 64, num_warps=4, num_stages=2),
    key_grad=KernelTile(32, 16, num_warps=4, num_stages=1),
    query_grad=KernelTile(16, 32, num_warps=4, num_stages=1),
)
# Two gathers, an int64 difference and a float64 logarithm a score leave registers for small tiles alone. Not measured.
BIAS_TILES = Tiles(
    forward=KernelTile(64, 32, num_warps=4, num_stages=2),
    key_grad=KernelTile(32, 64, num_warps=4, num_stages=2),
    query_grad=KernelTile(64, 32, num_warps=4, num_stages=2),
)


def tiles_for(
    qk_dim: int, v_dim: int, dtype: torch.dtype, *, has_bias: bool, is_fp8: bool = False, is_short: bool = False
) -> Tiles:
    """The tiles for heads of these widths, of q, k and v in ``dtype``; is_short: of ``Request.has_short_users``."""
    if dtype == torch.float32:
        return FLOAT32_FP8_TILES if is_fp8 else FLOAT32_TILES
    if has_bias:
        return BIAS_TILES
    table = FP8_TILES if is_fp8 else SHORT_TILES if is_short else HALF_PRECISION_TILES
    return table[min(width for width in table if width >= max(qk_dim, v_dim))]


def load(path: Path) -> None:
    """Use the tiles of a file that benchmarks/attention_tiles.py wrote, made on this model of GPU.

    What the file doesn't have stays as it was. Raises UserError, and then changes nothing.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the attention tiles {str(path)!r} can't be read: {error}") from error
    try:
        entries = _read(report)
    except ValueError as error:
        raise UserError(f"the attention tiles {str(path)!r} don't fit: {error}") from error
    for name, width, tiles in entries:
        _TABLES[name][width] = tiles
    _logger.info("attention tiles of %s: %s", path, ", ".join(f"{name} {width}" for name, width, _ in entries))


def _read(report: Any) -> list[tuple[str, int, Any]]:
    """(table, width, entry) of all there are; ValueError for what can't be."""
    if not isinstance(report, dict) or not isinstance(report.get("tables"), dict):
        raise ValueError("there are no 'tables' in it, as benchmarks/attention_tiles.py writes them")
    if torch.cuda.is_available() and report.get("device") != torch.cuda.get_device_name():
        raise ValueError(f"they were made on {report.get('device')!r}, and this is {torch.cuda.get_device_name()!r}")
    entries = []
    for name, table in report["tables"].items():
        if name not in _TABLES:
            raise ValueError(f"table {name!r} is not one of {', '.join(_TABLES)}")
        known = _TABLES[name]
        if not isinstance(table, dict):
            raise ValueError(f"table {name!r} must have tiles by the width of heads, and is {table!r}")
        for width, values in table.items():
            if not width.isdecimal() or int(width) not in known:
                raise ValueError(f"{name} {width!r} is not one of the widths {', '.join(map(str, known))}")
            try:
                tiles = _build(type(known[int(width)]), values)
                _CHECKS.get(name, lambda *_: None)(tiles, int(width))
            except ValueError as error:
                raise ValueError(f"{name} {width}: {error}") from error
            entries.append((name, int(width), tiles))
    if not entries:
        raise ValueError("there are no tiles in its 'tables'")
    return entries


def _build(cls: type[Any], values: Any) -> Any:
    """The dataclass ``cls`` of a dict that has all of its fields and no others."""
    names = [field.name for field in fields(cls)]
    if not isinstance(values, dict) or set(values) != set(names):
        raise ValueError(f"{values!r} must have {', '.join(names)}")
    hints = get_type_hints(cls)
    built = {}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            built[name] = _build(hints[name], value)
        elif type(value) is not hints[name]:
            raise ValueError(f"{name} = {value!r} must be of type {hints[name].__name__}")
        else:
            built[name] = value
    return cls(**built)
