"""Block partition of a graph for IOS. A cut is free if all later operators wait for all earlier ones. Other cuts separate the
fewest operators that could run concurrently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import or_

from rammer.schedule.task_placement import levels_of


def split_blocks(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[range]:
    """Cut at each point where all later operators wait for all earlier ones: unpruned, a stage across it gains nothing.

    This holds if each source operator after the cut reads every sink operator before it. Sources read only from before the cut;
    sinks are not read before it. A concatenation that is a view, and so not an operator, does not hide a cut. ``names`` are in
    topological order.
    """
    place = {name: i for i, name in enumerate(names)}
    size = len(names)
    reads = [sorted({place[p] for p in after.get(name, ()) if p in place}) for name in names]
    reader = [size] * size  # the first reader of each operator
    for i in range(size - 1, -1, -1):
        for p in reads[i]:
            reader[p] = i
    last = [mine[-1] if mine else -1 for mine in reads]  # the last operand of each operator
    # At a cut after i: ``ends`` counts operators up to i without readers up to i, ``starts`` operators after i without reads
    # after i, and ``joins`` the reads of ends by starts. Each counts over a run of cuts, marked by its start and end.
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
    """Add one to each of ``begin .. over-1``."""
    if begin < over:
        marks[begin] += 1
        marks[over] -= 1


def find_chains(names: Sequence[str], after: Mapping[str, Sequence[str]]) -> list[tuple[str, ...]]:
    """Return chains of operators, as in a separable convolution.

    In a chain, each operator but the last is read only by the next, which reads nothing else. ``names`` are in topological order.
    The chains are ordered by their first operators, which is a topological order, too."""
    inside = {*names}
    reads = {n: {p for p in after.get(n, ()) if p in inside} for n in names}
    readers: dict[str, int] = dict.fromkeys(names, 0)
    for mine in reads.values():
        for p in mine:
            readers[p] += 1
    found = dict[str, list[str]]()  # by the last operator of each chain
    for n in names:
        (only,) = reads[n] if len(reads[n]) == 1 else ("",)
        begun = found.pop(only) if only and readers[only] == 1 else []
        found[n] = [*begun, n]
    place = {n: i for i, n in enumerate(names)}
    return sorted((tuple(c) for c in found.values()), key=lambda c: place[c[0]])


def split_windows(names: Sequence[str], after: Mapping[str, Sequence[str]], most: int) -> list[list[str]]:
    """Split ``names`` (in topological order) into parts of at most ``most`` operators; no part reads a later one.

    A cut separates pairs of operators that could run concurrently: neither waits for the other, and some schedule as short as the
    longest path has them in one wave. The cuts with the fewest separated pairs are chosen. Two orders are tried: that of the
    names (a network's cells follow each other) and that of the levels (layers of a recurrent network advance together). A regular
    graph is cut regularly, so its parts are alike.
    """
    leveled = [name for level in levels_of(names, after) for name in level]
    place = {name: i for i, name in enumerate(names)}
    found = min((_split_order(order, after, most) for order in (list(names), leveled)), key=lambda found: found[0])[1]
    return [sorted(part, key=place.__getitem__) for part in found]


def _split_order(order: Sequence[str], after: Mapping[str, Sequence[str]], most: int) -> tuple[int, list[list[str]]]:
    """Return the number of separated pairs, and the parts of one order."""
    price = _kept_apart(order, after)
    best, begin = [(0, 0)], [0]  # pairs and parts up to each index; start of the last part up to there
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
    """Return, for each cut, the number of separated pairs that could run concurrently."""
    place = {name: i for i, name in enumerate(order)}
    reads = [[place[p] for p in after.get(name, ()) if p in place] for name in order]
    size = len(order)
    early, before = [0] * size, [0] * size  # the earliest wave; bit masks of the transitive operands
    late, successors = [size] * size, [0] * size  # the latest wave without delay; transitive readers
    for i, mine in enumerate(reads):
        for p in mine:
            early[i] = max(early[i], early[p] + 1)
            before[i] |= before[p] | 1 << p
    for i in range(size - 1, -1, -1):
        late[i] = min(late[i], max(early))
        for p in reads[i]:
            late[p] = min(late[p], late[i] - 1)
            successors[p] |= successors[i] | 1 << i
    begun, over = _up_to(early), _up_to([wave + 1 for wave in late])  # by wave: operators begun; operators over
    # Moving the cut from before i to after i separates i from the later operators instead of the earlier ones.
    price = [0]
    for i in range(size):
        concurrent = begun[late[i]] & ~over[early[i]] & ~before[i] & ~successors[i] & ~(1 << i)
        earlier = (concurrent & ((1 << i) - 1)).bit_count()
        price.append(price[-1] + concurrent.bit_count() - 2 * earlier)
    return price


def _up_to(waves: Sequence[int]) -> list[int]:
    """Return, for each wave, a bit mask of the operators with this wave or an earlier one."""
    masks = [0] * (max(waves, default=0) + 2)
    for i, wave in enumerate(waves):
        masks[wave] |= 1 << i
    return list(accumulate(masks, or_))
