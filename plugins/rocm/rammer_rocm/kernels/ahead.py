"""Asking for memory before it is needed: what the sums of a register tile meet on their way to memory, while they are summed.

A tile's rows lie a whole image apart, and of each it meets a few lines, which no core foresees. Sums along 64 channels take
0.4 us, about as long as memory takes to answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Load, Ref

from rammer_rocm.kernels.contraction import PanelProduct

#: ``rm_ahead_0``: so many bytes from ``p`` on will be read, ``rm_ahead_1``: and written. OpenCL C's own ``prefetch`` does nothing
#: on Intel's runtime; where a compiler lacks the other one, or addresses of one kind for all memory, nothing is asked for.
HELPERS: Final = """
#ifndef RM_AHEAD
#define RM_AHEAD(p, write)
#if defined(__has_builtin) && (__OPENCL_C_VERSION__ == 200 || defined(__opencl_c_generic_address_space))
#if __has_builtin(__builtin_prefetch)
#undef RM_AHEAD
#define RM_AHEAD(p, write) __builtin_prefetch((const void *)(p), write, 3)
#endif
#endif
inline static void rm_ahead_0(__global const char *p, int count) { for (int n = 0; n < count; n += 64) RM_AHEAD(p + n, 0); }
inline static void rm_ahead_1(__global const char *p, int count) { for (int n = 0; n < count; n += 64) RM_AHEAD(p + n, 1); }
#endif
"""


def epilogue_accesses(p: PanelProduct) -> Iterator[tuple[Load, bool]]:
    """What of the sums is written (True), and what the maps behind read beside them, in the axes of the contraction."""
    inside = {c.name for c in (p.main, *p.after)}
    for c in (p.main, *p.after):
        axes: dict[str, Expr] = {a.name: Ref(m.name) for a, m in zip(c.axes, p.main.axes, strict=True)}
        if c.name in p.operator.outputs:
            yield Load(c.name, tuple(Ref(m.name) for m in p.main.axes)), True
        for load in () if c is p.main else c.loads:
            if load.tensor not in inside:
                yield Load(load.tensor, tuple(ex.substitute(i, axes) for i in load.indices)), False
