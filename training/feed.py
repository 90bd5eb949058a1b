"""Where steps get their batches from, and what ranks know of each other's before they train on them.

A ``Feed`` reads the batches of a step when the step begins. The one that reads ahead is in overlap.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from genrec.data.batch import Batch
from genrec.training.ranks import Attempt, Ranks
from genrec.training.stopping import stop_asked

Read = Callable[[], Sequence[Batch]]


@dataclass(frozen=True)
class StepCounts:
    """What a step's micro-batches hold, over all ranks.

    num_failed: ranks that could not read theirs. num_stop: ranks that had been asked to stop when they did.
    """

    num_targets: int
    num_tokens: int
    num_users: int
    num_failed: int
    num_stop: int


@dataclass(frozen=True)
class StepInput:
    """The micro-batches of a step on this rank, or why it has none."""

    batches: Attempt[Sequence[Batch]]
    counts: StepCounts

    @staticmethod
    def of(batches: Attempt[Sequence[Batch]], *, ranks: Ranks) -> StepInput:
        """Asks the other ranks for their counts."""
        with ranks.progress.collective("all-reduce", "counts"):
            return StepInput(batches, StepCounts(*ranks.sum_counts(own_counts(batches, ranks=ranks))))


def own_counts(batches: Attempt[Sequence[Batch]], *, ranks: Ranks) -> list[int]:
    """The numbers of StepCounts on this rank; of peers, which read the same, the first counts what they read."""
    counted = (batches.value or ()) if ranks.is_first_peer else ()
    own = [(b.labels.shape[0], b.num_tokens, b.batch_size) for b in counted]
    counts = [sum(column) for column in zip((0, 0, 0), *own, strict=True)]
    return [*counts, int(batches.error is not None), int(stop_asked())]


class Lookahead:
    """What a step tells its feed. A feed that reads ahead works for later steps then; this one has nothing to do."""

    def backward_is_queued(self) -> None:
        """The step's last backward has been handed to the device, which computes while the host goes on."""

    def leave_out(self) -> None:
        """The step ends without a forward. Ranks call alike."""

    def let_go(self) -> None:
        """The model is to be called with other batches, or the same ones again; no step follows."""


class Feed(Lookahead):
    """Reads a step's batches when the step begins.

    For each run of steps without evaluation or checkpoint between them: ``begin``, and for each step ``next`` and, when
    it has been trained on, ``done``. ``stop_asked``: whether a rank has been asked to stop. Ranks call alike.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.stop_asked = False
        self.num_left = 0

    def begin(self, read: Read, num_steps: int) -> None:
        """Feed ``num_steps`` steps. ``read`` returns the micro-batches of one, and may raise."""
        assert self.num_left == 0, f"{self.num_left} steps are left"
        self.num_left = num_steps
        self._read = read

    def next(self) -> StepInput:
        """The input of the next step; an error in reading it is in there."""
        step_input = StepInput.of(Attempt.of(self._read), ranks=self.ranks)
        self.stop_asked = step_input.counts.num_stop > 0
        return step_input

    def done(self) -> None:
        """The step has been trained on, or left out."""
        self.num_left -= 1

    def give_back(self) -> None:
        """Forget what has been read for steps that will not come: the loader's cursor is that of the steps done."""
        self.num_left = 0
