"""How blocks of products get to the threads that multiply: a ring that all threads fill, or producers and consumers.

Either is a ring of ``stages`` buffers in shared memory. In ``SharedRing`` every thread copies a part of each block, waits for
its own copies, meets the others at a barrier and multiplies. In ``Producers`` one or two warpgroups do nothing but copy and
prepare, the others nothing but multiply, each at its own pace: a buffer is handed over by barriers of its own, so while one
warpgroup converts, another one's products run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rammer.codegen.task import Unsuited

from rammer_cuda.contraction.block import THREADS, WarpgroupShape
from rammer_cuda.contraction.halo import InputHalo, halo_of
from rammer_cuda.contraction.packing import Cores
from rammer_cuda.contraction.warpgroup import Wgmma

if TYPE_CHECKING:
    from rammer_cuda.contraction.kernel import Contraction


class SharedRing:
    """Every thread copies, and multiplies."""

    def __init__(self, kernel: Contraction) -> None:
        self.k, self.s, self.text, self.a, self.b = kernel, kernel.s, kernel.text, kernel.a, kernel.b
        s, item = self.s, self.a.staging.item
        self.device = kernel.i.device
        self.dynamic = max(item * s.stages * (self.a.size + self.b.size), 4 * s.bm * kernel.line * s.slice_k)

    def declare(self) -> None:
        """Shared memory, this thread's place in the tile, and how it copies."""
        text, kind, k = self.text, self.a.staging.ctype, self.k
        text.all(k.pointers())
        text.all(k.i.places(self.s, self.a, self.b))
        text.line(f"{kind} *const ashared = ({kind} *)shared; {kind} *const bshared = ashared + {self.s.stages * self.a.size};")
        self.a.setup(text)
        self.b.setup(text)
        if k.prologue:
            k.prologue.declare(text, k.tables)
        k.fetches()

    def start(self) -> None:
        """Fill the ring. Constants are copied before the wait for the kernels that this one depends on."""
        s, text, k = self.s, self.text, self.k
        early = [x.name for x in (self.a, self.b) if x.packing is not None]
        late = [x.name for x in (self.a, self.b) if x.packing is None]
        head = f"for (int i = 0; i < {s.stages - 1}; ++i)"
        text.line("// Fill the ring: constants, then what kernels before this one write.")
        k.copy_tables("tid", s.threads)
        # Deep rings would repeat the text of the copies too often for the instruction cache.
        unroll = "#pragma unroll" if s.stages <= 4 else "#pragma unroll 1"
        text.all([unroll, head, f"  if (begin + i < end) {{ {' '.join(f'{n}fetch(begin + i, i);' for n in early)} }}"])
        text.line("rm_after();")
        text.line(unroll)
        with text.block(head):
            text.line(f"if (begin + i < end) {{ {' '.join(f'{n}fetch(begin + i, i);' for n in late)} }}")
            text.line("rm_commit();")
        if k.prologue:
            text.all([f"rm_arrived<{s.stages - 1}>();", "__syncthreads();"])  # the tables, and nothing that was started later

    def loop(self) -> None:
        """Wait for each block, start the copies of a later one, multiply."""
        s, text, k = self.s, self.text, self.k
        text.line("// Multiply a block, copy a later one.")
        text.all([f"int use = 0, fill = {s.stages - 1};", "#pragma unroll 1"])
        with text.block("for (int kb = begin; kb < end; ++kb)"):
            text.line(f"rm_arrived<{s.stages - 2}>();")
            text.all([f"{k.prologue.name}prologue(kb, use);"] if k.prologue else [])
            text.line("__syncthreads();")
            ahead = f"kb + {s.stages - 1}"
            text.line(f"if ({ahead} < end) {{ afetch({ahead}, fill); bfetch({ahead}, fill); }}")
            text.line("rm_commit();")
            text.all(k.i.multiply(s, self.a, self.b))
            text.all(f"{n} = {n} == {s.stages - 1} ? 0 : {n} + 1;" for n in ("use", "fill"))


class Producers:
    """Warpgroups that copy, and others that multiply. ``read`` is the operand that these divide, ``matrix`` the other one;
    ``halo`` stages a convolution's input once for all taps."""

    s: WarpgroupShape
    i: Wgmma

    def __init__(self, kernel: Contraction) -> None:
        assert isinstance(kernel.s, WarpgroupShape) and isinstance(kernel.i, Wgmma)
        self.k, self.s, self.i, self.text = kernel, kernel.s, kernel.i, kernel.text
        s = self.s
        self.read, self.matrix = (kernel.a, kernel.b) if s.down else (kernel.b, kernel.a)
        self.device = self.i.products(s.fixed, self.turned, self.signed)
        self.halo: InputHalo | None = None
        if s.halo:
            self.halo = halo_of(self.read, kernel.binding)
            self.halo.unroll = self.i.channels
            if self.halo.taps < s.ahead * s.producers:
                # A copying warpgroup would wait for a halo to be left whose last products it still has to complete.
                raise Unsuited(f"{self.halo.taps} taps for {s.stages} buffers")
        self.whole = s.bk * self.matrix.pitch
        self.readable = kernel.depth.halos * s.bk * self.halo.pitch if self.halo else s.stages * s.bk * self.read.pitch
        elements = self.readable + self.i.parts * s.stages * self.whole
        self.barriers = max(self.read.staging.item * elements, 4 * s.bm * kernel.line)
        self.dynamic = self.barriers + 16 * (s.stages + 2)

    @property
    def turned(self) -> tuple[bool, bool]:
        """Whether rows (columns), not products, are contiguous in a core matrix."""
        read, matrix = (isinstance(x.arrangement, Cores) and x.arrangement.across for x in (self.read, self.matrix))
        return read, matrix

    @property
    def signed(self) -> tuple[bool, bool]:
        """Whether bytes have signs."""
        return self.read.operand.signed, self.matrix.operand.signed

    def declare(self) -> None:
        """Shared memory and the barriers: of every buffer that it is full, that it is empty; of the halos the same."""
        text, r, m, s, kind = self.text, self.read.name, self.matrix.name, self.s, self.read.staging.ctype
        text.all(self.k.pointers())
        text.line(f"{kind} *const {r}shared = ({kind} *)shared; {kind} *const {m}shared = {r}shared + {self.readable};")
        text.line(f"const unsigned full = (unsigned)__cvta_generic_to_shared(shared) + {self.barriers};")
        text.line(f"const unsigned empty = full + {8 * s.stages};")
        text.line(f"const unsigned halo_full = empty + {8 * s.stages}, halo_empty = halo_full + 16;")
        with text.block("if (tid == 0)"):
            for count, full, empty in ((s.stages, "full", "empty"), (2, "halo_full", "halo_empty")):
                with text.block(f"for (int i = 0; i < {count}; ++i)"):
                    text.line(f"rm_barrier_init({full} + 8 * i, {THREADS}); rm_barrier_init({empty} + 8 * i, {s.works // 32});")
            text.line("rm_barriers_made();")
        text.line("__syncthreads();")
        if self.k.prologue:
            self.k.prologue.declare(text, self.k.tables)

    def start(self) -> None:
        """The warpgroups that copy: copies, what is to be done with them, and the word that a block is complete."""
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
                self._copies()
                if m.packing is None:  # float16: what kernels before this one write, both operands
                    text.line("rm_after();")
                text.all(["#pragma unroll", f"for (int i = producer; i <= producer + {between}; i += {n})"])
                text.line(f"  if (begin + i < end) {m.name}fetch(begin + i, i);")
                if k.prologue:  # copies of the constant are no group yet
                    text.all(["rm_arrived<0>();", f"rm_producers_meet<{THREADS * n}>();"])
                if m.packing is not None:
                    text.line("rm_after();")
                text.line("#pragma unroll 1")
                with text.block(f"for (int i = producer; begin + i < end + {between}; i += {n})"):
                    self._copy(between)
                    text.line("rm_commit();")
                    with text.block(f"if (i >= {between})"):
                        self._complete(between)
            text.line("rm_after();")

    def _copy(self, between: int) -> None:
        """Copy block ``i`` of this warpgroup as soon as its buffer is empty."""
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

    def _complete(self, between: int) -> None:
        """Wait for the copies of the block ``between`` before, prepare what they brought, and hand it over."""
        s, text, halo, n = self.s, self.text, self.halo, self.read.name
        text.line(f"const int done = i - {between};")
        text.line(f"rm_arrived<{s.ahead}>();")
        if self.k.prologue and halo is None:
            text.line(f"{n}prologue(begin + done, done % {s.stages});")
        if self.i.parts > 1:
            self._halve(f"done % {s.stages}")
        text.line("rm_copies_to_async();")
        if halo is not None:
            with text.block(f"if (done == 0 || (begin + done) % {halo.taps} == 0)"):
                text.line(f"const int block = (begin + done) / {halo.taps};")
                text.line(f"const int turn = (block - begin / {halo.taps}) % 2;")
                text.all([f"{n}prologue(block, turn);"] if self.k.prologue else [])
                text.line("rm_barrier_arrive(halo_full + turn * 8);")
        text.line(f"rm_barrier_arrive(full + done % {s.stages} * 8);")

    def _halve(self, slot: str) -> None:
        """Halve this thread's own copies of the constant in buffer ``slot``."""
        with self.text.block(""):
            place = f"{self.matrix.name}shared + ({slot}) * {self.whole} + tid * 4"
            self.text.line(f"float *const from = {place}, *const to = from + {self.s.stages * self.whole};")
            for at in range(0, self.whole, 4 * THREADS):
                guard = f"if (tid * 4 + {at} < {self.whole}) " if at + 4 * THREADS > self.whole else ""
                self.text.line(f"{guard}rm_halve(from + {at}, to + {at});")

    def _copies(self) -> None:
        """The copies of both operands, and the maps before the contraction on what was copied."""
        m, halo, k = self.matrix, self.halo, self.k
        if halo is None:
            k.fetches()
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
        """The warpgroups that multiply."""
        with self.text.block("else"):
            self.text.all(["// Consumers: wait for full blocks, multiply, say that they are empty.", "rm_after();"])
            self.i.loop(self)

    @contextmanager
    def blocks(self) -> Iterator[None]:
        """The loop over blocks of products."""
        self.text.line("#pragma unroll 1")
        with self.text.block("for (int kb = begin; kb < end; ++kb)"):
            self.text.line(f"const int i = kb - begin, slot = i % {self.s.stages};")
            yield

    def complete(self) -> list[str]:
        """Wait until a block is in shared memory."""
        return [f"rm_barrier_wait(full + 8 * slot, i / {self.s.stages} & 1);"]

    def release(self) -> str:
        """The buffer of the block before is free: its products are done."""
        return f"if (i > 0 && tid % 32 == 0) rm_barrier_arrive(empty + 8 * ((i - 1) % {self.s.stages}));"
