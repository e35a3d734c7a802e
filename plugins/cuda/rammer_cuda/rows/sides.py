"""Reductions of rows whose threads are side by side: lane by lane in each warp, the warps in order."""

from __future__ import annotations

from rammer.codegen.operations import Val, ctype
from rammer.ir.compute import Compute

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.frame import WARP, Frame
from rammer_cuda.rows.rowshape import RowShape


def join_sides(frame: Frame, c: Compute, total: Val, shape: RowShape, number: int = 0) -> None:
    """Combine ``total`` of all lanes of a row into every one of them: those of a warp by shuffles, whose lanes all get the same
    bits, then the warps, or each lane where a warp has one of every row, in order through shared memory named by ``number``."""
    block, kind, side = frame.block, ctype(CUDA, total.cdtype), shape.side
    other, share = Val("other", total.cdtype, atom=True), f"part{number}"
    if side < WARP:
        with frame.scope(f"for (int s = {WARP // 2}; s >= {side}; s >>= 1)", "#pragma unroll"):
            block.line(f"const {kind} other = __shfl_xor_sync(0xffffffffu, {total.text}, s);")
            block.line(block.combine(c, total.text, other))
    step = max(side, WARP)
    parts = shape.threads // step
    if parts == 1:
        return
    frame.shared += parts * side * 8
    block.line(f"__shared__ {kind} {share}[{parts}][{side}];")
    first = f"if (tid % {WARP} < {side}) " if side < WARP else ""
    block.line(f"{first}{share}[tid / {step}][local] = {total.text};")
    block.line("__syncthreads();")
    block.line(f"{total.text} = {share}[0][local];")
    with frame.scope(f"for (int w = 1; w < {parts}; ++w)", "#pragma unroll"):
        block.line(f"const {kind} other = {share}[w][local];")
        block.line(block.combine(c, total.text, other))
