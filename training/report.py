"""What a run shows while it trains: a progress bar or log lines, metrics.jsonl and TensorBoard. Rank 0 only."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from genrec.configs.schema import UserError
from genrec.training.console import CONSOLE
from genrec.training.evaluation import Evaluation
from genrec.training.metrics_log import Line, append_lines, keep_lines, read_lines

LOG = logging.getLogger(__name__)


class RunLog:
    """Writes and shows lines; on ranks other than 0 it does nothing.

    What the disk refuses is kept until all ranks ask for it by ``raise_failure``: raised at once, it would stop rank 0
    alone, and the others would wait for it in their next collective.
    """

    def __init__(self, output_dir: Path, *, is_main: bool, total_steps: int, first_step: int) -> None:
        """Lines of steps after ``first_step``, left by a run that was stopped, are dropped."""
        self.is_main = is_main
        self.path = output_dir / "metrics.jsonl"
        self._bar: Progress | None = None
        self._board: SummaryWriter | None = None
        self._failure: UserError | None = None
        if not is_main:
            return
        try:
            keep_lines(self.path, lambda line: line.get("step", first_step + 1) <= first_step)
            self._board = SummaryWriter(str(output_dir / "tensorboard"), purge_step=first_step + 1)
        except OSError as error:
            where = output_dir if error.filename is None else error.filename
            raise UserError(f"the log in {output_dir} cannot be written: {error.strerror} ({where})") from error
        if CONSOLE.is_terminal:
            columns = (MofNCompleteColumn(), BarColumn(bar_width=16), TimeRemainingColumn(compact=True))
            self._bar = Progress(*columns, TextColumn("{task.fields[figures]}"), console=CONSOLE)
            self._task = self._bar.add_task("training", total=total_steps, completed=first_step, figures="")
            self._bar.start()

    def progress(self, step: int, line: Line) -> None:
        """Show where training is; ``line`` has the figures so far."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step, figures=f"loss {line['loss']:.4f}, {_speed(line)}")

    def train(self, line: Line) -> None:
        """Record a "train" line."""
        if self._board is None:
            return
        with self._failing_later():
            append_lines(self.path, [line])
            for name in ("loss", "learning_rate", "tokens_per_s", "users_per_s"):
                self._board.add_scalar(f"train/{name}", line[name], line["step"])
        if self._bar is None:
            LOG.info("step %d: %s", line["step"], _figures(line))

    def evaluations(self, step: int, evaluations: Sequence[Evaluation]) -> None:
        """Record evaluations, all with one write."""
        if self._board is None:
            return
        with self._failing_later():
            append_lines(self.path, [evaluation_line(step, evaluation) for evaluation in evaluations])
            for evaluation in evaluations:
                for name, value in evaluation.metrics.items():
                    self._board.add_scalar(f"{evaluation.split}_{evaluation.protocol}/{name}", value, step)
        for evaluation in evaluations:
            first_task = {name: value for name, value in evaluation.metrics.items() if "_task" not in name}
            figures = ", ".join(f"{name} {value:.4f}" for name, value in first_task.items())
            LOG.info("step %d: %s, %s: %s", step, evaluation.split, evaluation.protocol, figures)

    def other(self, line: Line) -> None:
        """Record a line of another kind, such as a step that was left out."""
        if self.is_main:
            with self._failing_later():
                append_lines(self.path, [line])

    def raise_failure(self) -> None:
        """Raises UserError where something could not be written since this was last asked."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def lines(self) -> list[Line]:
        """Everything recorded so far."""
        return read_lines(self.path)

    def has_evaluation(self, step: int) -> bool:
        """Whether the validation of ``step`` is recorded; on ranks other than 0 it never is."""
        return self.is_main and any(line["event"] == "valid" and line["step"] == step for line in self.lines())

    def final_lines(self, step: int, *, splits: Sequence[str], protocols: Sequence[str]) -> list[Line]:
        """The evaluations of ``step``, if those of all splits in all protocols are there; else none, on disk too."""
        if not self.is_main:
            return []
        wanted = {(split, protocol) for split in splits for protocol in protocols}
        found = {(n["event"], n["protocol"]): n for n in self.lines() if n["step"] == step and n["event"] in splits}
        if found.keys() == wanted:
            return list(found.values())
        keep_lines(self.path, lambda line: not (line["step"] == step and line["event"] in splits))
        return []

    def close(self) -> None:
        """End the progress bar and flush TensorBoard."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self._board is not None:
            self._board.close()
            self._board = None

    @contextlib.contextmanager
    def _failing_later(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self._failure = error
        except OSError as error:
            self._failure = UserError(f"the log in {self.path.parent} cannot be written: {error.strerror or error}")


def evaluation_line(step: int, evaluation: Evaluation) -> Line:
    """The "valid" or "test" line of metrics.jsonl."""
    metrics: dict[str, Any] = dict(evaluation.metrics)
    return {"event": evaluation.split, "step": step, "protocol": evaluation.protocol, "metrics": metrics}


def _figures(line: Line) -> str:
    return f"loss {line['loss']:.4f}, learning rate {line['learning_rate']:.2e}, {_speed(line)}"


def _speed(line: Line) -> str:
    return f"{line['users_per_s']:,.0f} users/s, {line['tokens_per_s']:,.0f} tokens/s"
