"""Implicit matrix products: one writer for every instruction, one block (or one cluster of blocks) a task.

A block walks the reduction axes in blocks of ``bk`` products through a ring of ``stages`` shared-memory buffers filled by
cp.async. Its registers accumulate the products of its instruction (``contraction.instruction``), separately for ``slice_k`` parts
of each block. With ``split_k`` > 1 a task is a thread-block cluster. Each block sums its share of the products. Then it adds up
its rows of the tile over all shared memories in rank order, so results are bitwise reproducible. The following maps are applied
on the way to memory (``kernels.epilogue``), maps before one operand once to each staged element (``contraction.prologue``).

In ``SharedRing`` every thread copies a part of each block, waits for its copies, synchronises at a barrier and multiplies. In
``Producers`` one or two warpgroups copy and prepare, and the others multiply independently. Barriers hand over each buffer, so
one warpgroup multiplies while another converts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rammer.codegen import BYTE, Argument, Product, Text, Unsuited
from rammer.codegen.products import Cores, Depth, Shape, Staged, depth_of, stopped_axes, taps_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.block import THREADS, WarpgroupShape
from rammer_cuda.contraction.halo import ChannelsHalo, InputHalo, channels_halo_of, halo_of
from rammer_cuda.contraction.instruction import RING
from rammer_cuda.contraction.prologue import prologue_of
from rammer_cuda.contraction.warpgroup import WARPGROUPS, Wgmma
from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.epilogue import Epilogue
from rammer_cuda.kernels.lengths import length_names, with_lengths
from rammer_cuda.kernels.quads import Quads
from rammer_cuda.kernels.task import TaskKernel, declare_parameter, origin_lines


class SharedRing:
    """A pipeline in which every thread copies and multiplies. ``halo`` stages a convolution's input once for all taps: the blocks
    of products then have the taps innermost, and the ring holds the other operand only."""

    def __init__(self, kernel: Contraction) -> None:
        self.k, self.s, self.text, self.a, self.b = kernel, kernel.s, kernel.text, kernel.a, kernel.b
        s, item = self.s, self.a.staging.item
        self.device = kernel.i.device
        self.halo = channels_halo_of(self.a, kernel.binding) if s.halo else None
        self.readable = s.stages * self.a.size
        if self.halo is not None:
            self.readable = kernel.depth.halos * self.halo.size
            if (
                self.halo.taps < s.stages - 1
                or self.b.packing is None
                or self.b.common is not None
                or kernel.i.dtype != "float16"
            ):
                raise Unsuited(f"{self.halo.taps} taps for {s.stages} buffers, or weights that are not packed")
        self.dynamic = max(item * (self.readable + s.stages * self.b.size), 4 * s.bm * kernel.line * s.slice_k)

    def declare(self) -> None:
        """Write shared memory, this thread's position in the tile, and the copy functions."""
        text, kind, k = self.text, self.a.staging.ctype, self.k
        text.all(k.pointers())
        text.all(k.i.places(self.s, self.a, self.b))
        text.line(f"{kind} *const ashared = ({kind} *)shared; {kind} *const bshared = ashared + {self.readable};")
        (self.halo or self.a).setup(text)
        self.b.setup(text)
        if k.prologue:
            k.prologue.declare(text, k.tables)
        if self.halo is None:
            k.fetches()
        else:
            self._declare_halo(self.halo)

    def _declare_halo(self, halo: ChannelsHalo) -> None:
        """Write the copy functions, and the rows of the halo that this lane names to ldmatrix."""
        s, k, text, kind = self.s, self.k, self.text, self.a.staging.ctype
        k.functions(halo, "block", [f"{kind} *const as = ashared + slot * {halo.size};", f"const int c0 = block * {s.bk};"])
        kb = f"const int kb = step % {halo.taps} * {k.depth.per_tap} + step / {halo.taps};"
        k.functions(self.b, "step", [f"{kind} *const bs = bshared + slot * {self.b.size};", kb])
        text.line(f"int ahalo[{s.tm}];")
        for i in range(s.tm):
            with text.block(""):
                text.line(f"const int row = min(ty + {16 * i} + l8 + lb, {k.p.row_count - 1});")
                text.line(f"ahalo[{i}] = ({halo.place('row')}) * {halo.pitch} + slice * {s.bk // s.slice_k} + lc;")

    def start(self) -> None:
        """Write the fill of the ring. Constants are copied before the wait for earlier kernels."""
        s, text, k = self.s, self.text, self.k
        early = [x.name for x in (self.a, self.b) if x.packing is not None]
        late = [x.name for x in (self.a, self.b) if x.packing is None]
        head = f"for (int i = 0; i < {s.stages - 1}; ++i)"
        text.line("// Fill the ring: constants, then what kernels before this one write.")
        k.copy_tables("tid", s.threads)
        # Unrolled copies of deep rings would exceed the instruction cache.
        unroll = "#pragma unroll" if s.stages <= 4 else "#pragma unroll 1"
        text.all([unroll, head, f"  if (begin + i < end) {{ {' '.join(f'{n}fetch(begin + i, i);' for n in early)} }}"])
        text.line("rm_after();")
        if self.halo is not None:
            text.line(f"if (begin < end) afetch(begin / {self.halo.taps}, 0);")
            text.all(["rm_commit();"] * (s.stages - 1))
            return
        text.line(unroll)
        with text.block(head):
            text.line(f"if (begin + i < end) {{ {' '.join(f'{n}fetch(begin + i, i);' for n in late)} }}")
            text.line("rm_commit();")
        if k.prologue:
            text.all([f"rm_arrived<{s.stages - 1}>();", "__syncthreads();"])  # waits for the tables only, not for later copies

    def loop(self) -> None:
        """Write the loop: wait for each block, start the copies of a later one, multiply."""
        s, text, k = self.s, self.text, self.k
        text.line("// Multiply a block, copy a later one.")
        text.all([f"int use = 0, fill = {s.stages - 1};{' int tap = 0, turn = 0;' if self.halo else ''}", "#pragma unroll 1"])
        with text.block("for (int kb = begin; kb < end; ++kb)"):
            if self.halo is not None:
                self._multiply_tap(self.halo)
                return
            text.line(f"rm_arrived<{s.stages - 2}>();")
            text.all([f"{k.prologue.name}prologue(kb, use);"] if k.prologue else [])
            text.line("__syncthreads();")
            ahead = f"kb + {s.stages - 1}"
            text.line(f"if ({ahead} < end) {{ afetch({ahead}, fill); bfetch({ahead}, fill); }}")
            text.line("rm_commit();")
            text.all(k.i.multiply(s, self.a, self.b))
            text.all(f"{n} = {n} == {s.stages - 1} ? 0 : {n} + 1;" for n in ("use", "fill"))

    def _multiply_tap(self, halo: ChannelsHalo) -> None:
        """Write one step: the copies of later weights and, with the first tap, of the next channels, then a tap's products."""
        s, text, ahead = self.s, self.text, f"kb + {self.s.stages - 1}"
        text.all([f"rm_arrived<{s.stages - 2}>();", "__syncthreads();"])
        text.line(f"if ({ahead} < end) bfetch({ahead}, fill);")
        text.line(f"if (tap == 0 && kb + {halo.taps} < end) afetch(kb / {halo.taps} + 1, turn ^ 1);")
        text.line("rm_commit();")
        place = f"ashared + turn * {halo.size} + ({halo.tap('tap')}) * {halo.pitch}"
        text.all(self.k.i.multiply_rows(s, place, self.b))
        text.all(f"{n} = {n} == {s.stages - 1} ? 0 : {n} + 1;" for n in ("use", "fill"))
        text.line(f"if (++tap == {halo.taps}) {{ tap = 0; turn ^= 1; }}")


class Producers:
    """A pipeline of warpgroups that copy, and others that multiply. The multiplying warpgroups divide the operand ``read``;
    ``matrix`` is the other operand. ``halo`` stages a convolution's input once for all taps."""

    s: WarpgroupShape
    i: Wgmma

    def __init__(self, kernel: Contraction) -> None:
        assert isinstance(kernel.s, WarpgroupShape) and isinstance(kernel.i, Wgmma)
        self.k, self.s, self.i, self.text, self.depth = kernel, kernel.s, kernel.i, kernel.text, kernel.depth
        s = self.s
        self.read, self.matrix = (kernel.a, kernel.b) if s.down else (kernel.b, kernel.a)
        self.device = self.i.products(s.fixed, self.turned, self.signed)
        self.halo: InputHalo | None = None
        if s.halo:
            self.halo = halo_of(self.read, kernel.binding)
            self.halo.unroll = self.i.channels
            if self.halo.taps < s.ahead * s.producers:
                # A copying warpgroup would wait for the release of a halo whose last products it has yet to complete.
                raise Unsuited(f"{self.halo.taps} taps for {s.stages} buffers")
        self.whole = s.bk * self.matrix.pitch
        self.readable = kernel.depth.halos * s.bk * self.halo.pitch if self.halo else s.stages * s.bk * self.read.pitch
        elements = self.readable + self.i.parts * s.stages * self.whole
        #: Operands of float16 that one thread copies a block at a time.
        self.bulk = [x for x in (self.matrix, self.read) if self.direct and x.packing is not None and not x.common]
        self.device += device_source("bulk_copy") if self.bulk else ""
        self.barriers = max(self.read.staging.item * elements, 4 * s.bm * kernel.line)
        self.dynamic = self.barriers + 16 * (s.stages + 2)

    @property
    def direct(self) -> bool:
        """Return True if copies signal their barrier themselves, since nothing prepares the copied data."""
        return self.i.dtype == "float16"

    @property
    def turned(self) -> tuple[bool, bool]:
        """Return True, for each operand, if rows (columns) are contiguous in a core matrix, not products."""
        read, matrix = (isinstance(x.arrangement, Cores) and x.arrangement.across for x in (self.read, self.matrix))
        return read, matrix

    @property
    def signed(self) -> tuple[bool, bool]:
        """Return True, for each operand, if its bytes are signed."""
        return self.read.operand.signed, self.matrix.operand.signed

    def declare(self) -> None:
        """Write shared memory and the barriers: full and empty for every buffer, and for the halos."""
        text, r, m, s, kind = self.text, self.read.name, self.matrix.name, self.s, self.read.staging.ctype
        text.all(self.k.pointers())
        text.line(f"{kind} *const {r}shared = ({kind} *)shared; {kind} *const {m}shared = {r}shared + {self.readable};")
        text.line(f"const unsigned full = (unsigned)__cvta_generic_to_shared(shared) + {self.barriers};")
        text.line(f"const unsigned empty = full + {8 * s.stages};")
        text.line(f"const unsigned halo_full = empty + {8 * s.stages}, halo_empty = halo_full + 16;")
        with text.block("if (tid == 0)"):
            for count, full, empty in ((s.stages, "full", "empty"), (2, "halo_full", "halo_empty")):
                with text.block(f"for (int i = 0; i < {count}; ++i)"):
                    arrivals = f"{THREADS + len(self.bulk)}); rm_barrier_init({empty} + 8 * i, {s.works // 32}"
                    text.line(f"rm_barrier_init({full} + 8 * i, {arrivals});")
            text.line("rm_barriers_made();")
        text.line("__syncthreads();")
        if self.k.prologue:
            self.k.prologue.declare(text, self.k.tables)

    def start(self) -> None:
        """Write the copying warpgroups: copies, their preparation, and the signal that a block is complete."""
        s, text, m, k = self.s, self.text, self.matrix, self.k
        n, between = s.producers, s.producers * s.ahead
        text.line("// Producers: copy blocks, prepare them, say that they are full.")
        with text.block(f"if (tid >= {s.works})"):
            text.line(f"const int producer = tid / {THREADS} - {s.works // THREADS}, thread = tid;")
            with text.block(""):
                text.line(f"const int tid = thread % {THREADS};")
                k.copy_tables(f"thread - {s.works}", THREADS * n)
                m.setup(text)
                (self.halo or self.read).setup(text)
                self._write_operand_copies()
                if self.direct:
                    self._copy_ahead()
                    return
                if m.packing is None:  # bytes: earlier kernels write both operands
                    text.line("rm_after();")
                text.all(["#pragma unroll", f"for (int i = producer; i <= producer + {between}; i += {n})"])
                text.line(f"  if (begin + i < end) {m.name}fetch(begin + i, i);")
                if k.prologue:  # copies of the constant are not a group yet
                    text.all(["rm_arrived<0>();", f"rm_producers_meet<{THREADS * n}>();"])
                if m.packing is not None:
                    text.line("rm_after();")
                text.line("#pragma unroll 1")
                with text.block(f"for (int i = producer; begin + i < end + {between}; i += {n})"):
                    self._copy(between)
                    text.line("rm_commit();")
                    with text.block(f"if (i >= {between})"):
                        self._complete_copy(between)
            text.line("rm_after();")

    def _copy_ahead(self) -> None:
        """Write the copies of this warpgroup's blocks into empty buffers: constants, then what kernels before this one write."""
        s, text, n = self.s, self.text, self.s.producers
        early, late = ([x for x in (self.matrix, self.read) if (x in self.bulk) is first] for first in (True, False))
        constants = "".join(f" {x.name}fetch(begin + i, i);" for x in early)
        if early:
            text.line("#pragma unroll 1")
            text.line(f"for (int i = producer; i < {s.stages} && begin + i < end; i += {n}) {{{constants} }}")
        text.all(["rm_after();", "#pragma unroll 1"])
        with text.block(f"for (int i = producer; begin + i < end; i += {n})"):
            text.line(f"const int kb = begin + i, slot = i % {s.stages};")
            with text.block(f"if (i >= {s.stages})"):
                text.line(f"rm_barrier_wait(empty + 8 * slot, (i / {s.stages} - 1) & 1);")
                text.all(f"{x.name}fetch(kb, slot);" for x in early)
            text.all(f"{x.name}fetch(kb, slot);" for x in late)
            text.line("rm_copies_arrive(full + 8 * slot);")

    def _copy(self, between: int) -> None:
        """Write the copy of block ``i`` of this warpgroup once its buffer is empty."""
        s, text, halo = self.s, self.text, self.halo
        text.line("const int kb = begin + i;")
        with text.block("if (kb < end)"):
            text.line(f"const int slot = i % {s.stages};")
            text.line(f"if (i >= {s.stages}) rm_barrier_wait(empty + 8 * slot, (i / {s.stages} - 1) & 1);")
            text.line(f"if (i > producer + {between}) {self.matrix.name}fetch(kb, slot);")
            if halo is None:
                text.line(f"{self.read.name}fetch(kb, slot);")
                return
            with text.block(f"if (i == 0 || kb % {halo.taps} == 0)"):
                text.line(f"const int turn = kb / {halo.taps} - begin / {halo.taps};")
                text.line("if (turn >= 2) rm_barrier_wait(halo_empty + turn % 2 * 8, (turn / 2 - 1) & 1);")
                text.line(f"{self.read.name}fetch(kb / {halo.taps}, turn % 2);")

    def _complete_copy(self, between: int) -> None:
        """Write the wait for the copies of the block ``between`` earlier, their preparation, and the signal."""
        s, text, halo, n = self.s, self.text, self.halo, self.read.name
        text.line(f"const int done = i - {between};")
        text.line(f"rm_arrived<{s.ahead}>();")
        if self.k.prologue and halo is None:
            text.line(f"{n}prologue(begin + done, done % {s.stages});")
        if self.i.parts > 1:
            self._split_constant(f"done % {s.stages}")
        text.line("rm_copies_to_async();")
        if halo is not None:
            with text.block(f"if (done == 0 || (begin + done) % {halo.taps} == 0)"):
                text.line(f"const int block = (begin + done) / {halo.taps};")
                text.line(f"const int turn = (block - begin / {halo.taps}) % 2;")
                text.all([f"{n}prologue(block, turn);"] if self.k.prologue else [])
                text.line("rm_barrier_arrive(halo_full + turn * 8);")
        text.line(f"rm_barrier_arrive(full + done % {s.stages} * 8);")

    def _split_constant(self, slot: str) -> None:
        """Write the halving of this thread's copies of the constant in buffer ``slot``."""
        with self.text.block(""):
            place = f"{self.matrix.name}shared + ({slot}) * {self.whole} + tid * 4"
            self.text.line(f"float *const from = {place}, *const to = from + {self.s.stages * self.whole};")
            for at in range(0, self.whole, 4 * THREADS):
                guard = f"if (tid * 4 + {at} < {self.whole}) " if at + 4 * THREADS > self.whole else ""
                self.text.line(f"{guard}rm_halve(from + {at}, to + {at});")

    def _write_operand_copies(self) -> None:
        """Write the copies of both operands, and the maps before the contraction on the copied data."""
        m, halo, k = self.matrix, self.halo, self.k
        if halo is None:
            k.fetches(self.bulk)
            return
        size, n = self.s.bk * halo.pitch, self.read.name
        head = [f"float *const {n}s = {n}shared + slot * {size};", f"const int c0 = block * {self.s.bk};"]
        k.functions(halo, "block", head)
        head = [
            f"float *const {m.name}s = {m.name}shared + slot * {self.whole};",
            f"const int kb = step % {halo.taps} * {k.depth.per_tap} + step / {halo.taps};",
        ]
        k.functions(m, "step", head)

    def loop(self) -> None:
        """Write the multiplying warpgroups."""
        with self.text.block("else"):
            self.text.all(["// Consumers: wait for full blocks, multiply, say that they are empty.", "rm_after();"])
            self.i.loop(self)

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """Write the loop over blocks of products."""
        self.text.line("#pragma unroll 1")
        with self.text.block("for (int kb = begin; kb < end; ++kb)"):
            self.text.line(f"const int i = kb - begin, slot = i % {self.s.stages};")
            yield

    def complete(self) -> list[str]:
        """Return the wait until a block is in shared memory."""
        return [f"rm_barrier_wait(full + 8 * slot, i / {self.s.stages} & 1);", *["rm_copies_to_async();"] * self.direct]

    def release(self) -> str:
        """Return the release of the previous block's buffer, whose products are complete."""
        return f"if (i > 0 && tid % 32 == 0) rm_barrier_arrive(empty + 8 * ((i - 1) % {self.s.stages}));"


#: Largest cluster every GPU with clusters can schedule (CUDA C++ programming guide, "Thread Block Clusters").
MOST_SPLIT_K = 8
#: Every instruction, by family.
INSTRUCTIONS = {**RING, **WARPGROUPS}


def contraction_kernel(operator: ROperator, binding: Binding) -> TaskKernel:
    """Return the kernel of a tiled contraction with its family's instruction. Raise Unsuited for another form, unsupported
    operands or an impossible block."""
    instruction = INSTRUCTIONS[operator.family]
    product = instruction.product(operator, binding)
    return Contraction(product, binding, instruction, instruction.block(product)).kernel()


class Contraction:
    """A writer of the kernel of one product with one instruction."""

    def __init__(self, product: Product, binding: Binding, instruction: Any, shape: Shape) -> None:
        self.p, self.binding, self.i, self.s, self.text = product, binding, instruction, shape, Text()
        instruction.check(shape)
        self.depth = self._make_depth()
        self.split_k = min(shape.split_k, self.depth.blocks, MOST_SPLIT_K)
        wide = isinstance(shape, WarpgroupShape)
        threads, staged = THREADS if wide else shape.threads, instruction.staged
        first, second = staged[::-1] if isinstance(shape, WarpgroupShape) and not shape.down else staged
        if product.a.fill and product.b.fill:
            raise Unsuited("padding of both operands with a value other than 0")
        self.a = Staged("a", product, product.a, product.rows, shape.bm, self.depth, threads, first, CUDA)
        self.b = Staged("b", product, product.b, product.columns, shape.bn, self.depth, threads, second, CUDA)
        self.prologue = prologue_of("a", product.a, binding) or prologue_of("b", product.b, binding)
        self.line = instruction.line(shape.bn)
        self.pipeline = Producers(self) if wide else SharedRing(self)
        #: The offset of the prologue's tables in shared memory, and its total bytes.
        self.tables = -(-self.pipeline.dynamic // 16) * 16
        self.dynamic = self.tables + self.prologue.bytes if self.prologue else self.pipeline.dynamic
        self.arguments = self._kernel_arguments()

    def _make_depth(self) -> Depth:
        """Return the walk over the products, up to the run's length if only zeros are staged after it."""
        p, depth = self.p, depth_of(self.p.main.reduce, self.s.bk)
        if p.a.fill or p.b.fill or self.s.halo:
            return depth
        ends = replace(depth, stopped=stopped_axes(p.operator, p.main, p.main.reduce, length_names(p.operator), CUDA))
        if ends.flat and ends.stopped and not ends.stops:  # tap order can end its inner axis, at any padding
            ends = replace(taps_of(p.main.reduce, self.s.bk), stopped=ends.stopped)
        return ends

    def _kernel_arguments(self) -> list[Argument]:
        """Return the operands, then the tensors that the maps around the contraction read, then outputs."""
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
        """Return the finished kernel."""
        s, types = self.s, self.binding.types
        self._write_origins()
        self.pipeline.declare()
        self._sum()
        bytes_ = self.i.dtype == BYTE
        end = self._make_epilogue()
        copies = [
            "copies",
            *["copies_i8"] * bytes_,
            *["copies_f16", "halves"] * (self.i.dtype == "float16"),
            *["cluster", *["cluster_i32"] * bytes_] * (self.split_k > 1),
        ]
        before = device_source(*copies), self.pipeline.device, end.write()
        kinds = [CUDA.types[types[a.tensor].dtype] for a in self.arguments]
        parameters = tuple(
            declare_parameter(t, a, k, self.binding) for k, (t, a) in enumerate(zip(kinds, self.arguments, strict=True))
        )
        shape = s.threads, self.dynamic, self.dynamic, self.split_k
        made = TaskKernel("", "".join(before), parameters, str(self.text), tuple(self.arguments), *shape)
        return (with_lengths(self.p.operator, made) if self.depth.stops else made).named("g_")

    def _make_epilogue(self) -> Epilogue:
        """Return the writer of the maps after the sums and of the stores."""
        i, known = self.i, (self.p, self.s, self.binding, self.arguments, self.text, self.split_k, self.line)
        if i.dtype != "float32":
            quads = Quads(*known, i.unroll, i.number, i.totals)
            if quads.possible:
                return quads
        return Epilogue(*known, i.unroll, i.number, i.totals)

    def _write_origins(self) -> None:
        text = self.text
        text.line("// The task, and where its tile begins.")
        text.line("const int tid = (int)threadIdx.x;")
        text.line(f"const int slot = (int)blockIdx.x{f' / {self.split_k}' if self.split_k > 1 else ''};")
        text.line("const int task = order ? order[slot] : first + slot;")
        text.all(origin_lines(self.p.operator))
        text.all(self.depth.definitions())

    def pointers(self) -> list[str]:
        """Return the pointers to shared memory and both operands."""
        kind, memory = self.a.staging.ctype, "extern __shared__ __align__(16) float shared[];"
        if self.i.dtype == BYTE:  # bytes of either sign
            a, b = (f"const {kind} *const {n}g = (const {kind} *)p{k};" for k, n in enumerate("ab"))
            return [memory, "int *const totals = (int *)shared;", a, b]
        return [memory, f"const {kind} *const ag = p0; const {kind} *const bg = p1;"]

    def copy_tables(self, thread: str, threads: int) -> None:
        """Write the start of the copies of the prologue's constants, if it has any."""
        if self.prologue:
            pointers = {a.tensor: f"p{k}" for k, a in enumerate(self.arguments) if k >= 2}
            self.prologue.copy(self.text, pointers, thread, threads)

    def fetches(self, bulk: Sequence[Staged] = ()) -> None:
        """Write the functions of both operands, for block ``kb`` of products; one thread copies those in ``bulk``."""
        for stage in (self.a, self.b):
            n = stage.name
            buffer = f"{stage.staging.ctype} *const {n}s = {n}shared + slot * {stage.size};"
            if stage not in bulk:
                self.functions(stage, "kb", [buffer, *stage.block_start()])
                continue
            with self.text.block(f"auto {n}fetch = [&](int kb, int slot)", "};"):
                to, bytes_ = (
                    f"(unsigned)__cvta_generic_to_shared({n}shared + slot * {stage.size})",
                    stage.size * stage.staging.item,
                )
                self.text.line(
                    f"const float *const from = (const float *)({n}p + (size_t){self.depth.stored('kb')} * {stage.size});"
                )
                self.text.line(f"if (tid == 0) rm_bulk({to}, from, {bytes_}, full + 8 * slot);")

    def functions(self, stage: Staged | InputHalo, number: str, head: list[str]) -> None:
        """Write a function that copies block ``number`` into buffer ``slot``. For the operand with maps before the contraction,
        also write one that applies them to this thread's copies."""
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
        """Write the sum of the task's products over this block's share of the reduction, into shared memory."""
        s, text, blocks, rows = self.s, self.text, self.depth.end, self.p.row_count
        if self.split_k > 1:
            text.line(f"const int rank = (int)blockIdx.x % {self.split_k};")
            first, last = (f"{blocks} * {r} / {self.split_k}" for r in ("rank", "(rank + 1)"))
            if s.halo and isinstance(self.pipeline, SharedRing):  # whole blocks of channels
                taps = self.depth.blocks // self.depth.per_tap
                first, last = (f"{self.depth.per_tap} * {r} / {self.split_k} * {taps}" for r in ("rank", "(rank + 1)"))
            text.line(f"const int begin = {first}, end = {last};")
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
        if s.slice_k > 1:  # so that the other blocks read one slice: their path is far slower than this block's
            text.all(["// Slices of the same sums.", "__syncthreads();"])
            text.line(f"rm_gather_slices<{s.slice_k}, {s.bm * self.line}, {s.threads}>({self.i.totals}, tid);")
        text.all(["// Rows of this block, from the shared memories of all of the cluster.", "rm_cluster_arrive();"])
        text.line(f"rm_gather_blocks<{self.split_k}, {self.line}, {s.threads}>({self.i.totals}, tid, low, high);")
