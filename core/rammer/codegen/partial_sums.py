"""Partial sums: long sums of floats are cut into blocks, whose sums are cut into blocks again.

The error of a chain of additions grows with its length. A block's sum begins at 0 and is added to a separate total. So no chain
has more than ``LONGEST_SUM`` additions at any depth. Code that writes the loops of a sum gets its block sizes from
``block_sizes``; ``write_in_blocks`` writes them for accumulators in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from rammer.codegen.c_text import Text

#: Maximum number of floats that are added one after another. If vectors walk along a sum, each lane is a partial sum.
LONGEST_SUM: Final = 256


def block_sizes(iterations: int, terms: int = 1) -> tuple[int, ...]:
    """Return the block sizes of a loop, outermost first: iterations between two additions to a total. ``terms`` is the number of
    additions of one iteration. Returns () if the loop's chain is short enough."""
    if iterations < 2 or iterations * terms <= LONGEST_SUM:
        return ()
    most = max(1, LONGEST_SUM // terms)
    size = -(-iterations // -(-iterations // most))  # even blocks: the last one is not much shorter
    sizes = [size]
    while -(-iterations // sizes[-1]) > LONGEST_SUM:
        sizes.append(sizes[-1] * LONGEST_SUM)
    return tuple(reversed(sizes))


def write_in_blocks(
    text: Text, sums: Sequence[str], kind: str, sizes: Sequence[int], ends: tuple[str, str], walk: Callable[[str, str], None]
) -> None:
    """Write loops over the blocks of a sum.

    Args:
        sums: Accumulators, C variables of type ``kind``; their initial values count as terms.
        sizes: Block sizes, as ``block_sizes`` returns them.
        ends: Bounds of the loop.
        walk: Writes the innermost loop from the first bound to before the second.
    """
    if not sizes or not sums:
        walk(*ends)
        return
    name = f"q{len(sizes)}_{text.depth}"
    with text.block(""):
        text.line(f"{kind} {name}[{len(sums)}] = {{{', '.join(sums)}}};")
        with text.block(f"for (int {name}_at = {ends[0]}; {name}_at < {ends[1]}; {name}_at += {sizes[0]})"):
            text.line(f"const int {name}_end = min({name}_at + {sizes[0]}, {ends[1]});")
            text.line(" ".join(f"{s} = 0;" for s in sums))
            write_in_blocks(text, sums, kind, sizes[1:], (f"{name}_at", f"{name}_end"), walk)
            text.line(" ".join(f"{name}[{n}] += {s};" for n, s in enumerate(sums)))
        text.line(" ".join(f"{s} = {name}[{n}];" for n, s in enumerate(sums)))
