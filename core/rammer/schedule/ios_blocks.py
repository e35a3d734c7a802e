"""Where a graph is cut before IOS searches it: for nothing where all that follows waits for all before, else where that keeps the
fewest operators apart that could run side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import or_

from rammer.schedule.task_placement import levels_of


def split_blocks(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[range]:
    """Cut wherever all that follows waits for all that comes before: unpruned, no stage gains by reaching across.

    That is so where each operator behind the cut that reads none behind it reads every one before the cut that nothing
    before it reads; a concatenation that is a view, and so no operator, does not hide a cut. ``names`` are in topological order.
    """
    place = {name: i for i, name in enumerate(names)}
    size = len(names)
    reads = [sorted({place[p] for p in after.get(name, ()) if p in place}) for name in names]
    reader = [size] * size  # the first that reads it
    for i in range(size - 1, -1, -1):
        for p in reads[i]:
            reader[p] = i
    last = [mine[-1] if mine else -1 for mine in reads]  # the last that it reads
    # At a cut behind i: ``ends`` that nothing up to i reads, ``starts`` behind it that read none behind it, and ``joins``,
    # the reads of the one by the other. Each is so for a run of cuts, marked here by where it begins and where it is over.
    ends, starts, joins = ([0] * (size + 1) for _ in range(3))
    for i in range(size):
        _mark_range(ends, i, reader[i])
        _mark_range(starts, max(last[i], 0), i)
        for p in reads[i]:
            _mark_range(joins, last[i], reader[p])
    result, start = [], 0
    for i, (out, into, both) in enumerate(zip(*map(accumulate, (ends, starts, joins)), strict=True)):
        if i < size and (i == size - 1 or out * into == both):
            result.append(range(start, i + 1))
            start = i + 1
    return result


def _mark_range(marks: list[int], begin: int, over: int) -> None:
    """One more at each of ``begin .. over-1``."""
    if begin < over:
        marks[begin] += 1
        marks[over] -= 1


def find_chains(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Operators of ``names``, in topological order, of which each but the last is read by the next alone, which reads it
    alone, as in a separable convolution. By their first operators they are in topological order, too."""
    inside = {*names}
    reads = {n: {p for p in after.get(n, ()) if p in inside} for n in names}
    readers: dict[str, int] = dict.fromkeys(names, 0)
    for mine in reads.values():
        for p in mine:
            readers[p] += 1
    found = dict[str, list[str]]()  # by the last operator so far
    for n in names:
        (only,) = reads[n] if len(reads[n]) == 1 else ("",)
        begun = found.pop(only) if only and readers[only] == 1 else []
        found[n] = [*begun, n]
    place = {n: i for i, n in enumerate(names)}
    return sorted((tuple(c) for c in found.values()), key=lambda c: place[c[0]])


def split_windows(names: Sequence[str], after: Mapping[str, Sequence[str]], most: int) -> list[list[str]]:
    """Parts of at most ``most`` operators, none of which reads a later part's, of ``names`` in topological order.

    A cut keeps apart the pairs of operators on its two sides that could be side by side: neither waits for the other, and in
    some schedule that is as short as the longest path they are in one wave. The cuts with the fewest such pairs are chosen, in
    the order of the names (which has a network's cells one after another) or in that of the levels (where layers of a
    recurrent network advance together), whichever takes less. A regular graph is cut regularly, so that its parts are alike.
    """
    leveled = [name for level in levels_of(names, after) for name in level]
    place = {name: i for i, name in enumerate(names)}
    found = min((_split_order(order, after, most) for order in (list(names), leveled)), key=lambda found: found[0])[1]
    return [sorted(part, key=place.__getitem__) for part in found]


def _split_order(order: Sequence[str], after: Mapping[str, Sequence[str]], most: int) -> tuple[int, list[list[str]]]:
    """Pairs kept apart, and the parts of one order."""
    price = _kept_apart(order, after)
    best, begin = [(0, 0)], [0]  # pairs and parts up to each place, where the last part up to there begins
    for end in range(1, len(order) + 1):
        start = min(range(max(0, end - most), end), key=lambda i: (best[i][0] + price[i], best[i][1], i))
        best.append((best[start][0] + price[start], best[start][1] + 1))
        begin.append(start)
    parts, end = list[list[str]](), len(order)
    while end:
        parts.append(list(order[begin[end] : end]))
        end = begin[end]
    return best[-1][0], parts[::-1]


def _kept_apart(order: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[int]:
    """For each place of a cut, pairs of an operator before and one behind that could be side by side."""
    place = {name: i for i, name in enumerate(order)}
    reads = [[place[p] for p in after.get(name, ()) if p in place] for name in order]
    size = len(order)
    early, before = [0] * size, [0] * size  # the first wave it can be in; bit masks of whom it waits for
    late, behind = [size] * size, [0] * size  # the last wave that delays nobody; who waits for it
    for i, mine in enumerate(reads):
        for p in mine:
            early[i] = max(early[i], early[p] + 1)
            before[i] |= before[p] | 1 << p
    for i in range(size - 1, -1, -1):
        late[i] = min(late[i], max(early))
        for p in reads[i]:
            late[p] = min(late[p], late[i] - 1)
            behind[p] |= behind[i] | 1 << i
    begun, over = _up_to(early), _up_to([wave + 1 for wave in late])  # by wave: whose first it is or was, whose last was
    # Cut behind i instead of before it: i is apart from the later ones, and no longer from the earlier ones.
    price = [0]
    for i in range(size):
        beside = begun[late[i]] & ~over[early[i]] & ~before[i] & ~behind[i] & ~(1 << i)
        earlier = (beside & ((1 << i) - 1)).bit_count()
        price.append(price[-1] + beside.bit_count() - 2 * earlier)
    return price


def _up_to(waves: Sequence[int]) -> list[int]:
    """For each wave the operators (a bit mask) that have it or an earlier one."""
    masks = [0] * (max(waves, default=0) + 2)
    for i, wave in enumerate(waves):
        masks[wave] |= 1 << i
    return list(accumulate(masks, or_))
