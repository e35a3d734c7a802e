"""The ``gemm`` family: implicit matrix products in fp32 FFMA, one block (or one cluster of blocks) a task.

A block walks the reduction axes in blocks of ``bk`` products through a ring of ``stages`` shared-memory buffers filled
by cp.async; every thread accumulates ``tm x tn`` results in registers over one of ``slices`` parts of each block. With
``split`` > 1 a task is a thread-block cluster: each block sums its share of the products, then every block adds up its
rows of the tile over all shared memories in rank order, so results repeat bit for bit. The following maps are applied
on the way to memory by the core's emitter, maps before one operand once to each staged element (``contraction.prologue``).
``contraction.tensor`` is the same on tensor cores.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rammer.codegen.contraction import Operand, Product, product_of
from rammer.codegen.dialects import CUDA
from rammer.codegen.task import Argument, Unsuited
from rammer.codegen.text import Text
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.depth import depth_of
from rammer_cuda.contraction.operand import PLAIN, Staged
from rammer_cuda.contraction.preamble import PREAMBLE
from rammer_cuda.contraction.prologue import prologue_of
from rammer_cuda.kernels.epilogue import Epilogue
from rammer_cuda.kernels.task import TaskKernel, origins, parameter

#: Largest cluster every GPU with clusters can schedule (CUDA C++ programming guide, "Thread Block Clusters").
MOST_SPLIT = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """Tile sizes of one block: rows, columns, products, register tile, buffers, splits and slices.

    With ``tensor`` a warp accumulates ``tm x tn`` fragments of 16 x 8 on the tensor cores.
    """

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    stages: int
    split: int
    slices: int
    tensor: bool = False

    @property
    def group(self) -> int:
        """Threads that accumulate one slice."""
        if self.tensor:
            return self.bm // (16 * self.tm) * (self.bn // (8 * self.tn)) * 32
        return self.bm // self.tm * (self.bn // self.tn)

    @property
    def works(self) -> int:
        """Threads that accumulate."""
        return self.group * self.slices

    @property
    def threads(self) -> int:
        """Threads of the block: whole warps."""
        return -(-self.works // 32) * 32


def shape_of(rows: int, width: int, config: dict[str, int], tensor: bool = False) -> Shape:
    """The block of a task of ``rows x width`` under an operator's config."""
    tm, tn = config.get("tm", 4), config.get("tn", 4)
    if tensor:
        return Shape(-(-rows // (16 * tm)) * 16 * tm, -(-width // (8 * tn)) * 8 * tn, config.get("bk", 16), tm, tn,
                     config.get("stages", 3), config.get("split", 1), config.get("slices", 1), True)  # fmt: skip
    # Rows in pairs of register tiles, since neighbouring threads take neighbouring ones.
    return Shape(-(-rows // (2 * tm)) * 2 * tm, -(-width // tn) * tn, config.get("bk", 16), tm, tn,
                 config.get("stages", 3), config.get("split", 1), config.get("slices", 1))  # fmt: skip


def gemm(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction. Unsuited where it is none, or its block is no possible one."""
    product = product_of(operator, binding, prologue=True)
    return Gemm(product, binding, shape_of(product.row_count, product.width, dict(operator.config))).kernel()


class Gemm:
    """Writes the kernel of one product; families on tensor cores override how blocks are staged and multiplied."""

    #: Device functions, how operands are staged, the products that one instruction sums, rows of the epilogue in flight.
    preamble, staging, least, unroll = PREAMBLE, PLAIN, 1, 4

    def __init__(self, product: Product, binding: Binding, shape: Shape) -> None:
        self.p, self.binding, self.s = product, binding, shape
        self.depth = depth_of(product.main.reduce, shape.bk)
        if not 32 <= shape.threads <= 1024 or shape.bk % (shape.slices * self.least):
            raise Unsuited(f"{shape.threads} threads, {shape.slices} slices of {shape.bk}")
        self.split = min(shape.split, self.depth.blocks, MOST_SPLIT)
        self.text = Text()
        self.a = self.stage("a", product.a, product.rows, shape.bm)
        self.b = self.stage("b", product.b, product.columns, shape.bn)
        self.prologue = prologue_of("a", product.a, binding) or prologue_of("b", product.b, binding)
        self.line = self.line_of(shape.bn)
        self.dynamic = max(self.ring_bytes(), 4 * shape.bm * self.line * shape.slices)
        self.arguments = self._arguments()

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Staged:
        """How one operand gets into shared memory."""
        return Staged(name, self.p, operand, axes, unit, self.depth, self.s.threads, self.staging)

    def ring_bytes(self) -> int:
        """Bytes of the ring of staged blocks."""
        return self.a.staging.item * self.s.stages * (self.a.size + self.b.size)

    def line_of(self, width: int) -> int:
        """Elements from one row of the finished tile in shared memory to the next."""
        return width

    def _arguments(self) -> list[Argument]:
        """Operands, then what the maps around the contraction read, then outputs."""
        p = self.p
        inside = {p.main.name, *(c.name for c in p.after)}
        read = dict.fromkeys(self.prologue.prologue.constants if self.prologue else ())
        read |= dict.fromkeys(t for c in p.after for t in c.reads if t not in inside)
        return [
            Argument(p.a.tensor, False, self.a.packing), Argument(p.b.tensor, False, self.b.packing),
            *(Argument(t, False) for t in read), *(Argument(t, True) for t in p.operator.outputs),
        ]  # fmt: skip

    def kernel(self) -> TaskKernel:
        """The finished kernel."""
        s = self.s
        self.tables = -(-self.dynamic // 16) * 16
        self.dynamic = self.tables + self.prologue.bytes if self.prologue else self.dynamic
        self._origins()
        self._pointers()
        self._setup()
        self._fetch()
        self._sum()
        tables = Epilogue(self.p, s, self.binding, self.arguments, self.text, self.split, self.line, self.unroll).write()
        types = self.binding.types
        names = ", ".join(parameter(CUDA.types[types[a.tensor].dtype], a, k, self.binding) for k, a in enumerate(self.arguments))
        cluster = f"__cluster_dims__({self.split}, 1, 1) " if self.split > 1 else ""
        head = f'extern "C" __global__ void {cluster}__launch_bounds__({s.threads}) @NAME@({names}, const int *order, int first)'
        text = f"{head} {{\n{self.text}}}\n"
        name = "g_" + hashlib.sha256((tables + self.preamble + text).encode()).hexdigest()[:20]
        return TaskKernel(name, self.preamble + tables + text.replace("@NAME@", name), tuple(self.arguments), s.threads,
                          self.dynamic, self.dynamic, self.split)  # fmt: skip

    def _origins(self) -> None:
        text, operator = self.text, self.p.operator
        slot = f"(int)blockIdx.x / {self.split}" if self.split > 1 else "(int)blockIdx.x"
        text.line("const int tid = (int)threadIdx.x;")
        text.line(f"const int slot = {slot};")
        text.line("const int task = order ? order[slot] : first + slot;")
        text.all(origins(operator))

    def _pointers(self) -> None:
        s, text = self.s, self.text
        text.line("extern __shared__ __align__(16) float shared[];")
        kind = self.a.staging.ctype
        text.line(f"const {kind} *const ag = p0; const {kind} *const bg = p1;")
        self._places()
        text.line(f"{kind} *const ashared = ({kind} *)shared; {kind} *const bshared = ashared + {s.stages * self.a.size};")

    def _setup(self) -> None:
        self.a.setup(self.text)
        self.b.setup(self.text)
        if self.prologue:
            self.prologue.declare(self.text, self.tables)

    def _tables(self, thread: str, threads: int) -> None:
        """Start copying the constants of the maps before the contraction, if there are any."""
        if self.prologue:
            pointers = {a.tensor: f"p{k}" for k, a in enumerate(self.arguments) if k >= 2}
            self.prologue.copy(self.text, pointers, thread, threads)

    def _fetch(self) -> None:
        """One function an operand: the copies of one block of products into one buffer of the ring; and one for the maps
        before the contraction, on what this thread copied."""
        for stage in (self.a, self.b):
            self._block("fetch", stage)
            stage.fetch(self.text)
            self.text.line("};")
            if self.prologue and self.prologue.name == stage.name:
                self._block("change", stage)
                stage.apply(self.text, self.prologue)
                self.text.line("};")

    def _block(self, verb: str, stage: Staged) -> None:
        """The head of a function of block ``kb`` in buffer ``slot``."""
        text, s, d, n = self.text, self.s, self.depth, stage.name
        text.line(f"auto {n}{verb} = [&](int kb, int slot) {{")
        text.line(f"{stage.staging.ctype} *const {n}s = {n}shared + slot * {stage.size};")
        if stage.packing is None and (d.flat or not d.outer):
            text.line(f"const int tap = 0, c0 = kb * {s.bk};")
        elif stage.packing is None:
            text.line(f"const int tap = kb / {d.per_tap}, c0 = (kb - tap * {d.per_tap}) * {s.bk};")

    def _start(self) -> None:
        """Fill the ring. Constants are copied before the wait for the kernels that this one depends on."""
        s, text = self.s, self.text
        early = [x.name for x in (self.a, self.b) if x.packing is not None]
        late = [x.name for x in (self.a, self.b) if x.packing is None]
        head = f"for (int i = 0; i < {s.stages - 1}; ++i)"
        self._tables("tid", s.threads)
        # Deep rings would repeat the text of the copies too often for the instruction cache.
        unroll = "#pragma unroll" if s.stages <= 4 else "#pragma unroll 1"
        text.all([unroll, head, f"  if (begin + i < end) {{ {' '.join(f'{n}fetch(begin + i, i);' for n in early)} }}"])
        text.line("rm_after();")
        text.all([unroll, f"{head} {{"])
        text.line(f"if (begin + i < end) {{ {' '.join(f'{n}fetch(begin + i, i);' for n in late)} }}")
        text.all(["rm_commit();", "}"])
        if self.prologue:
            text.all([f"rm_arrived<{s.stages - 1}>();", "__syncthreads();"])  # the tables, and nothing that was started later

    def _sum(self) -> None:
        """The task's products over this block's share of the reduction, into shared memory."""
        s, text, blocks = self.s, self.text, self.depth.blocks
        if self.split > 1:
            text.line(f"const int rank = (int)blockIdx.x % {self.split};")
            text.line(f"const int begin = {blocks} * rank / {self.split}, end = {blocks} * (rank + 1) / {self.split};")
            rows = self.p.row_count
            text.line(f"const int low = {rows} * rank / {self.split}, high = {rows} * (rank + 1) / {self.split};")
        else:
            text.line(f"const int begin = 0, end = {blocks}, low = 0, high = {self.p.row_count};")
        text.line(f"float acc[{s.tm}][{s.tn}]{'[4]' if s.tensor else ''} = {{}};")
        self._start()
        self._loop()
        leave = [f"if (tid < {s.works}) {{" if s.works < s.threads else "{", *self._leave(), "}"]
        text.all(["rm_arrived<0>();", "__syncthreads();", *leave])
        if self.split > 1 and s.slices > 1:
            self._gather_slices()
        text.line("__syncthreads();" if self.split == 1 else "rm_cluster_arrive();")
        if self.split > 1:
            self._reduce()

    def _loop(self) -> None:
        """The ring: wait for each block, start the copies of a later one, multiply."""
        s, maps = self.s, [f"{self.prologue.name}change(kb, use);"] if self.prologue else []
        self.text.all([
            f"int use = 0, fill = {s.stages - 1};", "#pragma unroll 1", "for (int kb = begin; kb < end; ++kb) {",
            f"rm_arrived<{s.stages - 2}>();", *maps, "__syncthreads();",
            f"if (kb + {s.stages - 1} < end) {{ afetch(kb + {s.stages - 1}, fill); bfetch(kb + {s.stages - 1}, fill); }}",
            "rm_commit();",
            *self._multiply(),
            f"use = use == {s.stages - 1} ? 0 : use + 1;",
            f"fill = fill == {s.stages - 1} ? 0 : fill + 1;",
            "}",
        ])  # fmt: skip

    def _gather_slices(self) -> None:
        """Add up the slices here, so that the others of the cluster read one: their way is far slower than this."""
        s, text = self.s, self.text
        size = s.bm * self.line
        text.all([
            "__syncthreads();",
            "#pragma unroll 1",
            f"for (int e = tid * 4; e < {size}; e += {s.threads * 4}) {{",
            "float4 sum = *(float4 *)(shared + e);",
            "#pragma unroll",
            f"for (int q = 1; q < {s.slices}; ++q) {{",
            f"const float4 v = *(const float4 *)(shared + q * {size} + e);",
            "sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;",
            "}",
            "*(float4 *)(shared + e) = sum;",
            "}",
        ])  # fmt: skip

    def _multiply(self) -> list[str]:
        """Multiply one buffer of the ring into the registers."""
        s, part = self.s, self.s.bk // self.s.slices
        return [
            f"rm_multiply<{s.tm}, {s.tn}, {s.bm}, {s.bn}, {part}, {self.a.pitch}, {self.b.pitch}>(",
            f"  ashared + (use * {s.bk} + slice * {part}) * {self.a.pitch} + ty * 4,",
            f"  bshared + (use * {s.bk} + slice * {part}) * {self.b.pitch} + tx * 4, acc);",
        ]

    def _leave(self) -> list[str]:
        """Leave the registers in shared memory, row by row."""
        s = self.s
        return [
            "#pragma unroll", f"for (int i = 0; i < {s.tm}; ++i)", "#pragma unroll", f"for (int j = 0; j < {s.tn}; j += 4)",
            f"  *(float4 *)(shared + (slice * {s.bm} + ty * 4 + i % 4 + i / 4 * {s.bm // (s.tm // 4)}) * {s.bn} + tx * 4"
            f" + j / 4 * {s.bn // (s.tn // 4)}) = *(float4 *)(acc[i] + j);",
        ]  # fmt: skip

    def _places(self) -> None:
        """This thread's part of the tile: its slice and its place there."""
        s, text = self.s, self.text
        # Two neighbouring lanes share their columns and every other lane its rows: shared-memory reads of 16 bytes then
        # merge across half a warp.
        across = s.bn // s.tn
        text.line(f"const int worker = min(tid, {s.works - 1}), slice = worker / {s.group}, place = worker % {s.group};")
        text.line(f"const int tx = (place >> 1) % {across}, ty = (place & 1) + (place >> 1) / {across} * 2;")

    def _reduce(self) -> None:
        """Add up this block's rows of the tile over all shared memories of the cluster, into its own."""
        s, text = self.s, self.text
        text.all([
            "rm_cluster_wait();",
            f"for (int e = low * {self.line // 4} + tid; e < high * {self.line // 4}; e += {s.threads}) {{",
            "float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);",
            "#pragma unroll",
            f"for (int r = 0; r < {self.split}; ++r) {{",
            "const float4 v = rm_peer(shared + e * 4, r);",
            "sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w;",
            "}",
            "*(float4 *)(shared + e * 4) = sum;",  # nobody else reads these rows here
            "}",
            "rm_cluster_arrive();",
            "__syncthreads();",
        ])  # fmt: skip
