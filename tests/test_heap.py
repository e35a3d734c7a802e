"""Garbage collection during tests: objects from test collection are exempt, and objects of tests are collected."""

from __future__ import annotations

import gc

MADE = [[0]]


def test_the_collector_looks_at_what_a_test_makes_and_at_nothing_before() -> None:
    mine = [[0]]
    looked_at = {id(o) for o in gc.get_objects()}
    assert gc.isenabled()
    assert id(mine) in looked_at and id(MADE) not in looked_at
