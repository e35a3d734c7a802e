"""A campaign in the process of its test."""

from __future__ import annotations

import time
from itertools import takewhile

from rammer_testing.graphs.campaign import CampaignPlan, CampaignSearch, CampaignTally, Key


def campaign(plan: CampaignPlan) -> CampaignTally:
    """Return the tally of the part of ``plan`` that its time allows."""
    total, search, known = CampaignTally(), CampaignSearch(plan), set[Key]()
    try:
        for start in takewhile(lambda _: time.monotonic() < plan.end, plan.starts()):
            for part in search.batch(start, known):
                total.add(part)
    finally:
        search.judge.outside.close()
    return total
