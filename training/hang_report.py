"""The sentence that names who hangs, from what each rank was last doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from genrec.training.progress import Activity


@dataclass(frozen=True)
class RankReport:
    """What is known of a rank.

    idle_s: for how long it has not got on. is_silent: it has not even said so (its process is stopped, or its
    interpreter stuck). has_left: it has ended its work.
    """

    rank: int
    activity: Activity
    idle_s: float
    is_silent: bool = False
    has_left: bool = False

    @staticmethod
    def of_json(values: dict[str, Any]) -> RankReport:
        """From what ``dataclasses.asdict`` and JSON have made of one."""
        activity = values["activity"]
        activity = Activity(**{**activity, "place": tuple(activity["place"])})
        return RankReport(**{**values, "activity": activity})


def hang_sentence(reports: Sequence[RankReport]) -> str:
    """Who is behind, in what the others wait, and what each one does. reports: of all ranks, of which none gets on."""
    here = [report for report in reports if not report.has_left]
    behind = [report for report in here if report.is_silent] or _lowest(here)
    others = [report for report in here if report not in behind]
    furthest = max(others, key=lambda report: report.activity.place, default=None)
    if furthest is None:
        parts = [f"{_names(here)} {'gets' if len(here) == 1 else 'get'} on no longer"]
        others = []
    elif furthest.activity.collective:
        waiting = [report for report in others if report.activity.place == furthest.activity.place]
        others = [report for report in others if report not in waiting]
        parts = [f"{_names(behind)} {_lack(behind)} {furthest.activity.collective}{_step(furthest)}, in which"]
        parts[0] += f" {_names(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for {_idle(waiting)}"
    else:
        parts = [f"{_names(behind)} {'is' if len(behind) == 1 else 'are'} behind"]
    parts += [idle_sentence(report) for report in (*behind, *others)]
    parts += [f"rank {report.rank} has ended" for report in reports if report.has_left]
    return "; ".join(parts)


def idle_sentence(report: RankReport) -> str:
    """What one rank does, and for how long."""
    activity, idle = report.activity, f"for {report.idle_s:.0f} s"
    where = f"in {activity.collective or repr(activity.phase)}{_step(report)}"
    if report.is_silent:
        return f"rank {report.rank} gives no sign of life {idle} (is its process stopped?), it was last {where}"
    return f"rank {report.rank} {'waits' if activity.collective else 'is'} {where} {idle}"


def _lowest(reports: Sequence[RankReport]) -> list[RankReport]:
    lowest = min(report.activity.place for report in reports)
    return [report for report in reports if report.activity.place == lowest]


def _lack(reports: Sequence[RankReport]) -> str:
    """What ranks have not done with the collective that others wait in; silent ones may have entered it unheard."""
    have = "has" if len(reports) == 1 else "have"
    return f"{have} not come through" if any(report.is_silent for report in reports) else f"{have} not entered"


def _names(reports: Sequence[RankReport]) -> str:
    ranks = [str(report.rank) for report in reports]
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(ranks[:-1])} and {ranks[-1]}"


def _step(report: RankReport) -> str:
    return f" of step {report.activity.step}" if report.activity.step else ""


def _idle(reports: Sequence[RankReport]) -> str:
    return f"{min(report.idle_s for report in reports):.0f} s"
