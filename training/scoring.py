"""Scores of a checkpoint: rebuilds the model from the checkpoint alone and writes a row for each target."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from polars.exceptions import PolarsError

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ConfigError, ExperimentConfig, Task, UserError
from genrec.data.format import PROTOCOLS
from genrec.training.checkpoint import read_host, require_writable, resolve_checkpoint
from genrec.training.command_line import add_gin_arguments, run_for_user
from genrec.training.console import setup_logging
from genrec.training.evaluation import Evaluation
from genrec.training.evaluator import Evaluator
from genrec.training.final_report import print_results
from genrec.training.preflight import require_available
from genrec.training.process_group import is_main_process, process_group
from genrec.training.ranks import Ranks
from genrec.training.report import evaluation_line
from genrec.training.score_table import ScoreTable, write_table
from genrec.training.tensor_parallel import with_peers
from genrec.training.watchdog import watching


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate a checkpoint as the command line says; returns the exit code: 0, or 2 for what the user can mend."""
    args = _parser().parse_args(argv)
    setup_logging(is_main=is_main_process())

    def run() -> None:
        checkpoint = resolve_checkpoint(args.checkpoint)
        config = load_checkpoint_config(checkpoint, gin_bindings=args.gin_bindings)
        score(config, checkpoint, split=args.split, protocol=args.protocol, scores_path=args.scores)

    return run_for_user(run, debug=args.debug)


def load_checkpoint_config(checkpoint: Path, *, gin_bindings: Sequence[str]) -> ExperimentConfig:
    """The configuration that a checkpoint was trained with, changed by ``gin_bindings``."""
    task = cast(Task, json.loads((checkpoint / "config.json").read_text())["task"])
    return load_experiment(task, gin_files=[str(checkpoint / "config.gin")], gin_bindings=gin_bindings)


def score(
    config: ExperimentConfig, checkpoint: Path, *, split: str, protocol: str, scores_path: Path | None
) -> Evaluation:
    """Evaluate ``checkpoint`` on ``split`` in ``protocol``, print the metrics and write the scores; on any ranks.

    Columns: user_id and item_id (original ids), timestamp, label (0 or 1), score (probability of 1); further tasks in
    label_task1, score_task1, ...
    """
    require_available(config)
    table = ScoreTable()
    trainer = config.trainer
    with (
        process_group(trainer.device) as ranks,
        watching(ranks, timeout_s=trainer.hang_timeout_s, folder=Path(trainer.output_dir) / "hang"),
    ):
        ranks = with_peers(ranks, config.tensor_parallel.tensor_model_parallel_size)
        if scores_path is not None:
            ranks.together(lambda: _check_target(scores_path) if ranks.is_main else None)
        evaluator = ranks.together(lambda: Evaluator(config, ranks=ranks, splits=(split,)))
        evaluator.place()
        ranks.together(lambda: evaluator.restore_for_evaluation(checkpoint))
        if protocol not in evaluator.data.protocols:
            raise ConfigError(
                f"--protocol {protocol} is not possible with this checkpoint's configuration, "
                f"{' and '.join(evaluator.data.protocols) or 'none'} is"
            )
        evaluation = evaluator.evaluate(split, protocol, table=table)
        if scores_path is not None:
            _write(table, scores_path, evaluator, ranks)
        if ranks.is_main:
            step = read_host(checkpoint, rank=0)["step"]
            outputs = [] if scores_path is None else [scores_path]
            others = "--scores FILE has labels and scores of the others"
            line = evaluation_line(step, evaluation)
            print_results([line], outputs=outputs, checkpoints=checkpoint, others=others)
    return evaluation


def _check_target(path: Path) -> None:
    """Raises UserError before the evaluation, rather than after it, where ``path`` can't be written."""
    if path.is_dir():
        raise UserError(f"--scores {path} cannot be written: it is a folder")
    if path.exists() and not path.is_file():  # a device, which would be replaced
        raise UserError(f"--scores {path} cannot be written: it is not a regular file")
    require_writable(path.parent, what=f"--scores {path}")


def _write(table: ScoreTable, path: Path, evaluator: Evaluator, ranks: Ranks) -> None:
    rows = table.gathered(ranks, item_vocabulary=ranks.together(evaluator.data.item_vocabulary))

    def write() -> None:
        try:
            write_table(rows, path)
        except (OSError, PolarsError) as error:
            reason = str(error).splitlines()[0]  # polars' own have a message alone, also as an OSError
            if isinstance(error, OSError) and error.strerror is not None:
                reason = f"{error.strerror} ({error.filename})"
            raise UserError(f"--scores {path} cannot be written: {reason}") from error

    ranks.together(lambda: write() if ranks.is_main else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Evaluate a checkpoint and write its scores.")
    parser.add_argument(
        "--checkpoint",
        required=True,
        type=Path,
        metavar="DIR",
        help="a checkpoint, or an output folder for its newest one",
    )
    parser.add_argument("--split", choices=("test", "valid"), default="test")
    parser.add_argument("--protocol", choices=PROTOCOLS, default="sequential")
    parser.add_argument("--scores", type=Path, metavar="FILE", help="parquet file to write, a row for each target")
    add_gin_arguments(parser)
    return parser
