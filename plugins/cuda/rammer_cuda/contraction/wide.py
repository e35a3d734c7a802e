"""The ``gemm_wgmma3`` family: warpgroup products (``contraction.wgmma``) of an operand read as it is with a constant one.

The split sums and the epilogue are those of ``gemm``. The operand that is no constant goes from shared memory into
registers, 64 rows or columns of the tile a warpgroup, and is halved there. The constant comes as fp32, arranged when a
program is loaded, and is halved in shared memory by the warpgroup that copied it; one or two do nothing else: so the
others need no common barrier, and while one converts, another one's products run. After every block the tensor cores'
sums are added to fp32 ones outside. With ``patch`` a convolution's input is staged once for all taps of a block of
channels (``contraction.halo``).

``Warpgroups`` is also the frame of the families with one product for one (``contraction.wide_single``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rammer.codegen.contraction import Operand, Product, product_of
from rammer.codegen.task import Unsuited
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.gemm import Gemm, Shape
from rammer_cuda.contraction.halo import InputHalo, halo_of
from rammer_cuda.contraction.operand import FLOAT32_CORES, WORDS, Staged
from rammer_cuda.contraction.packing import DEEP
from rammer_cuda.contraction.preamble import PREAMBLE
from rammer_cuda.contraction.wgmma import preamble
from rammer_cuda.kernels.task import TaskKernel

#: Rows (or columns) of a warpgroup's product, threads of a warpgroup, and most columns (or rows) of the constant: 128
#: results and as many partial sums a thread would not fit its registers.
GROUP, THREADS, MOST = 64, 128, 128


@dataclass(frozen=True, slots=True)
class Wide(Shape):
    """A block of warpgroups; ``down`` says that the operand in registers has the tile's rows, not its columns."""

    down: bool = False
    patch: bool = False
    copiers: int = 1

    @property
    def group(self) -> int:
        """Threads that multiply: a warpgroup for every ``GROUP`` rows (or columns)."""
        return (self.bm if self.down else self.bn) // GROUP * THREADS

    @property
    def threads(self) -> int:
        """With the warpgroups that copy."""
        return self.group + THREADS * self.copiers

    @property
    def ahead(self) -> int:
        """Blocks that a copying warpgroup starts before it waits for the first of them."""
        return (self.stages - 2) // self.copiers


def wide_shape(rows: int, width: int, config: dict[str, int], down: bool) -> Wide:
    """The block of a task of ``rows x width``; Unsuited where the constant's side is too long."""
    through, fixed = (rows, width) if down else (width, rows)
    through, fixed = -(-through // GROUP) * GROUP, -(-fixed // 8) * 8
    if fixed > MOST:
        raise Unsuited(f"{fixed} results of a thread's row")
    bm, bn = (through, fixed) if down else (fixed, through)
    return Wide(bm, bn, config.get("bk", 32), 1, fixed // 2, config.get("stages", 3), config.get("split", 1), 1, False,
                down, bool(config.get("patch", 0)), config.get("copiers", 1))  # fmt: skip


def gemm_wgmma3(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction with one constant operand. Unsuited as ``gemm``, and without such an operand."""
    product = product_of(operator, binding, prologue=True)
    down = runs_down(product)
    shape = wide_shape(product.row_count, product.width, dict(operator.config), down)
    return Warpgroups(product, binding, shape).kernel()


def runs_down(product: Product) -> bool:
    """Whether the rows' operand is the one in registers. Unsuited unless exactly one operand can be packed."""
    a, b = (o.packable and len(axes) <= 1 for o, axes in ((product.a, product.rows), (product.b, product.columns)))
    if a == b:
        raise Unsuited("not one constant operand")
    return b


@dataclass(frozen=True, slots=True)
class Fragments:
    """Reading a block of the operand that goes into registers: what to wait for, where it begins, and what to say when it is
    read; ``steps`` instructions, and elements from one product to the next and to those of ``element`` e."""

    wait: tuple[str, ...]
    place: tuple[str, ...]
    leave: tuple[str, ...]
    steps: int
    pitch: int
    element: str

    def read(self, statement: str) -> list[str]:
        """``statement`` with ``{element}`` for every register ``[s][e]``."""
        return self.each(statement.format(element=f"at[(s * {DEEP} + e / 2 * 4) * {self.pitch} + {self.element}]"))

    def each(self, statement: str) -> list[str]:
        """``statement`` for every register ``[s][e]``."""
        return ["#pragma unroll", f"for (int s = 0; s < {self.steps}; ++s)", "#pragma unroll", "for (int e = 0; e < 4; ++e)",
                f"  {statement}"]  # fmt: skip


class Warpgroups(Gemm):
    """Three tf32 products for one. Other forms override how the constant is stored, what is done with a block that has
    arrived, and the multiplying warpgroups' loop."""

    s: Wide
    unroll, least, constant = 8, DEEP, FLOAT32_CORES
    #: Bytes of an element, and arrays that a block of the constant takes in shared memory.
    item: ClassVar[int] = 4
    parts: ClassVar[int] = 2
    #: ``InputHalo.unroll``.
    channels: ClassVar[int] = 0

    def __init__(self, product: Product, binding: Binding, shape: Wide) -> None:
        if shape.bk % self.least or shape.stages < 3:
            raise Unsuited(f"blocks of {shape.bk} products in {shape.stages} buffers")
        self.fixed = shape.bn if shape.down else shape.bm
        super().__init__(product, binding, shape)
        self.read, self.matrix = (self.a, self.b) if shape.down else (self.b, self.a)
        self.preamble = PREAMBLE + self.products()
        self.patch: InputHalo | None = None
        if shape.patch:
            name, operand, axes = ("a", product.a, product.rows) if shape.down else ("b", product.b, product.columns)
            storage, kind = binding.storages[operand.tensor], binding.types[operand.tensor]
            self.patch = halo_of(name, product, operand, axes, self.depth, THREADS, storage.strides, kind.shape)
            self.patch.unroll = self.channels
            if self.patch.taps < shape.ahead * shape.copiers:
                # A copying warpgroup would wait for a patch to be left whose last products it still has to complete.
                raise Unsuited(f"{self.patch.taps} taps for {shape.stages} buffers")
        self.whole = shape.bk * self.matrix.pitch
        self.readable = 2 * shape.bk * self.patch.pitch if self.patch else shape.stages * shape.bk * self.read.pitch
        elements = self.readable + self.parts * shape.stages * self.whole
        self.barriers = max(self.item * elements, 4 * shape.bm * self.line)
        self.dynamic = self.barriers + 16 * (shape.stages + 2)

    def products(self) -> str:
        """Device functions of this form's products."""
        return preamble([self.fixed])

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Staged:
        staging = WORDS if (name == "a") == self.s.down else self.constant
        return Staged(name, self.p, operand, axes, unit, self.depth, THREADS, staging)

    def _pointers(self) -> None:
        text, r, m, s, kind = self.text, self.read.name, self.matrix.name, self.s, self.read.staging.ctype
        text.line("extern __shared__ __align__(16) float shared[];")
        text.line(f"const {kind} *const ag = p0; const {kind} *const bg = p1;")
        text.line(f"{kind} *const {r}shared = ({kind} *)shared; {kind} *const {m}shared = {r}shared + {self.readable};")
        text.line(f"const unsigned full = (unsigned)__cvta_generic_to_shared(shared) + {self.barriers};")
        text.line(f"const unsigned empty = full + {8 * s.stages}, patched = empty + {8 * s.stages}, left = patched + 16;")
        text.all([
            "if (tid == 0) {", f"for (int i = 0; i < {s.stages}; ++i) {{",
            f"rm_barrier_init(full + 8 * i, {THREADS}); rm_barrier_init(empty + 8 * i, {s.works // 32});", "}",
            "for (int i = 0; i < 2; ++i) {",
            f"rm_barrier_init(patched + 8 * i, {THREADS}); rm_barrier_init(left + 8 * i, {s.works // 32});", "}",
            "rm_barriers_made();", "}",
        ])  # fmt: skip
        text.line("__syncthreads();")
        if self.prologue:
            self.prologue.declare(text, self.tables)

    def _setup(self) -> None:
        """Nothing: the copying warpgroup sets up what it needs."""

    def _fetch(self) -> None:
        """Nothing: the copying warpgroup has these functions."""

    def _start(self) -> None:
        """The copying warpgroup: copies, what is to be done with them, and the word that a block is complete."""
        s, text, m, r = self.s, self.text, self.matrix, self.read
        n, ahead, between = s.copiers, s.ahead, s.copiers * s.ahead
        text.all([f"if (tid >= {s.works}) {{", f"const int copier = tid / {THREADS} - {s.works // THREADS}, thread = tid;", "{"])
        text.line(f"const int tid = thread % {THREADS};")
        self._tables(f"thread - {s.works}", THREADS * n)
        m.setup(text)
        (self.patch or r).setup(text)
        self._copies()
        if m.packing is None:  # float16: what kernels before this one write, both operands
            text.line("rm_after();")
        text.all(["#pragma unroll", f"for (int i = copier; i <= copier + {between}; i += {n})"])
        text.line(f"  if (begin + i < end) {m.name}fetch(begin + i, i);")
        if self.prologue:
            text.all(["rm_arrived<0>();", f"rm_copiers_meet<{THREADS * n}>();"])  # copies of the constant are no group yet
        if m.packing is not None:
            text.line("rm_after();")
        text.all(["#pragma unroll 1", f"for (int i = copier; begin + i < end + {between}; i += {n}) {{"])
        text.all(["const int kb = begin + i;", "if (kb < end) {", f"const int slot = i % {s.stages};"])
        text.line(f"if (i >= {s.stages}) rm_barrier_wait(empty + 8 * slot, (i / {s.stages} - 1) & 1);")
        text.line(f"if (i > copier + {between}) {m.name}fetch(kb, slot);")
        if self.patch is None:
            text.line(f"{r.name}fetch(kb, slot);")
        else:
            taps = self.patch.taps
            text.all([f"if (i == 0 || kb % {taps} == 0) {{", f"const int turn = kb / {taps} - begin / {taps};"])
            text.all(["if (turn >= 2) rm_barrier_wait(left + turn % 2 * 8, (turn / 2 - 1) & 1);"])
            text.all([f"{r.name}fetch(kb / {taps}, turn % 2);", "}"])
        text.all(["}", "rm_commit();", f"if (i >= {between}) {{", f"const int done = i - {between};"])
        text.line(f"rm_arrived<{ahead}>();")
        if self.prologue and self.patch is None:
            text.line(f"{r.name}change(begin + done, done % {s.stages});")
        text.all([*self.arrived(f"done % {s.stages}"), "rm_copies_to_async();"])
        if self.patch is not None:
            taps = self.patch.taps
            text.all([f"if (done == 0 || (begin + done) % {taps} == 0) {{", f"const int block = (begin + done) / {taps};"])
            text.line(f"const int turn = (block - begin / {taps}) % 2;")
            text.all([f"{r.name}change(block, turn);"] if self.prologue else [])
            text.all(["rm_barrier_arrive(patched + turn * 8);", "}"])
        text.all([f"rm_barrier_arrive(full + done % {s.stages} * 8);", "}", "}", "}", "rm_after();"])

    def _copies(self) -> None:
        """The copies of both operands, and the maps before the contraction on what was copied."""
        text, m = self.text, self.matrix
        if self.patch is None:
            super()._fetch()
            return
        self._patch_block("fetch")
        self.patch.fetch(text)
        text.line("};")
        if self.prologue:
            self._patch_block("change")
            self.patch.apply(text, self.prologue)
            text.line("};")
        text.line(f"auto {m.name}fetch = [&](int step, int slot) {{")
        text.line(f"float *const {m.name}s = {m.name}shared + slot * {self.whole};")
        text.line(f"const int kb = step % {self.patch.taps} * {self.depth.per_tap} + step / {self.patch.taps};")
        m.fetch(text)
        text.line("};")

    def arrived(self, slot: str) -> list[str]:
        """What a copying thread does with its own copies in buffer ``slot``: here it halves those of the constant."""
        place = f"{self.matrix.name}shared + ({slot}) * {self.whole} + tid * 4"
        lines = ["{", f"float *const from = {place}, *const to = from + {self.s.stages * self.whole};"]
        for at in range(0, self.whole, 4 * THREADS):
            guard = f"if (tid * 4 + {at} < {self.whole}) " if at + 4 * THREADS > self.whole else ""
            lines.append(f"{guard}rm_halve(from + {at}, to + {at});")
        return [*lines, "}"]

    def _patch_block(self, verb: str) -> None:
        """The head of a function of a block of channels in buffer ``slot``."""
        n, size = self.read.name, self.s.bk * (self.patch.pitch if self.patch else 0)
        self.text.line(f"auto {n}{verb} = [&](int block, int slot) {{")
        self.text.line(f"float *const {n}s = {n}shared + slot * {size};")
        self.text.line(f"const int c0 = block * {self.s.bk};")

    def _loop(self) -> None:
        """The multiplying warpgroups, each at its own pace."""
        s, steps, m = self.s, self.s.bk // 8, self.matrix
        text, groups = self.text, self.s.works // THREADS
        text.all(["} else {", "rm_after();"])
        fragments = self.fragments()
        turn, pass_on = list[str](), list[str]()
        if groups > 1:
            # In turns: left alone, the warpgroups' products would interleave, and then all of them convert at once.
            text.line("const int mine = tid / 128 + 1;")
            text.line(f"if (mine == {groups}) rm_turn_pass(1);")
            turn = ["rm_turn_wait(mine);"]
            pass_on = [f"if (kb + 1 < end || mine < {groups}) rm_turn_pass(mine == {groups} ? 1 : mine + 1);"]
        text.all([
            *self.blocks(), *fragments.wait, *self.complete(), *fragments.place,
            f"unsigned big[{steps}][4], small[{steps}][4];",
            *fragments.read("rm_halves({element}, big[s][e], small[s][e]);"),
            f"float part[{self.fixed // 2}];", *turn,
            f"rm_products{self.fixed}(part, big, small, rm_matrix({m.name}shared + slot * {self.whole}, {self.fixed}),",
            f"  rm_matrix({m.name}shared + (slot + {s.stages}) * {self.whole}, {self.fixed}));",
            *pass_on, "rm_warpgroup_wait<0>();", "rm_pin(big); rm_pin(small); rm_pin(part);",
            "if (tid % 32 == 0) rm_barrier_arrive(empty + 8 * slot);", *fragments.leave,
            "#pragma unroll", f"for (int j = 0; j < {self.fixed // 2}; ++j) acc[0][j] += part[j];",
            "}", "}",
        ])  # fmt: skip

    def blocks(self) -> list[str]:
        """The head of the loop over blocks of products."""
        return ["#pragma unroll 1", "for (int kb = begin; kb < end; ++kb) {",
                f"const int i = kb - begin, slot = i % {self.s.stages};"]  # fmt: skip

    def complete(self) -> list[str]:
        """Wait until a block is in shared memory."""
        return [f"rm_barrier_wait(full + 8 * slot, i / {self.s.stages} & 1);"]

    def fragments(self) -> Fragments:
        """How this thread's elements of the operand in registers are read; writes what all blocks share."""
        text, n, s, patch = self.text, self.read, self.s, self.patch
        text.line("const int warp = tid / 32, lg = tid % 32 / 4, lt = tid % 4;")
        steps = s.bk // DEEP
        if patch is None:
            place = f"const float *const at = {n.name}shared + (slot * {s.bk} + lt) * {n.pitch} + warp * 16 + lg;"
            return Fragments((), (place,), (), steps, n.pitch, "e % 2 * 8")
        for h in (0, 1):
            text.line(f"const int row{h} = min(warp * 16 + lg + {8 * h}, {n.count - 1});")
            text.line(f"const int at{h} = {patch.place(f'row{h}')} + lt * {patch.pitch};")
        wait = (
            f"const int turn = kb / {patch.taps} - begin / {patch.taps}, tap = kb % {patch.taps};",
            "if (i == 0 || tap == 0) rm_barrier_wait(patched + turn % 2 * 8, turn / 2 & 1);",
        )
        place = f"const float *const at = {n.name}shared + turn % 2 * {s.bk * patch.pitch} + {patch.tap('tap')};"
        leave = f"if (tid % 32 == 0 && tap == {patch.taps - 1}) rm_barrier_arrive(left + turn % 2 * 8);"
        return Fragments(wait, (place,), (leave,), steps, patch.pitch, "(e % 2 ? at1 : at0)")

    def _leave(self) -> list[str]:
        s = self.s
        row, column = "warp * 16 + lg + e / 2 * 8", "j * 8 + lt * 2 + e % 2"
        place = f"({row}) * {self.line} + {column}" if s.down else f"({column}) * {self.line} + {row}"
        return [
            "const int warp = tid / 32, lg = tid % 32 / 4, lt = tid % 4;",
            "#pragma unroll", f"for (int j = 0; j < {self.fixed // 8}; ++j)", "#pragma unroll", "for (int e = 0; e < 4; ++e)",
            f"  shared[{place}] = acc[0][j * 4 + e];",
        ]  # fmt: skip
