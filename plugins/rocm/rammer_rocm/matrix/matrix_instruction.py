"""The matrix instructions of AMD targets, each as a value: fragments of a wave, the rate, and the text of the device.

A wave adds 16 products to each of ``side x side`` sums. Lane ``l`` holds row ``l % side`` of the first operand, and column ``l %
side`` of the second one. The order of the 16 products among the lanes is free, as long as both operands share it.
``tests/matrix_emulator.py`` executes the instructions on any OpenCL device with AMD's layouts (the instruction set manuals of
MI200, CDNA 3 and RDNA 3), so a wrong fragment changes results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from rammer.codegen import Product, product_of
from rammer.device.manifest import Binding
from rammer.ir.device import VDevice
from rammer.ir.operator import ROperator

from rammer_rocm.units import MATRIX_TARGETS, PREFIX

#: Products that a step adds, and work-items of a group.
DEPTH: Final = 16
THREADS: Final = 256

_MFMA: Final = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define rm_in_order() __builtin_amdgcn_sched_barrier(0)
typedef ushort8 rm_fragment;
typedef float16 rm_sums;
#define rm_fragment_of(lots, one, other) (*(__local const ushort8 *)((lots) + (one)))
#define rm_products0(x, y, c, mail) \\
  c = __builtin_amdgcn_mfma_f32_32x32x8f16(as_half4((x).lo), as_half4((y).lo), c, 0, 0, 0)
#define rm_products1(x, y, c, mail) \\
  c = __builtin_amdgcn_mfma_f32_32x32x8f16(as_half4((x).hi), as_half4((y).hi), c, 0, 0, 0)
#define rm_products0b(x, y, c, mail) \\
  c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(as_short4((x).lo), as_short4((y).lo), c, 0, 0, 0)
#define rm_products1b(x, y, c, mail) \\
  c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(as_short4((x).hi), as_short4((y).hi), c, 0, 0, 0)
"""
_WMMA: Final = """
#pragma OPENCL EXTENSION cl_khr_fp16 : enable
#define rm_in_order() __builtin_amdgcn_sched_barrier(0)
typedef ushort16 rm_fragment;
typedef float8 rm_sums;
#define rm_fragment_of(lots, one, other) \\
  (ushort16)(*(__local const ushort8 *)((lots) + (one)), *(__local const ushort8 *)((lots) + (other)))
#define rm_products0(x, y, c, mail) c = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(as_half16(x), as_half16(y), c)
#define rm_products0b(x, y, c, mail) c = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(as_short16(x), as_short16(y), c)
"""


@dataclass(frozen=True, slots=True)
class MatrixInstruction:
    """A matrix instruction of waves of ``lanes``. ``steps`` instructions add 16 products to a fragment of ``side x side`` sums,
    in ``cycles`` of one of ``simds`` units. Element ``e`` of a lane's ``sums`` is in row ``row`` and column ``lane % side``.

    ``blocks`` are the products of a step of the kernel, as far as registers last. A lane reads one of ``groups`` parts of the 16
    products, by ``lane / side``. A unit has ``registers`` for each lane, at most ``most`` for a wave. A wave issues another
    instruction every ``issue`` cycles; with ``overlapped``, other units execute it while the matrix unit multiplies.
    ``device`` is the text of the device. It gets ``mailbox`` bytes of local memory, for emulation.

    Operands of ``dtype`` in memory are rounded to bfloat16 on their way to local memory if they are float32."""

    name: str
    lanes: int
    side: int
    steps: int
    cycles: int
    simds: int
    sums: int
    row: str
    groups: int
    registers: int
    most: int
    blocks: tuple[int, ...]
    issue: int
    overlapped: bool
    device: str
    mailbox: int = 0
    dtype: str = "float16"
    depth: int = DEPTH
    item: int = 2
    prologue: bool = False

    @property
    def waves(self) -> int:
        """The waves of a group."""
        return THREADS // self.lanes

    @property
    def rounding(self) -> str:
        """The format to which operands are rounded, or ""."""
        return "bfloat16" if self.dtype == "float32" else ""

    @property
    def source(self) -> int:
        """Bytes of an element in memory."""
        return 4 if self.rounding else self.item

    @property
    def suffix(self) -> str:
        """The suffix of the names of device functions for the type in local memory."""
        return "b" if self.rounding else ""

    def serves(self, precision: str) -> bool:
        """Return True if products may be as inexact as ``precision``. Products of float16 are exact in float32."""
        return self.rounding in ("", precision)

    def product(self, operator: ROperator, binding: Binding) -> Product:
        """Return the matrix product of a tiled operator. Raises Unsuited."""
        return product_of(operator, binding, self.dtype)


def _mfma(cycles: int) -> MatrixInstruction:
    row, blocks = "{e} / 4 * 8 + lane / 32 * 4 + {e} % 4", (16, 32, 64, 128)
    return MatrixInstruction("matrix", 64, 32, 2, cycles, 4, 16, row, 2, 512, 512, blocks, 4, True, _MFMA)


_WMMA_F16: Final = MatrixInstruction(
    "matrix", 32, 16, 1, 32, 2, 8, "{e} * 2 + lane / 16", 1, 1536, 256, (16, 32, 64), 1, False, _WMMA
)
#: Instruction by target. Cycles are those of "v_mfma_f32_32x32x8_f16" (16 passes of 4 cycles on MI200, 8 on MI300: their
#: instruction set manuals) and of "v_wmma_f32_16x16x16_f16" (512 operations per cycle of a compute unit: RDNA 3 white paper).
INSTRUCTIONS: Final = dict(zip(MATRIX_TARGETS, (_mfma(128), _mfma(64), _WMMA_F16), strict=True))
#: The same for float32 operands, rounded to bfloat16 if a user allows it. The instructions have the same fragments and rates.
ROUNDING: Final = {t: replace(i, name="matrix_bf16", dtype="float32") for t, i in INSTRUCTIONS.items()}


def instruction_of(device: VDevice, among: Mapping[str, MatrixInstruction]) -> MatrixInstruction | None:
    """Return the matrix instruction of a device, or None."""
    return among.get(device.name.removeprefix(PREFIX)) if device.threads == THREADS else None
