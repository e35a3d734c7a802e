"""Matrix products as kernel families: a family for each instruction that multiplies."""

from __future__ import annotations

from functools import partial
from typing import Final

from rammer_cuda.contraction.choose import gemm_choices, gemm_seconds
from rammer_cuda.contraction.choose_wide import WGMMA1, WGMMA3, WGMMA_F16, wide_choices, wide_seconds
from rammer_cuda.contraction.families import F16, FFMA, TF32, TF32X3
from rammer_cuda.family import Family

_SMALL = range(0, 1025)
_BLOCK = dict.fromkeys(("tm", "tn", "bk", "split", "slices", "stages"), _SMALL)
_WIDE = dict.fromkeys(("bk", "stages", "split", "patch", "copiers", "down"), _SMALL)

#: Those of single threads and warps, then those of warpgroups.
PRODUCTS: Final = (
    *(Family(f.name, _BLOCK, partial(gemm_choices, f), partial(gemm_seconds, f), f.make, product=True)
      for f in (FFMA, TF32X3, TF32, F16)),
    *(Family(f.name, _WIDE, partial(wide_choices, f), partial(wide_seconds, f), f.make, lambda gpu: gpu.warpgroups, product=True)
      for f in (WGMMA3, WGMMA1, WGMMA_F16)),
)  # fmt: skip
