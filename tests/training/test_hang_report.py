from __future__ import annotations

import dataclasses
import json

from genrec.training.hang_report import RankReport, hang_sentence
from genrec.training.progress import Activity, Progress


def reached(*phases, collective="", step=57):
    """The activity of a rank that has gone through ``phases``, a collective between each two, and into another."""
    progress = Progress()
    for number, phase in enumerate(phases):
        progress.enter(phase, step=step)
        if number < len(phases) - 1:
            with progress.collective("all-reduce"):
                pass
    if collective:
        with progress.collective("all-reduce", collective):
            return progress.read()[0]
    return progress.read()[0]


def test_a_rank_that_has_not_entered_what_others_wait_in():
    reports = [
        RankReport(0, reached("reading a batch", collective="counts"), 60.2),
        RankReport(1, reached("reading a batch"), 61.4),
        RankReport(2, reached("reading a batch", collective="counts"), 60.9),
    ]
    assert hang_sentence(reports) == (
        "rank 1 has not entered all-reduce 'counts' of step 57, in which ranks 0 and 2 wait for 60 s; "
        "rank 1 is in 'reading a batch' of step 57 for 61 s"
    )


def test_several_behind_in_two_places():
    reports = [
        RankReport(0, reached("reading a batch", "forward", collective="loss"), 60),
        RankReport(1, reached("reading a batch"), 70),
        RankReport(2, reached("reading a batch"), 71),
        RankReport(3, reached("reading a batch", collective="counts"), 65),
    ]
    assert hang_sentence(reports) == (
        "ranks 1 and 2 have not entered all-reduce 'loss' of step 57, in which rank 0 waits for 60 s; "
        "rank 1 is in 'reading a batch' of step 57 for 70 s; rank 2 is in 'reading a batch' of step 57 for 71 s; "
        "rank 3 waits in all-reduce 'counts' of step 57 for 65 s"
    )


def test_collectives_that_others_make_are_named_by_their_phase():
    """DDP's and TorchRec's: who is in the later phase waits for who is in the earlier one."""
    progress = Progress()
    progress.enter("forward", step=3)
    first = progress.read()[0]
    progress.enter("backward")
    reports = [RankReport(0, first, 60), RankReport(1, progress.read()[0], 59)]
    assert hang_sentence(reports) == (
        "rank 0 is behind; rank 0 is in 'forward' of step 3 for 60 s; rank 1 is in 'backward' of step 3 for 59 s"
    )


def test_a_silent_rank_is_named_wherever_it_was():
    reports = [
        RankReport(0, reached("reading a batch", collective="counts"), 60),
        RankReport(1, reached("reading a batch", collective="counts"), 62, is_silent=True),
    ]
    assert hang_sentence(reports) == (
        "rank 1 has not come through all-reduce 'counts' of step 57, in which rank 0 waits for 60 s; rank 1 gives no "
        "sign of life for 62 s (is its process stopped?), it was last in all-reduce 'counts' of step 57"
    )


def test_no_rank_behind_another_and_one_that_has_ended():
    alone = [RankReport(0, reached("writing the report", step=0), 60), RankReport(1, Activity(), 0.0, has_left=True)]
    assert (
        hang_sentence(alone) == "rank 0 gets on no longer; rank 0 is in 'writing the report' for 60 s; rank 1 has ended"
    )
    equal = [RankReport(rank, reached("backward"), 60) for rank in (0, 1)]
    assert hang_sentence(equal).startswith("ranks 0 and 1 get on no longer; rank 0 is in 'backward'")


def test_a_report_survives_json():
    report = RankReport(1, reached("forward", "backward"), 2.5, is_silent=True)
    assert RankReport.of_json(json.loads(json.dumps(dataclasses.asdict(report)))) == report


def test_what_counts_as_getting_on():
    progress, other = Progress(), Progress()
    seen = []

    def moved():
        seen.append(progress.read()[1])
        return len(seen) == 1 or seen[-1] != seen[-2]

    moved()
    assert not moved()
    progress.enter("forward", step=2)
    assert moved()
    progress.enter("forward")
    assert moved()  # once more
    progress.sign()
    assert moved()
    with progress.collective("all-reduce", "loss"):
        assert moved() and not moved()
        with progress.collective("all-gather"):  # inside: the outer name stays
            assert not moved()
        assert progress.read()[0].collective == "all-reduce 'loss'"
    assert moved()
    sizes = [1]
    with progress.measuring(lambda: sizes[0]):
        assert moved() and not moved()
        sizes[0] = 2
        assert moved()
    with progress.waiting_for(other):
        assert moved() and not moved()
        other.enter("writing", step=1)
        assert moved()
        assert (progress.read()[0].phase, progress.read()[0].step) == ("writing", 1)
    assert progress.read()[0].step == 2
