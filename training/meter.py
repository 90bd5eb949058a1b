"""The loss and the speed of training, step by step, for a line of the log."""

from __future__ import annotations

import math
import time

from genrec.training.metrics_log import Line
from genrec.training.step import StepResult


class Meter:
    """Losses and counts since the last line of the log. ``values`` is what a checkpoint keeps of it."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Start a new line."""
        self.values: dict[str, float] = {"loss_sum": 0.0, "num_targets": 0, "num_skipped": 0}
        self._seconds, self._tokens, self._users = 0.0, 0, 0
        self.resume()

    def pause(self) -> None:
        """Stop the clock, so that evaluating and saving don't count as training time."""
        self._seconds += time.perf_counter() - self._started

    def resume(self) -> None:
        """Let the clock run (on)."""
        self._started = time.perf_counter()

    def add(self, result: StepResult) -> None:
        """Take in a step; one left out because it was not finite has no loss to average."""
        if result.finite:
            self.values["loss_sum"] += result.loss_sum
            self.values["num_targets"] += result.num_targets
        else:
            self.values["num_skipped"] = self.values.get("num_skipped", 0) + 1
        self._tokens += result.num_tokens
        self._users += result.num_users

    def line(self, step: int, learning_rate: float) -> Line:
        """The "train" line of metrics.jsonl; the loss is the mean over targets.

        It is 0 where there were none, and NaN where all that there were are of steps left out.
        """
        num_targets = self.values["num_targets"]
        loss = self.values["loss_sum"] / max(num_targets, 1)
        seconds = max(self._seconds + time.perf_counter() - self._started, 1e-9)
        return {
            "event": "train",
            "step": step,
            "loss": math.nan if num_targets == 0 and self.values.get("num_skipped") else loss,
            "learning_rate": learning_rate,
            "tokens_per_s": self._tokens / seconds,
            "users_per_s": self._users / seconds,
        }
