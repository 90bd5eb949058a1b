"""Fused tables without torchrun: one rank that has whole tables, and one that has them in TorchRec's kernels, agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from genrec.model import table_init
from genrec.training import pieces
from genrec.training.checkpoint import newest_checkpoint
from genrec.training.command_line import run_for_user
from genrec.training.metrics_log import read_lines
from genrec.training.step import TrainStep
from genrec.training.stopping import Stopped
from genrec.training.train import main, train

SGD = "OptimizerArgs.embedding_optimizer_str = 'sgd'"
ADAGRAD = "OptimizerArgs.embedding_optimizer_str = 'rowwise_adagrad'"
RUN = (
    "NetworkArgs.hidden_dropout = 0.0",
    "OptimizerArgs.embedding_weight_decay = 0.0",
    "OptimizerArgs.embedding_learning_rate = 0.1",
)
ITEM = "model.embeddings.collections.dim16.embeddings.table_item.weight"


def sharding(item, action="data_parallel"):
    return f"DatasetArgs.sharding_types = {{'item': {item!r}, 'action': {action!r}}}"


def losses(output_dir):
    return [line["loss"] for line in read_lines(output_dir / "metrics.jsonl") if line["event"] == "train"]


def assert_same(one, other, last_tensors):
    torch.testing.assert_close(losses(other), losses(one), rtol=1e-5, atol=0)
    own = [{n: t for n, t in last_tensors(run).items() if n.startswith(("model", "optimizer"))} for run in (one, other)]
    torch.testing.assert_close(own[1], own[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("optimizer", "kind"), [(SGD, "row_wise"), (ADAGRAD, "column_wise")], ids=["sgd", "adagrad"])
def test_fused_tables_train_as_whole_ones(tmp_path, tiny_config, last_tensors, optimizer, kind):
    train(tiny_config(tmp_path / "whole", *RUN, optimizer))
    train(tiny_config(tmp_path / "fused", *RUN, optimizer, sharding(kind, "table_wise")))
    assert not dist.is_initialized()  # the rank's own group goes with the run
    assert_same(tmp_path / "whole", tmp_path / "fused", last_tensors)
    train(tiny_config(tmp_path / "whole", *RUN, optimizer, "TrainerArgs.max_train_iters = 8"))
    longer = (*RUN, optimizer, sharding("table_wise"), "TrainerArgs.max_train_iters = 8")
    train(tiny_config(tmp_path / "fused", *longer))  # continues, with fewer fused tables
    assert_same(tmp_path / "whole", tmp_path / "fused", last_tensors)


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
def test_dynamic_fused_tables_train_as_whole_ones(tmp_path, tiny_config, last_tensors, caplog, optimizer):
    """Rows that change hands start anew in TorchRec's kernels too, and a step that is left out is undone there."""
    bound = (*RUN, optimizer, "DatasetArgs.dynamic_tables = {'item': 14}", "TrainerArgs.max_train_iters = 8")
    train(tiny_config(tmp_path / "whole", *bound))
    assert "table 'item' is full" in caplog.text
    train(tiny_config(tmp_path / "fused", *bound, sharding("row_wise")))
    assert_same(tmp_path / "whole", tmp_path / "fused", last_tensors)
    maps = [{n: t for n, t in last_tensors(tmp_path / run).items() if "row_map" in n} for run in ("whole", "fused")]
    assert len(maps[0]) == 3
    torch.testing.assert_close(maps[1], maps[0], rtol=0, atol=0)


@pytest.fixture
def large_tables(monkeypatch):
    """The tiny dataset's tables of items and actions as large tables: made in blocks, saved in pieces."""
    monkeypatch.setattr(table_init, "BLOCKWISE_NUMBERS", 64)
    monkeypatch.setattr(table_init, "BLOCK_NUMBERS", 3 * 16)
    monkeypatch.setattr(pieces, "PIECE_NUMBERS", 7 * 16)


def test_large_tables_are_made_in_blocks_and_saved_in_pieces(tmp_path, tiny_config, last_tensors, large_tables):
    train(tiny_config(tmp_path / "whole", *RUN, ADAGRAD))
    train(tiny_config(tmp_path / "fused", *RUN, ADAGRAD, sharding("row_wise"), "TrainerArgs.max_train_iters = 3"))
    saved = FileSystemReader(newest_checkpoint(tmp_path / "fused" / "checkpoints")).read_metadata().state_dict_metadata
    assert [tuple(chunk.sizes) for chunk in saved[ITEM].chunks] == [(7, 16), (7, 16), (6, 16)]
    in_background = "TrainerArgs.async_save = True"
    train(tiny_config(tmp_path / "fused", *RUN, ADAGRAD, sharding("row_wise"), in_background))
    assert_same(tmp_path / "whole", tmp_path / "fused", last_tensors)


def test_what_is_not_finite_never_reaches_a_fused_table(tmp_path, tiny_config, monkeypatch):
    attempt, moved = TrainStep.attempt, []

    def spoiled(self, batches, *, step, **options):
        head = self._bare.head.register_forward_hook(lambda m, i, o: o * (float("nan") if step == 2 else 1.0))
        parameters = dict(self._bare.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        result = attempt(self, batches, step=step, **options)
        head.remove()
        moved.append(
            {name for name, parameter in self._bare.named_parameters() if not torch.equal(parameter, before[name])}
        )
        return result

    monkeypatch.setattr(TrainStep, "attempt", spoiled)
    settings = ("TrainerArgs.nonfinite = 'skip'", "TrainerArgs.max_train_iters = 3", sharding("row_wise"))
    train(tiny_config(tmp_path, *RUN, SGD, *settings))
    item = "embeddings.collections.dim16_sharded.embeddings.table_item.weight"
    assert item in moved[0] and moved[1] == set() and item in moved[2]


def test_a_run_that_saves_nothing(tmp_path, tiny_config, capsys):
    results = train(tiny_config(tmp_path, "TrainerArgs.ckpt_save_interval = 0"))
    assert results and not (tmp_path / "checkpoints").exists()
    assert "checkpoints: none, with TrainerArgs.ckpt_save_interval = 0" in capsys.readouterr().out

    def stopped():
        raise Stopped(3, saved=False)

    assert run_for_user(stopped, debug=False) == 0
    told = "stopped by SIGTERM after step 3: TrainerArgs.ckpt_save_interval = 0, so nothing is saved"
    assert told in capsys.readouterr().err


def test_check_shows_the_plan_of_several_ranks(tmp_path, tiny_gin, capsys):
    """In one process, and without weights."""
    bindings = [f"TrainerArgs.output_dir = {str(tmp_path)!r}", *RUN, ADAGRAD, sharding("row_wise")]
    words = ["--gin-config-file", str(tiny_gin), *(word for b in bindings for word in ("--gin-bindings", b))]
    for num_ranks in (1, 4):
        assert main("ranking", [*words, "--check", "--ranks", str(num_ranks)]) == 0
        shown = capsys.readouterr().out
        (line,) = [line for line in shown.splitlines() if line.startswith("│ item ")]
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        assert cells[:6] == ["item", "20", "16", "row_wise", "row_wise", "fused"] and len(cells) == 6 + num_ranks
    assert main("ranking", [*words, "--check", "--ranks", "30"]) == 2
    assert "its 20 rows, in equal parts but for the last, leave one of 30 without any" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main("ranking", [*words, "--ranks", "4"])
    assert "--ranks N, N at least 1, goes with --check" in capsys.readouterr().err
