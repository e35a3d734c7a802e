"""The matrix-product families: what each computes, its block shapes, and what its instructions cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rammer.codegen.contraction import Roles
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.kernel import contraction
from rammer_cuda.kernels.task import TaskKernel

#: Register tiles (rows, columns) of FFMA, and fragments of 16 x 8 a warp on tensor cores.
REGISTERS = ((4, 4), (8, 4), (4, 8), (8, 8))
FRAGMENTS = ((1, 2), (1, 4), (1, 7), (2, 2), (2, 4), (2, 7), (4, 4))
#: Block depths with their slices.
BLOCKS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
TENSOR_BLOCKS = ((16, 1), (16, 2), (32, 1), (32, 2), (32, 4))
HALF_BLOCKS = ((32, 1), (32, 2), (64, 1), (64, 2), (64, 4))


@dataclass(frozen=True, slots=True)
class TensorCost:
    """Cycles: of a launch, for convolutions' taps and for a cluster's barriers; on one scheduler per ring step, matrix
    instruction, shared-memory read of an operand with what it takes to round or split it, copy of a thread, and element
    of a thread in the epilogue; of each cycle that staging would keep L2 busy, and per byte read from others of a cluster.
    ``depth`` products an instruction, ``products`` instructions for one."""

    start: float
    taps: float
    cluster: float
    step: float
    matrix: float
    read: float
    copy: float
    store: float
    l2: float
    peer: float
    depth: int
    products: int

    def instructions(self, part: Any, tm: Any, tn: Any) -> Any:
        """Matrix instructions of a warp for ``part`` products; numbers or arrays."""
        return part / self.depth * tm * tn * self.products

    def reads(self, part: Any, tm: Any, tn: Any) -> Any:
        """Reads of a warp: 4 and 2 words for tf32, whole and half ldmatrix for float16."""
        return part / self.depth * ((4 * tm + 2 * tn) if self.depth == 8 else (tm + tn / 2))


@dataclass(frozen=True, slots=True)
class Family:
    """``make`` writes the kernel; ``tiles`` are register tiles or fragments; ``cost`` is None for FFMA."""

    name: str
    make: Callable[[ROperator, Binding], TaskKernel]
    tiles: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[int, int], ...]
    cost: TensorCost | None = None

    def configs(self, splits: Sequence[int]) -> list[tuple[tuple[str, int], ...]]:
        """The config of every block shape; the ring of tensor-core kernels depends on the task too (``choose.ring``)."""
        return [
            (("tm", tm), ("tn", tn), ("bk", bk), ("split", split), ("slices", slices),
             *(() if self.cost is not None else (("stages", 4 if bk < 32 else 3),)))
            for tm, tn in self.tiles for bk, slices in self.blocks for split in splits
        ]  # fmt: skip


FFMA = Family("gemm", contraction, REGISTERS, BLOCKS)
#: The three-product figures were fitted together with those of FFMA (``choose``); additions outside are in ``matrix``. Those
#: of one product, on 798 kernels of 55 layers in tf32 and 784 of 27 in float16 on an H200, minimise by how much the first
#: and the best of the first four choices are slower than the best: by 8%, and by 2%.
TF32X3 = Family("gemm_tf32x3", contraction, FRAGMENTS, TENSOR_BLOCKS,
                TensorCost(1900, 850, 2100, 160, 13.0, 13.6, 4.2, 10.0, 0.0, 0.0, 8, 3))  # fmt: skip
TF32 = Family("gemm_tf32", contraction, FRAGMENTS, TENSOR_BLOCKS,
              TensorCost(2300, 30, 1600, 72, 5.5, 8.7, 8.4, 11.3, 0.08, 0.09, 8, 1))  # fmt: skip
F16 = Family("gemm_f16", contraction, FRAGMENTS, HALF_BLOCKS,
             TensorCost(1910, 0, 1600, 190, 9.5, 12.0, 11.5, 12.0, 0.5, 0.075, 16, 1))  # fmt: skip


def families_of(roles: Roles, binding: Binding) -> tuple[Family, ...]:
    """The families worth trying for a contraction: by its element type, and by the precision that the user allows."""
    if binding.types[roles.a.tensor].dtype == "float16":
        return (F16,)
    return (FFMA, TF32) if binding.precision == "tf32" else (FFMA, TF32X3)
