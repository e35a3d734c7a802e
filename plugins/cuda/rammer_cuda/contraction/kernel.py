"""Implicit matrix products: one writer for every instruction, one block (or one cluster of blocks) a task.

A block walks the reduction axes in blocks of ``bk`` products through a ring of ``stages`` shared-memory buffers filled
by cp.async (``contraction.pipeline``), and accumulates in registers what its instruction multiplies
(``contraction.instruction``), of ``slice_k`` parts of each block apart. With ``split_k`` > 1 a task is a thread-block cluster:
each block sums its share of the products, then every block adds up its rows of the tile over all shared memories in rank
order, so results repeat bit for bit. The following maps are applied on the way to memory (``kernels.epilogue``), maps before
one operand once to each staged element (``contraction.prologue``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rammer.codegen.contraction import BYTE, Product
from rammer.codegen.task import Argument, Unsuited
from rammer.codegen.text import Text
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.block import THREADS, Shape, WarpgroupShape
from rammer_cuda.contraction.depth import Depth, depth_of, taps_of
from rammer_cuda.contraction.halo import InputHalo
from rammer_cuda.contraction.instruction import RING
from rammer_cuda.contraction.operand import Staged
from rammer_cuda.contraction.pipeline import Producers, SharedRing
from rammer_cuda.contraction.prologue import prologue_of
from rammer_cuda.contraction.warpgroup import WARPGROUPS
from rammer_cuda.device import source
from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.epilogue import Epilogue
from rammer_cuda.kernels.lengths import stopped, with_lengths
from rammer_cuda.kernels.quads import Quads
from rammer_cuda.kernels.task import TaskKernel, origins, parameter

#: Largest cluster every GPU with clusters can schedule (CUDA C++ programming guide, "Thread Block Clusters").
MOST_SPLIT_K = 8
#: Every instruction, by family.
INSTRUCTIONS = {**RING, **WARPGROUPS}


def contraction(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction by its family's instruction. Unsuited where it is none, its operands are not what
    the instruction takes, or its block is no possible one."""
    instruction = INSTRUCTIONS[operator.family]
    product = instruction.product(operator, binding)
    return Contraction(product, binding, instruction, instruction.block(product)).kernel()


class Contraction:
    """Writes the kernel of one product with one instruction."""

    def __init__(self, product: Product, binding: Binding, instruction: Any, shape: Shape) -> None:
        self.p, self.binding, self.i, self.s, self.text = product, binding, instruction, shape, Text()
        instruction.check(shape)
        self.depth = self._depth()
        self.split_k = min(shape.split_k, self.depth.blocks, MOST_SPLIT_K)
        wide = isinstance(shape, WarpgroupShape)
        threads, staged = THREADS if wide else shape.threads, instruction.staged
        first, second = staged[::-1] if isinstance(shape, WarpgroupShape) and not shape.down else staged
        if product.a.fill and product.b.fill:
            raise Unsuited("padding of both operands with another value than 0")
        self.a = Staged("a", product, product.a, product.rows, shape.bm, self.depth, threads, first)
        self.b = Staged("b", product, product.b, product.columns, shape.bn, self.depth, threads, second)
        self.prologue = prologue_of("a", product.a, binding) or prologue_of("b", product.b, binding)
        self.line = instruction.line(shape.bn)
        self.pipeline = Producers(self) if wide else SharedRing(self)
        #: Where the prologue's tables lie in shared memory, and bytes of it in all.
        self.tables = -(-self.pipeline.dynamic // 16) * 16
        self.dynamic = self.tables + self.prologue.bytes if self.prologue else self.pipeline.dynamic
        self.arguments = self._arguments()

    def _depth(self) -> Depth:
        """The walk over the products, to the length of a run where nothing else than zeros is staged beyond."""
        p, depth = self.p, depth_of(self.p.main.reduce, self.s.bk)
        if p.a.fill or p.b.fill or (isinstance(self.s, WarpgroupShape) and self.s.halo):
            return depth
        ends = replace(depth, stopped=stopped(p.operator, p.main, p.main.reduce))
        if ends.flat and ends.stopped and not ends.stops:  # tap order can end its inner axis, whatever it pads
            ends = replace(taps_of(p.main.reduce, self.s.bk), stopped=ends.stopped)
        return ends

    def _arguments(self) -> list[Argument]:
        """Operands, then what the maps around the contraction read, then outputs."""
        p = self.p
        inside = {p.main.name, *(c.name for c in p.after)}
        read = dict.fromkeys(self.prologue.prologue.constants if self.prologue else ())
        read |= dict.fromkeys(t for c in p.after for t in c.reads if t not in inside)
        return [
            Argument(p.a.tensor, False, self.a.packing),
            Argument(p.b.tensor, False, self.b.packing),
            *(Argument(t, False) for t in read),
            *(Argument(t, True) for t in p.operator.outputs),
        ]

    def kernel(self) -> TaskKernel:
        """The finished kernel."""
        s, types = self.s, self.binding.types
        self._origins()
        self.pipeline.declare()
        self._sum()
        bytes_ = self.i.dtype == BYTE
        end = self._epilogue()
        copies = ["copies", *["copies_i8"] * bytes_, *["cluster", *["cluster_i32"] * bytes_] * (self.split_k > 1)]
        before = source(*copies), self.pipeline.device, end.write()
        kinds = [CUDA.types[types[a.tensor].dtype] for a in self.arguments]
        parameters = tuple(parameter(t, a, k, self.binding) for k, (t, a) in enumerate(zip(kinds, self.arguments, strict=True)))
        shape = s.threads, self.dynamic, self.dynamic, self.split_k
        made = TaskKernel("", "".join(before), parameters, str(self.text), tuple(self.arguments), *shape)
        return (with_lengths(self.p.operator, made) if self.depth.stops else made).named("g_")

    def _epilogue(self) -> Epilogue:
        """What writes the maps behind the sums and the stores."""
        i, known = self.i, (self.p, self.s, self.binding, self.arguments, self.text, self.split_k, self.line)
        if i.dtype == BYTE:
            quads = Quads(*known, i.unroll, i.number, i.totals)
            if quads.possible:
                return quads
        return Epilogue(*known, i.unroll, i.number, i.totals)

    def _origins(self) -> None:
        text = self.text
        text.line("// The task, and where its tile begins.")
        text.line("const int tid = (int)threadIdx.x;")
        text.line(f"const int slot = (int)blockIdx.x{f' / {self.split_k}' if self.split_k > 1 else ''};")
        text.line("const int task = order ? order[slot] : first + slot;")
        text.all(origins(self.p.operator))
        text.all(self.depth.definitions())

    def pointers(self) -> list[str]:
        """Shared memory, and both operands."""
        kind, memory = self.a.staging.ctype, "extern __shared__ __align__(16) float shared[];"
        if self.i.dtype == BYTE:  # of either sign
            a, b = (f"const {kind} *const {n}g = (const {kind} *)p{k};" for k, n in enumerate("ab"))
            return [memory, "int *const totals = (int *)shared;", a, b]
        return [memory, f"const {kind} *const ag = p0; const {kind} *const bg = p1;"]

    def copy_tables(self, thread: str, threads: int) -> None:
        """Start copying the constants of the maps before the contraction, if there are any."""
        if self.prologue:
            pointers = {a.tensor: f"p{k}" for k, a in enumerate(self.arguments) if k >= 2}
            self.prologue.copy(self.text, pointers, thread, threads)

    def fetches(self) -> None:
        """The functions of both operands, for block ``kb`` of products."""
        s, d = self.s, self.depth
        for stage in (self.a, self.b):
            head = [f"{stage.staging.ctype} *const {stage.name}s = {stage.name}shared + slot * {stage.size};"]
            if stage.packing is None and (d.flat or not d.outer):
                head.append(f"const int tap = 0, c0 = kb * {s.bk};")
            elif stage.packing is None:
                head.append(f"const int tap = kb / {d.per}, c0 = (kb - tap * {d.per}) * {s.bk};")
            self.functions(stage, "kb", head)

    def functions(self, stage: Staged | InputHalo, number: str, head: list[str]) -> None:
        """A function that copies block ``number`` into buffer ``slot``, and, for the operand with maps before the contraction,
        one that applies them to what this thread copied."""
        maps = self.prologue if self.prologue and self.prologue.name == stage.name else None
        for verb in ("fetch", "prologue") if maps else ("fetch",):
            what = "Maps on what this thread copied" if verb == "prologue" else "This thread's copies"
            self.text.line(f"// {what} of block {number} of {stage.name}.")
            with self.text.block(f"auto {stage.name}{verb} = [&](int {number}, int slot)", "};"):
                self.text.all(head)
                if maps and verb == "prologue":
                    stage.apply(self.text, maps)
                else:
                    stage.fetch(self.text)

    def _sum(self) -> None:
        """The task's products over this block's share of the reduction, into shared memory."""
        s, text, blocks, rows = self.s, self.text, self.depth.end, self.p.row_count
        if self.split_k > 1:
            text.line(f"const int rank = (int)blockIdx.x % {self.split_k};")
            text.line(f"const int begin = {blocks} * rank / {self.split_k}, end = {blocks} * (rank + 1) / {self.split_k};")
            text.line(f"const int low = {rows} * rank / {self.split_k}, high = {rows} * (rank + 1) / {self.split_k};")
        else:
            text.line(f"const int begin = 0, end = {blocks}, low = 0, high = {rows};")
        text.line("// This block's share of the sums.")
        text.line(f"{self.i.number} acc{self.i.sums(s)} = {{}};")
        self.pipeline.start()
        self.pipeline.loop()
        text.all(["// Sums to shared memory, where operands were.", "rm_arrived<0>();", "__syncthreads();"])
        with text.block(f"if (tid < {s.works})" if s.works < s.threads else ""):
            text.all(self.i.leave(s, self.line))
        if self.split_k == 1:
            text.line("__syncthreads();")
            return
        if s.slice_k > 1:  # the others of the cluster then read one: their way is far slower than this block's
            text.all(["// Slices of the same sums.", "__syncthreads();"])
            text.line(f"rm_gather_slices<{s.slice_k}, {s.bm * self.line}, {s.threads}>({self.i.totals}, tid);")
        text.all(["// Rows of this block, from the shared memories of all of the cluster.", "rm_cluster_arrive();"])
        text.line(f"rm_gather_blocks<{self.split_k}, {self.line}, {s.threads}>({self.i.totals}, tid, low, high);")
