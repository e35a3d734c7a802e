"""The ``gemm_wgmma3`` family: warpgroup products (``kernels.wgmma``) of an operand read as it is with a constant one.

The split sums and the epilogue are those of ``gemm``. The operand that is no constant goes from shared memory into
registers, 64 rows or columns of the tile a warpgroup, and is halved there. The constant comes as fp32, arranged when a
program is loaded; the threads that copied a block of it halve it in shared memory while the tensor cores work on the one
before. After every block the tensor cores' sums are added to fp32 ones outside. With ``patch`` a convolution's input is
staged once for all taps of a block of channels (``kernels.patch``).
"""

from __future__ import annotations

from dataclasses import dataclass

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.kernels.contraction import Operand, Product, product_of
from rammer_cuda.kernels.gemm import Gemm, Shape
from rammer_cuda.kernels.patch import Patch, patch_of
from rammer_cuda.kernels.preamble import PREAMBLE
from rammer_cuda.kernels.stage import Stage
from rammer_cuda.kernels.task import TaskKernel, Unsuited
from rammer_cuda.kernels.wgmma import preamble

#: Rows (or columns) of a warpgroup's product, threads of a warpgroup, and most columns (or rows) of the constant: 128
#: results and as many partial sums a thread would not fit its registers.
GROUP, THREADS, MOST = 64, 128, 128


@dataclass(frozen=True, slots=True)
class Wide(Shape):
    """A block of warpgroups; ``down`` says that the operand in registers has the tile's rows, not its columns."""

    down: bool = False
    patch: bool = False

    @property
    def group(self) -> int:
        """Threads: a warpgroup for every ``GROUP`` rows (or columns)."""
        return (self.bm if self.down else self.bn) // GROUP * THREADS


def wide_shape(rows: int, width: int, config: dict[str, int], down: bool) -> Wide:
    """The block of a task of ``rows x width``; Unsuited where the constant's side is too long."""
    through, fixed = (rows, width) if down else (width, rows)
    through, fixed = -(-through // GROUP) * GROUP, -(-fixed // 8) * 8
    if fixed > MOST:
        raise Unsuited(f"{fixed} results of a thread's row")
    bm, bn = (through, fixed) if down else (fixed, through)
    return Wide(bm, bn, config.get("bk", 32), 1, fixed // 2, config.get("stages", 3), config.get("split", 1), 1, False,
                down, bool(config.get("patch", 0)))  # fmt: skip


def gemm_wgmma3(operator: ROperator, binding: Binding) -> TaskKernel:
    """The kernel of a tiled contraction with one constant operand. Unsuited as ``gemm``, and without such an operand."""
    product = product_of(operator, binding)
    down = runs_down(product)
    shape = wide_shape(product.row_count, product.width, dict(operator.config), down)
    return _Warpgroups(product, binding, shape).kernel()


def runs_down(product: Product) -> bool:
    """Whether the rows' operand is the one in registers. Unsuited unless exactly one operand can be packed."""
    a, b = (o.packable and len(axes) <= 1 for o, axes in ((product.a, product.rows), (product.b, product.columns)))
    if a == b:
        raise Unsuited("not one constant operand")
    return b


class _Warpgroups(Gemm):
    s: Wide

    def __init__(self, product: Product, binding: Binding, shape: Wide) -> None:
        if shape.bk % 8 or shape.stages < 3:
            raise Unsuited(f"blocks of {shape.bk} products in {shape.stages} buffers")
        self.fixed = shape.bn if shape.down else shape.bm
        super().__init__(product, binding, shape)
        self.read, self.matrix = (self.a, self.b) if shape.down else (self.b, self.a)
        self.patch: Patch | None = None
        if shape.patch:
            name, operand, axes = ("a", product.a, product.rows) if shape.down else ("b", product.b, product.columns)
            storage, kind = binding.storages[operand.tensor], binding.types[operand.tensor]
            self.patch = patch_of(name, product, operand, axes, self.depth, shape.threads, storage.strides, kind.shape)
            if self.patch.taps < shape.stages - 1:
                raise Unsuited(f"{self.patch.taps} taps for {shape.stages} buffers")
        self.whole = shape.bk * self.matrix.pitch
        self.readable = 2 * shape.bk * self.patch.pitch if self.patch else shape.stages * shape.bk * self.read.pitch
        self.dynamic = 4 * max(self.readable + (shape.stages + 2) * self.whole, shape.bm * shape.bn)

    def stage(self, name: str, operand: Operand, axes: tuple[int, ...], unit: int) -> Stage:
        if (name == "a") == self.s.down:
            # Rows of 8 or 24 (mod 32) elements: lanes of different ``lt`` then read different banks.
            return Stage(name, self.p, operand, axes, unit, self.depth, self.s.threads, (8 - unit) % 16)
        return Stage(name, self.p, operand, axes, unit, self.depth, self.s.threads, 0, cored=True)

    def preamble(self) -> str:
        return PREAMBLE + preamble([self.fixed])

    def _pointers(self) -> None:
        text, r, m = self.text, self.read.name, self.matrix.name
        text.line("extern __shared__ __align__(16) float shared[];")
        text.line("const float *const ag = p0; const float *const bg = p1;")
        text.line(f"float *const {r}shared = shared; float *const {m}shared = shared + {self.readable};")
        text.line(f"float *const rest = {m}shared + {self.s.stages * self.whole};")
        text.line("const int warp = tid / 32, lg = tid % 32 / 4, lt = tid % 4;")

    def _setup(self) -> None:
        self.matrix.setup(self.text)
        if self.patch is None:
            self.read.setup(self.text)
            return
        self.patch.setup(self.text)
        for h in (0, 1):
            self.text.line(f"const int row{h} = min(warp * 16 + lg + {8 * h}, {self.read.count - 1});")
            self.text.line(f"const int at{h} = {self.patch.place(f'row{h}')} + lt * {self.patch.pitch};")

    def _fetch(self) -> None:
        """The copies of both operands, and the halving of a thread's own copies of the constant."""
        text, m = self.text, self.matrix
        if self.patch is None:
            super()._fetch()
        else:
            n = self.patch.name
            text.line(f"auto {n}fetch = [&](int block) {{")
            text.line(f"float *const {n}s = {n}shared + block % 2 * {self.s.bk * self.patch.pitch};")
            text.line(f"const int c0 = block * {self.s.bk};")
            self.patch.fetch(text)
            text.line("};")
            text.line(f"auto {m.name}fetch = [&](int step, int slot) {{")
            text.line(f"float *const {m.name}s = {m.name}shared + slot * {self.whole};")
            text.line(f"const int kb = step % {self.patch.taps} * {self.depth.per_tap} + step / {self.patch.taps};")
            m.fetch(text)
            text.line("};")
        text.line("auto halve = [&](int slot, int place) {")
        text.line(f"float *const from = {m.name}shared + slot * {self.whole} + tid * 4;")
        text.line(f"float *const to = rest + place * {self.whole} + tid * 4;")
        for at in range(0, self.whole, 4 * self.s.threads):
            guard = f"if (tid * 4 + {at} < {self.whole}) " if at + 4 * self.s.threads > self.whole else ""
            text.line(f"{guard}rm_halve(from + {at}, to + {at});")
        text.line("};")

    def _start(self) -> None:
        if self.patch is None:
            super()._start()
            return
        s, text, taps, n = self.s, self.text, self.patch.taps, self.patch.name
        text.all(["#pragma unroll", f"for (int i = 0; i < {s.stages - 1}; ++i)"])
        text.line(f"  if (begin + i < end) {self.matrix.name}fetch(begin + i, i);")
        text.all(["rm_after();", f"{n}fetch(begin / {taps});", "rm_commit();"])
        text.all([f"if ((begin / {taps} + 1) * {taps} < end) {n}fetch(begin / {taps} + 1);", "rm_commit();"])
        text.all(["rm_commit();"] * (s.stages - 3))

    def _loop(self) -> None:
        s, n, m = self.s, self.read.name, self.matrix.name
        ahead = f"kb + {s.stages - 1}"
        start = [f"if ({ahead} < end) {{ {m}fetch({ahead}, fill); {n}fetch({ahead}, fill); }}"]
        if self.patch is not None:
            taps = self.patch.taps
            start = [
                f"if ({ahead} < end) {m}fetch({ahead}, fill);",
                f"const int block = kb / {taps}, tap = kb - block * {taps};",
                # The two first patches are there; later ones take the place of the last but one.
                f"if (tap == 0 && kb > begin && (block + 1) * {taps} < end) {n}fetch(block + 1);",
            ]
        self.text.all([
            f"int use = 0, fill = {s.stages - 1}, place = 0;",
            f"rm_arrived<{s.stages - 2}>();", "halve(0, 0);", "rm_copies_to_async();",
            "#pragma unroll 1", "for (int kb = begin; kb < end; ++kb) {",
            "__syncthreads();", *start, "rm_commit();",
            *self._multiply(),
            f"use = use == {s.stages - 1} ? 0 : use + 1;",
            f"fill = fill == {s.stages - 1} ? 0 : fill + 1;",
            "place ^= 1;", "}",
        ])  # fmt: skip

    def _multiply(self) -> list[str]:
        s, n, m = self.s, self.read, self.matrix
        steps, next_ = s.bk // 8, f"use == {s.stages - 1} ? 0 : use + 1"
        read = [f"const float *const at = {n.name}shared + (use * {s.bk} + lt) * {n.pitch} + warp * 16 + lg;"]
        element, pitch = "e % 2 * 8", n.pitch
        if self.patch is not None:
            pitch = self.patch.pitch
            read = [f"const float *const at = {n.name}shared + block % 2 * {s.bk * pitch} + {self.patch.tap('tap')};"]
            element = "(e % 2 ? at1 : at0)"
        return [
            "{", *read, f"unsigned big[{steps}][4], small[{steps}][4];",
            "#pragma unroll", f"for (int s = 0; s < {steps}; ++s)", "#pragma unroll", "for (int e = 0; e < 4; ++e)",
            f"  rm_halves(at[(s * 8 + e / 2 * 4) * {pitch} + {element}], big[s][e], small[s][e]);",
            f"float part[{self.fixed // 2}];",
            f"rm_products{self.fixed}(part, big, small, rm_matrix({m.name}shared + use * {self.whole}, {self.fixed}),",
            f"  rm_matrix(rest + place * {self.whole}, {self.fixed}));",
            # Meanwhile the next block arrives and is halved.
            f"rm_arrived<{s.stages - 2}>();", f"if (kb + 1 < end) halve({next_}, place ^ 1);", "rm_copies_to_async();",
            "rm_warpgroup_wait();", "rm_pin(part);",
            "#pragma unroll", f"for (int j = 0; j < {self.fixed // 2}; ++j) acc[0][j] += part[j];",
            "}",
        ]  # fmt: skip

    def _leave(self) -> list[str]:
        s = self.s
        row, column = "warp * 16 + lg + e / 2 * 8", "j * 8 + lt * 2 + e % 2"
        place = f"({row}) * {s.bn} + {column}" if s.down else f"({column}) * {s.bn} + {row}"
        return [
            "#pragma unroll", f"for (int j = 0; j < {self.fixed // 8}; ++j)", "#pragma unroll", "for (int e = 0; e < 4; ++e)",
            f"  shared[{place}] = acc[0][j * 4 + e];",
        ]  # fmt: skip
