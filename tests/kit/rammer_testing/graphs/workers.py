"""A campaign in worker processes: a hang or crash costs only the current graph, which is counted and named."""

from __future__ import annotations

from functools import partial
from typing import Final

from rammer_testing.graphs.campaign import CampaignPlan, CampaignSearch, CampaignTally, Key
from rammer_testing.graphs.record import Record
from rammer_testing.worker_pool import UNFINISHED, Crew, Line, Member, Work

#: Seconds after the end of a campaign for the graphs in progress.
GRACE: Final = 5.0
#: Address space in bytes that a process may use beyond its device's reservation, far above any graph.
MEMORY: Final = 16 << 30


def campaign(plan: CampaignPlan, processes: int = 1, record: Record | None = None, patience: float = 120.0) -> CampaignTally:
    """Run ``plan`` in several processes. A graph without a report for ``patience`` seconds counts as a hang. SIGTERM and
    Control-C end the campaign with partial results. Raises RammerError if the device cannot be opened."""
    total, counts, known = CampaignTally(), [0] * processes, set[Key]()
    record = record or Record(plan)

    def heard(member: Member, part: CampaignTally) -> None:
        counts[member.number] += part.graphs
        for key in {f.key for f in part.faults.values()} - known if not part.graphs else ():  # shrunk
            known.add(key)
            crew.spread(key)
        total.add(part)
        record.note(total, part, counts)

    def lost(member: Member, start: int, kind: str, why: str, answered: bool) -> None:
        """Count a lost graph, unless it was only being shrunk."""
        if not answered and kind == UNFINISHED:
            total.unfinished.append(start)
        elif not answered:
            which = f"graph {start}" if plan.batch == 1 else f"a graph of {start} to {start + plan.batch - 1}"
            total.lost.append(f"{kind} | {which} | {why}")

    starts = plan.starts()
    crew = Crew(
        partial(begin, plan),
        starts,
        min(processes, len(starts)),
        plan.end,
        heard,
        lost,
        grace=GRACE,
        patience=patience,
        memory=MEMORY,
        pinned=True,
    )
    try:
        crew.run()
    finally:
        record.close(total, counts)
    return total


def begin(plan: CampaignPlan, member: Member) -> Work:
    """Return the function that judges batches in one process."""
    search, known = CampaignSearch(plan), set[Key]()

    def work(start: int, line: Line) -> None:
        known.update(line.news())
        for part in search.batch(start, known):
            line.tell(part, plan.shrink if part.faults else 0.0)

    return work
