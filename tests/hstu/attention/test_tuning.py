"""Saved tables of tiles: what they replace, and how one that doesn't fit is refused."""

import copy
import dataclasses
import importlib
import json
from pathlib import Path

import pytest
import torch

from genrec.configs.schema import UserError
from genrec.hstu.attention import tuning
from genrec.hstu.attention.mask import MaskRules
from genrec.hstu.attention.request import Request
from genrec.hstu.attention.tuning import HALF_PRECISION_TILES, KernelTile, tiles_for

TILES = dataclasses.replace(HALF_PRECISION_TILES[64], forward=KernelTile(128, 32, 8, 2), tanh="exact", tma=True)


@pytest.fixture(autouse=True)
def tables(monkeypatch):
    """Tables that the test may change, without a GPU whose name would have to fit."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    kept = [(table, dict(table)) for table in tuning._TABLES.values()]
    yield
    for table, entries in kept:
        table.clear()
        table.update(entries)


def save(path, tables, **header):
    path.write_text(json.dumps({"device": "NVIDIA H200", **header, "tables": tables}))
    return path


def test_a_saved_entry_takes_the_place_of_the_built_in_one(tmp_path):
    before = copy.copy(HALF_PRECISION_TILES)
    tuning.load(save(tmp_path / "tiles.json", {"triton": {"64": dataclasses.asdict(TILES)}}))
    assert tiles_for(64, 64, torch.bfloat16, has_bias=False) == TILES
    assert tiles_for(48, 40, torch.float16, has_bias=False) == TILES
    assert {128: before[128], 256: before[256], 32: before[32], 64: TILES} == HALF_PRECISION_TILES


def test_short_users_have_tiles_of_their_own(tmp_path):
    q = torch.zeros(1024, 1, 64)
    short, long = (
        Request(torch.zeros(users + 1), None, None, 1, 1.0, MaskRules(), None).has_short_users(q) for users in (3, 2)
    )
    assert (short, long) == (True, False)
    tuning.load(save(tmp_path / "tiles.json", {"triton_short": {"64": dataclasses.asdict(TILES)}}))
    assert tiles_for(64, 64, torch.bfloat16, has_bias=False, is_short=True) == TILES
    assert tiles_for(64, 64, torch.bfloat16, has_bias=False) == HALF_PRECISION_TILES[64] != TILES


def test_any_table_can_be_tuned(tmp_path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Options:
        stages: int

    monkeypatch.setattr(tuning, "_TABLES", {})
    table = tuning.tunable("other kernels", {64: Options(2), 128: Options(3)})
    tuning.load(save(tmp_path / "tiles.json", {"other kernels": {"128": {"stages": 5}}}))
    assert table == {64: Options(2), 128: Options(5)}


def tile(rows=64, keys=64, num_warps=4, num_stages=1):
    return {"rows": rows, "keys": keys, "num_warps": num_warps, "num_stages": num_stages}


def changed(**changes):
    return {"triton": {"64": {**dataclasses.asdict(TILES), **changes}}}


def of_hopper(name, part=None, **changes):
    """A table with the built-in entry of 128 dims, changed."""
    entry = dataclasses.asdict(tuning._TABLES[name][128])
    (entry if part is None else entry[part]).update(changes)
    return {name: {"128": entry}}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (None, "there are no 'tables' in it"),
        ({}, "there are no tiles in its 'tables'"),
        ({"triton": [1, 2]}, "table 'triton' must have tiles by the width of heads, and is [1, 2]"),
        (
            {"triton_fp8": {"32": {**dataclasses.asdict(TILES), "forward": tile(keys=256)}}},
            "triton_fp8 32: FP8 takes forward keys from 32 on that divide 128, not 256",
        ),
        (
            {"triton_fp8": {"32": {**dataclasses.asdict(TILES), "key_grad": tile(rows=16)}}},
            "triton_fp8 32: FP8 takes key_grad rows from 32 on that divide 128, not 16",
        ),
        ({"mine": {}}, "table 'mine' is not one of triton"),
        ({"triton": {"48": {}}}, "triton '48' is not one of the widths 32, 64, 128, 256"),
        ({"triton": {"wide": {}}}, "triton 'wide' is not one of the widths"),
        ({"triton": {"64": {}}}, "triton 64: {} must have forward, key_grad, query_grad, tanh, tma, fused"),
        (changed(stages=1), "must have forward, key_grad"),
        (changed(forward=3), "triton 64: 3 must have rows, keys, num_warps, num_stages"),
        (changed(tma=1), "triton 64: tma = 1 must be of type bool"),
        (changed(tanh="fast"), "triton 64: tanh = 'fast' is not one of approx, approx_pair, exact"),
        (changed(forward=tile(rows=64.0)), "rows = 64.0 must be of type int"),
        (changed(forward=tile(rows=48)), "rows = 48 must be a power of two"),
        (changed(forward=tile(keys=8)), "keys = 8 must be a power of two fr"),
        (changed(forward=tile(num_warps=3)), "num_warps = 3 must be"),
        (changed(forward=tile(num_stages=9)), "num_stages = 9 must be from 1 to 8"),
        (of_hopper("hopper_forward", groups=3), "hopper_forward 128: groups = 3 must be from 1 to 2"),
        (of_hopper("hopper_forward_fp8", keys=256), "keys = 256 must be a power of two from 16 to 128"),
        (of_hopper("hopper_forward", value_stages=1), "value_stages = 1 must be from 2 to 8"),
        (of_hopper("hopper_backward", "key", stages=1), "hopper_backward 128: stages = 1 must be from 2 to 8"),
        (of_hopper("hopper_backward", "key", num_warps=8, split=True), "num_warps = 8 must be 4"),
        (of_hopper("hopper_backward_fp8", "key", split=True), "split FP8 tiles have at most 32 rows where"),
        ({"triton_fp8": {"32": {**dataclasses.asdict(TILES), "forward": tile(), "fused": True}}}, "fused = True"),
        (of_hopper("hopper_backward_fp8", "query", key_stages=1), "key_stages = 1 must be from 2 to 8"),
        (of_hopper("hopper_backward_fp8", "query", keys=16), "FP8 takes query keys from 32 on, not 16"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path, tables, message):
    before = copy.copy(HALF_PRECISION_TILES)
    path = save(tmp_path / "tiles.json", tables)
    with pytest.raises(UserError) as caught:
        tuning.load(path)
    text = str(caught.value)
    assert text.startswith(f"the attention tiles {str(path)!r} don't fit: ") and message in text and "\n" not in text
    assert before == HALF_PRECISION_TILES


def test_a_good_entry_beside_a_bad_one_is_not_taken(tmp_path):
    before = copy.copy(HALF_PRECISION_TILES)
    with pytest.raises(UserError):
        tuning.load(save(tmp_path / "tiles.json", {"triton": {"64": dataclasses.asdict(TILES), "128": {}}}))
    assert before == HALF_PRECISION_TILES


def test_a_file_that_is_none(tmp_path):
    with pytest.raises(UserError, match="can't be read"):
        tuning.load(tmp_path / "nowhere.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(UserError, match="can't be read"):
        tuning.load(tmp_path / "broken.json")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="can't be read"):
        tuning.load(tmp_path / "deep.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(UserError, match="no 'tables'"):
        tuning.load(tmp_path / "list.json")


def test_tiles_of_another_gpu_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
    path = save(tmp_path / "tiles.json", {"triton": {"64": dataclasses.asdict(TILES)}})
    with pytest.raises(UserError, match="they were made on 'NVIDIA H200', and this is 'NVIDIA H100'"):
        tuning.load(path)


def test_what_the_benchmark_writes_can_be_loaded(tmp_path, monkeypatch):
    """Of each kernel its fastest, all with the same tanh and loads; no width that was timed in part."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[3] / "benchmarks")
    attention_tiles = importlib.import_module("attention_tiles")
    slow, fast = {"rows": 64, "keys": 64, "num_warps": 4, "num_stages": 2}, vars(KernelTile(128, 32, 8, 3))
    results = []
    for kernel, with_tma, without in (("forward", 2.0, 3.0), ("key_grad", 2.0, 1.5), ("query_grad", 2.0, 1.9)):
        for tma, ms in ((True, with_tma), (False, without)):
            shared = {"dim": 64, "tanh": "approx", "tma": tma, "kernel": kernel}
            results += [{**shared, **slow, "ms": ms + 1}, {**shared, **fast, "ms": ms}, {**shared, "error": "too big"}]
    results += [{**results[1], "dim": 128}, {**results[1], "kernel": "fused", "ms": 0.1}]
    tuning.load(save(tmp_path / "tiles.json", {"triton": attention_tiles.best_tiles(results)}))
    best = KernelTile(128, 32, 8, 3)
    wanted = tuning.Tiles(forward=best, key_grad=best, query_grad=best, tanh="approx", tma=True)
    assert HALF_PRECISION_TILES[64] == wanted
    assert HALF_PRECISION_TILES[128].forward != best
