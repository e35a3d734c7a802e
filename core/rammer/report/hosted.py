"""Operators that run on the host, by type: a model may have hundreds of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rammer.compiled.segments import HostSegment


def grouped(segments: Sequence[HostSegment]) -> list[str]:
    """A line for each type of operator and each reason, the most frequent first: ``GridSample x 6: why``."""
    found = Counter((s.node.node.op, s.why) for s in segments)
    return [f"{op} x {count}: {why}" for (op, why), count in found.most_common()]


def stays(lines: Sequence[str]) -> list[str]:
    """Return how many operators of each type float16 left in float32, in one line; nothing where there are none."""
    found = Counter(line.partition(" ")[0] for line in lines)
    return [f"{len(lines)} operators stay float32: {', '.join(f'{n} {op}' for op, n in found.most_common())}"] if lines else []
