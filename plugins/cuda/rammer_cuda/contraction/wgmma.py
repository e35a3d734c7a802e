"""Warpgroup matrix products (PTX ``wgmma``, sm_90a): tf32 with operand A in registers, float16 with both in shared memory.

Three tf32 products for one of fp32: ``x = big + small`` with ``big`` rounded to tf32's 11 bits; then ``small`` has at most
12, of which the tensor core drops the last, and ``small * small`` is below fp32's last bit. Tensor cores truncate when they
add: sums stay in them for a few products only, the small ones first.

What lies in shared memory has the layout without swizzle: core matrices of 8 x 16 bytes (PTX ISA, "Strides", "Canonical
Layouts", "Matrix Descriptor Format"). Those of neighbouring columns follow each other, those of the next products come after
all columns, so one descriptor fits either order inside a core matrix: rows of one column's products, or of one product's
columns (float16 alone, with the transposing bit).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rammer.codegen.task import Array

from rammer_cuda.contraction.packing import DEEP
from rammer_cuda.device import filled, source

#: Products of one float16 instruction.
HALF_DEEP = 16
#: The order of products within ``DEEP`` in which a result's registers serve as the next product's operand: lane t holds
#: columns 2t and 2t + 1 of a result, and products t and t + 4 of an operand.
RESULT_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def preamble(columns: Sequence[int]) -> str:
    """Device functions for products of these numbers of columns (multiples of 8, at most 256)."""
    return source("wgmma") + "".join(_product(n) for n in sorted(set(columns)))


def _product(n: int) -> str:
    count = n // 2
    return filled(
        "wgmma_tf32", n=n, count=count, last=count + 5, matrix=count + 4, step=n * DEEP * 4 // 16,
        results=",".join(f"%{i}" for i in range(count)), operands=",".join(f"%{count + i}" for i in range(4)),
        outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
    )  # fmt: skip


def half_preamble(n: int, turned: tuple[bool, bool]) -> str:
    """Device function ``rm_products_{half_name}``: float16 products of ``n`` columns; ``turned`` says of each operand that
    neighbouring rows (or columns), not neighbouring products, are contiguous."""
    count = n // 2
    a, b = map(int, turned)
    return source("wgmma") + filled(
        "wgmma_f16", n=n, count=count, name=half_name(n, turned), first=count, second=count + 1, last=count + 2, ta=a, tb=b,
        results=",".join(f"%{i}" for i in range(count)), outputs=", ".join(f'"+f"(d[{i}])' for i in range(count)),
    )  # fmt: skip


def half_name(n: int, turned: tuple[bool, bool]) -> str:
    """The end of the name of that function."""
    return f"f16_{n}_{'nt'[turned[0]]}{'nt'[turned[1]]}"


def halves(values: Array) -> tuple[Array, Array]:
    """float32 ``values`` as (rounded to tf32, the rest)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    big = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return big, values - big
