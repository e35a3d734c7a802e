"""Horizontal fusion of launches: small ones with equal waits, if no launch waits longer."""

from __future__ import annotations

from random import Random

from rammer_cuda.horizontal_fusion import LaunchPiece, pack_launches

US = 1e-6


def test_unrelated_small_launches_are_one() -> None:
    assert pack_launches([LaunchPiece((), US, 0.1)] * 4, US) == [(0, 1, 2, 3)]


def test_what_fills_the_device_stands_alone() -> None:
    assert pack_launches([LaunchPiece((), US, 0.7), LaunchPiece((), US, 0.7), LaunchPiece((), US, 0.2)], US) == [(0, 2), (1,)]


def test_a_kernel_that_cannot_stand_beside_others_does_not() -> None:
    assert pack_launches([LaunchPiece((), US, 0.1), LaunchPiece((), US, 0.0), LaunchPiece((), US, 0.1)], US) == [(0, 2), (1,)]


def test_nobody_waits_for_a_longer_one_than_its_own() -> None:
    short, long = LaunchPiece((), US, 0.1), LaunchPiece((), 9 * US, 0.1)
    behind = [LaunchPiece((0,), US, 0.0), LaunchPiece((1,), US, 0.0)]
    assert pack_launches([short, long, *behind], US)[:2] == [(0,), (1,)]
    assert pack_launches([short, long, LaunchPiece((0, 1), US, 0.0)], US) == [(0, 1), (2,)], (
        "who reads both waits for both anyway"
    )


def test_random_graphs_stay_in_order(seed: int) -> None:
    """Check that every launch is in one kernel, after its predecessors and together with launches of equal waits."""
    random, joined = Random(seed), 0
    for _ in range(200):
        count = random.randrange(1, 30)
        pieces = [
            LaunchPiece(
                tuple(sorted(random.sample(range(i), min(i, random.choice((0, 0, 1, 1, 2)))))),
                random.random() * US,
                random.random() * 0.6,
            )
            for i in range(count)
        ]
        found = pack_launches(pieces, 0.5 * US)
        assert sorted(i for p in found for i in p) == list(range(count))
        place = {i: number for number, p in enumerate(found) for i in p}
        for p in found:
            assert len({pieces[i].after for i in p}) == 1
            assert sum(pieces[i].share for i in p) <= 1.0 or len(p) == 1
            joined += len(p) > 1
            assert all(place[before] < place[i] for i in p for before in pieces[i].after)
    assert joined > 50
