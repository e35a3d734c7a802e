"""Matrix instructions of AMD targets on any OpenCL device: a wave's lanes exchange fragments through local memory.

The layouts are those of AMD's instruction set manuals, written independently of the kernels:

- MI200 and CDNA 3, V_MFMA_F32_32X32X8_F16: lane ``l`` holds ``A[l % 32][4 * (l / 32) + e]`` and ``B[4 * (l / 32) + e][l % 32]``.
  Element ``e`` of its sums is in row ``8 * (e / 4) + 4 * (l / 32) + e % 4`` and column ``l % 32``.
- RDNA 3, V_WMMA_F32_16X16X16_F16 with waves of 32: lanes ``l`` and ``l + 16`` hold row ``l`` of A and column ``l`` of B. Element
  ``e`` of their sums is in row ``2 * e + l / 16`` and column ``l % 16``."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from rammer_rocm.matrix.matrix_instruction import MatrixInstruction

#: Every lane leaves its fragments in local memory. After a barrier of the group, which all waves reach equally often, it adds.
_EXCHANGE: Final = """
#define rm_in_order()
#define rm_number(p, i) (brain ? as_float((uint)(p)[i] << 16) : vload_half(i, (__local const half *)(p)))
inline static rm_sums rm_exchanged(const ushort *x, const ushort *y, rm_sums sums, __local char *mail, const int count,
                                   const bool brain) {
  const int lanes = @LANES@, lane = (int)get_local_id(0) % lanes, first = (int)get_local_id(0) - lane;
  __local ushort *const a = (__local ushort *)mail, *const b = a + 256 * count;
  for (int e = 0; e < count; ++e) {
    a[get_local_id(0) * count + e] = x[e];
    b[get_local_id(0) * count + e] = y[e];
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  float c[@SUMS@];
  @STORE@(sums, 0, c);
  for (int e = 0; e < @SUMS@; ++e) {
    const int row = @ROW@, column = lane % @SIDE@;
    for (int k = 0; k < @PRODUCTS@; ++k) {
      const int group = k / count * @SIDE@, at = k % count;
      // The other copy of a row, in lanes from 16 on, must be equal.
      const int other = @TWIN@ ? lane / 16 * 16 : 0;
      const int x = (first + group + row + other) * count + at, y = (first + group + column + other) * count + at;
      c[e] = fma(rm_number(a, x), rm_number(b, y), c[e]);
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  return @LOAD@(0, c);
}
"""
_MFMA: Final = """
typedef ushort8 rm_fragment;
typedef float16 rm_sums;
#define rm_fragment_of(lots, one, other) (*(__local const ushort8 *)((lots) + (one)))
#define rm_of(x, y, c, mail, brain) \\
  { ushort u[4], v[4]; vstore4(x, 0, u); vstore4(y, 0, v); c = rm_exchanged(u, v, c, mail, 4, brain); }
#define rm_products0(x, y, c, mail) rm_of((x).lo, (y).lo, c, mail, false)
#define rm_products1(x, y, c, mail) rm_of((x).hi, (y).hi, c, mail, false)
#define rm_products0b(x, y, c, mail) rm_of((x).lo, (y).lo, c, mail, true)
#define rm_products1b(x, y, c, mail) rm_of((x).hi, (y).hi, c, mail, true)
"""
_WMMA: Final = """
typedef ushort16 rm_fragment;
typedef float8 rm_sums;
#define rm_fragment_of(lots, one, other) \\
  (ushort16)(*(__local const ushort8 *)((lots) + (one)), *(__local const ushort8 *)((lots) + (other)))
#define rm_of(x, y, c, mail, brain) \\
  { ushort u[16], v[16]; vstore16(x, 0, u); vstore16(y, 0, v); c = rm_exchanged(u, v, c, mail, 16, brain); }
#define rm_products0(x, y, c, mail) rm_of(x, y, c, mail, false)
#define rm_products0b(x, y, c, mail) rm_of(x, y, c, mail, true)
"""


def emulated(target: str, i: MatrixInstruction) -> MatrixInstruction:
    """Return the instruction ``i`` of ``target`` as text for any OpenCL device."""
    wide = target.startswith("gfx9")
    names = {"LANES": 64, "SUMS": 16, "SIDE": 32, "PRODUCTS": 8, "TWIN": 0, "STORE": "vstore16", "LOAD": "vload16"}
    names["ROW"] = "8 * (e / 4) + 4 * (lane / 32) + e % 4"
    if not wide:
        names |= {"LANES": 32, "SUMS": 8, "SIDE": 16, "PRODUCTS": 16, "TWIN": 1, "STORE": "vstore8", "LOAD": "vload8"}
        names["ROW"] = "2 * e + lane / 16"
    text = (_MFMA if wide else _WMMA) + _EXCHANGE
    for name, value in names.items():
        text = text.replace(f"@{name}@", str(value))
    return replace(i, device=text, mailbox=2 * 2 * 256 * (4 if wide else 16))
