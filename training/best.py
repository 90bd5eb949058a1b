"""The best checkpoint by a validation metric (TrainerArgs.best_metric): kept beside the newest ones.

Which it is follows from metrics.jsonl, where evaluations are recorded before a checkpoint is written: nothing of it is
kept anywhere else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from genrec.configs.schema import LOWER_IS_BETTER
from genrec.training.evaluation import Evaluation
from genrec.training.metrics_log import Line


class BestCheckpoint:
    """The step with the best value of ``metric``, a metric's name or "protocol/name", among those seen."""

    def __init__(self, metric: str, *, protocols: Sequence[str]) -> None:
        protocol, _, name = metric.rpartition("/")
        self.metric = metric
        self.protocol = protocol or protocols[0]
        self.key = name.lower()
        self.sign = -1.0 if name in LOWER_IS_BETTER else 1.0
        self.step: int | None = None
        self.value = math.nan

    def resume(self, lines: Iterable[Line], *, steps: Collection[int]) -> None:
        """Take in the lines of metrics.jsonl whose steps have a checkpoint."""
        for line in lines:
            if line["event"] == "valid" and line["protocol"] == self.protocol and line["step"] in steps:
                self._take(line["step"], line["metrics"].get(self.key))

    def take(self, step: int, evaluations: Sequence[Evaluation]) -> bool:
        """Whether ``step`` is the best so far, by its evaluation of the validation split. An undefined value is not."""
        own = (e.metrics.get(self.key) for e in evaluations if (e.split, e.protocol) == ("valid", self.protocol))
        return self._take(step, next(own, None))

    def _take(self, step: int, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        if self.step is not None and self.sign * value <= self.sign * self.value:
            return False
        self.step, self.value = step, value
        return True
