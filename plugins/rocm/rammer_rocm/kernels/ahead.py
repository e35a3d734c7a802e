"""Software prefetch: the epilogue's memory operands of a register tile are prefetched while the tile is summed.

The distance between a tile's rows is a whole image. The tile accesses only a few lines of each row, which hardware prefetchers do
not predict. Sums along 64 channels need 0.4 us, about the latency of memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rammer.ir import expr as ex
from rammer.ir.expr import Expr, Load, Ref

from rammer_rocm.kernels.contraction import PanelProduct

#: ``rm_ahead_0`` prefetches bytes from ``p`` for reading, ``rm_ahead_1`` for writing. OpenCL C's ``prefetch`` does nothing on
#: Intel's runtime. If the compiler lacks the builtin or generic addresses, both do nothing.
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
    """Yield the stores (True) and the other loads (False) of the epilogue, in the contraction's axes."""
    inside = {c.name for c in (p.main, *p.after)}
    for c in (p.main, *p.after):
        axes: dict[str, Expr] = {a.name: Ref(m.name) for a, m in zip(c.axes, p.main.axes, strict=True)}
        if c.name in p.operator.outputs:
            yield Load(c.name, tuple(Ref(m.name) for m in p.main.axes)), True
        for load in () if c is p.main else c.loads:
            if load.tensor not in inside:
                yield Load(load.tensor, tuple(ex.substitute(i, axes) for i in load.indices)), False
