"""From the command line to a trained model: ``main`` for the example scripts, ``train`` for a configuration."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from genrec.configs.loading import load_experiment
from genrec.configs.schema import ExperimentConfig, Task
from genrec.training.command_line import add_gin_arguments, run_for_user, script_directory
from genrec.training.console import setup_logging, show_table
from genrec.training.evaluation import Evaluation
from genrec.training.final_report import balance_sentence, print_results, write_report
from genrec.training.loop import Loop, total_steps
from genrec.training.metrics_log import Line
from genrec.training.overlap import make_feed
from genrec.training.precision_report import model_rows, precision_table
from genrec.training.preflight import check, check_writable, require_available
from genrec.training.process_group import is_main_process, process_group
from genrec.training.ranks import Ranks, check_same_config, check_same_data
from genrec.training.report import RunLog
from genrec.training.run import Run
from genrec.training.run_folders import sole_writer, write_config
from genrec.training.stopping import Stopped, listening
from genrec.training.table_placement import placement_table
from genrec.training.tensor_parallel import with_peers
from genrec.training.watchdog import watching

LOG = logging.getLogger(__name__)
FINAL_SPLITS = ("valid", "test")
BALANCE_BATCHES = 50  # global batches that the report on balance looks at


def main(task: Task, argv: Sequence[str] | None = None) -> int:
    """Train as the command line says; returns the exit code: 0 for an end or a stop that was asked for (SIGTERM), 2 for
    what the user can mend, 3 for a loss gone NaN. Where a rank hangs, all of them end with 4 (watchdog.py).
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.ranks is not None and (args.ranks < 1 or not args.check):
        parser.error("--ranks N, N at least 1, goes with --check; torchrun starts ranks")
    setup_logging(is_main=is_main_process())

    def run() -> None:
        config = load_experiment(
            task, gin_files=args.gin_config_file, gin_bindings=args.gin_bindings, search_dirs=(script_directory(),)
        )
        if not args.check:
            train(config)
        elif is_main_process():
            check(config, num_ranks=args.ranks or int(os.environ.get("WORLD_SIZE", "1")))

    return run_for_user(run, debug=args.debug)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train an HSTU recommender from gin files.")
    parser.add_argument(
        "--gin-config-file",
        action="append",
        required=True,
        metavar="FILE",
        help="a path, or the name of a shipped preset",
    )
    parser.add_argument("--check", action="store_true", help="check the configuration, show what would run, and stop")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="with --check: plan tables for N ranks like this one (WORLD_SIZE, or 1)"
    )
    add_gin_arguments(parser)
    return parser


def train(config: ExperimentConfig) -> list[Line]:
    """Train, evaluate and report one run; returns the final evaluations as lines of metrics.jsonl.

    A run that was stopped continues from its newest checkpoint (TrainerArgs.resume), a finished one shows its results.
    Raises Stopped where it was asked to stop (SIGTERM), with all that is done saved.
    """
    require_available(config)
    trainer = config.trainer
    with (
        listening(),
        process_group(trainer.device) as ranks,
        watching(ranks, timeout_s=trainer.hang_timeout_s, folder=Path(trainer.output_dir) / "hang"),
    ):
        check_same_config(ranks, config.digest)
        ranks.together(lambda: check_writable(trainer) if ranks.is_main else None)
        ranks = with_peers(ranks, config.tensor_parallel.tensor_model_parallel_size)
        use_deterministic_algorithms(trainer.deterministic)
        return _train_to_the_end(_build(config, ranks))


def _build(config: ExperimentConfig, ranks: Ranks) -> Run:
    """The run, placed, with what it is made of shown."""
    ranks.progress.enter("reading the data and building the model")
    run = ranks.together(lambda: Run(config, ranks=ranks))
    check_same_data(ranks, run.data.identity)
    ranks.progress.enter("placing the model")
    run.place()
    if not config.network.history_is_causal:
        LOG.info("evaluates the frozen protocol alone: the history sees ahead, so sequential scores would leak")
    if ranks.is_main:
        show_table("what runs in which precision:", precision_table(model_rows(run.model, config)))
        show_table("embedding tables, with the moments of their optimizer:", placement_table(run.placements))
    return run


def _train_to_the_end(run: Run) -> list[Line]:
    trainer, ranks = run.config.trainer, run.ranks
    ranks.progress.enter("looking for a checkpoint and reading it")
    with contextlib.ExitStack() as held:
        folders = sole_writer(trainer, checkpoints=run.checkpoints.store.directory)
        ranks.together(lambda: held.enter_context(folders) if ranks.is_main else None)
        first_step = run.checkpoints.start()
        ranks.together(lambda: write_config(run.texts, trainer) if ranks.is_main else None)
        steps = total_steps(trainer, run.loader)
        log = ranks.together(
            lambda: RunLog(run.output_dir, is_main=ranks.is_main, total_steps=steps, first_step=first_step)
        )
        try:
            run.checkpoints.resume_best(log.lines() if ranks.is_main else [])
            if first_step < steps:
                _train_steps(run, log, first_step=first_step, steps=steps)
            else:
                LOG.info("this run is finished: step %d of %d is done", first_step, steps)
            return _finish(run, log, step=max(first_step, steps))
        finally:
            run.checkpoints.store.close()
            log.close()


def use_deterministic_algorithms(wanted: bool) -> None:
    """Let PyTorch take deterministic algorithms alone, or any."""
    if wanted:
        # cuBLAS asks for it in the environment, before it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)


def _train_steps(run: Run, log: RunLog, *, first_step: int, steps: int) -> None:
    trainer, ranks = run.config.trainer, run.ranks
    feed = make_feed(trainer, run.model.embeddings, loader=run.loader, ranks=ranks)
    if ranks.is_main and ranks.data_size > 1:
        say_balance(run, log, step=first_step)
    train_step = run.train_step(total_steps=steps, lookahead=feed)
    Loop(run, train_step=train_step, feed=feed, log=log, first_step=first_step).train()


def say_balance(run: Run, log: RunLog, *, step: int) -> None:
    """Record how even the ranks' shares of the global batches are, and would be (data/balance.py)."""
    imbalance = run.loader.imbalance(num_batches=BALANCE_BATCHES)
    if imbalance is None:
        return
    enabled = run.config.trainer.enable_balanced_shuffler
    line = {"event": "balance", "step": step + 1, "enabled": enabled, **dataclasses.asdict(imbalance)}
    log.other(line)
    LOG.info(balance_sentence(line))


def _finish(run: Run, log: RunLog, *, step: int) -> list[Line]:
    """The final evaluation, unless an earlier start of this run has done it, and the report."""
    if not _final_lines(run, log, step):
        evaluations = _final_evaluations(run)
        log.evaluations(step, evaluations)
        run.ranks.together(log.raise_failure)
        if run.checkpoints.is_best(step, evaluations):
            run.checkpoints.store.mark_best(step)
    run.checkpoints.store.finish()
    log.close()
    results = _final_lines(run, log, step)
    if run.ranks.is_main:
        run.ranks.progress.enter("writing the report")
        _report(run, log, results, step=step)
    return results


def _final_lines(run: Run, log: RunLog, step: int) -> list[Line]:
    """The final evaluations as rank 0 has them on record; none where not all are."""
    protocols = run.data.protocols
    lines = run.ranks.together(lambda: log.final_lines(step, splits=FINAL_SPLITS, protocols=protocols))
    return run.ranks.gather(lines)[0]


def _final_evaluations(run: Run) -> list[Evaluation]:
    """Of the last step, which meanwhile may be being saved; where this is stopped, it is to be whole all the same."""
    try:
        return run.evaluate_splits(FINAL_SPLITS)
    except Stopped:
        run.checkpoints.store.finish()
        raise


def _report(run: Run, log: RunLog, results: Sequence[Line], *, step: int) -> None:
    num_skipped = sum(line["event"] == "skipped" for line in log.lines())
    if num_skipped:
        LOG.warning("%d of %d steps were left out: a loss or a gradient was not finite", num_skipped, step)
    reports: list[Path] = []
    try:
        reports = write_report(
            log.lines(),
            results,
            output_dir=run.output_dir,
            config_text=run.config.text,
            precision=model_rows(run.model, run.config),
        )
    finally:  # where the disk refuses the report, too
        outputs = [log.path, *reports, run.output_dir / "tensorboard"]
        checkpoints = run.checkpoints.store.directory if run.checkpoints.is_on else None
        print_results(results, outputs=outputs, checkpoints=checkpoints)
