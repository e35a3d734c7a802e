"""Implicit matrix products on GPUs: a group of work-items for each task, or several groups that share a sum.

A group walks the reduction in blocks of ``bk`` products through a ring of ``stages`` buffers in local memory. Each work-item
accumulates ``tm x tn`` results in registers, separately for ``slice_k`` parts of each block. If ``split_k`` > 1 groups share a
task, each stores its sums to global memory. The group that arrives last adds them in the order of the groups, so results do not
depend on the order of arrival. The maps after the product are applied on the way to memory. Those before one operand are applied
once to each staged element, by the work-item that copied it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from rammer.codegen import (
    Argument,
    Block,
    FunctionContext,
    Operand,
    Product,
    Text,
    Unsuited,
    Val,
    hash_of,
    product_of,
    split_digits,
)
from rammer.codegen.c_target import head_of
from rammer.codegen.products import PLAIN, Depth, OperandMaps, Shape, Staged, depth_of, shape_of
from rammer.device.manifest import Binding
from rammer.ir.expr import Interval, Load, Ref
from rammer.ir.operator import ROperator

from rammer_rocm.constants import round_up
from rammer_rocm.dialect import GPU_DIALECT
from rammer_rocm.kernels.group_frame import place_of
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.ring.device_text import COPIES

#: Most local memory of a group in bytes: the limit of NVIDIA's OpenCL.
MOST_LOCAL = 48 << 10
#: Stores of a work-item in flight.
UNROLL = 4


@dataclass(frozen=True, slots=True)
class Fma:
    """The instruction of a ring: one product of a work-item, of ``threads`` work-items in a group."""

    name: str
    threads: int
    dtype: str = "float32"
    lanes: int = 1
    depth: int = 1
    item: int = 4
    prologue: bool = True

    def serves(self, precision: str) -> bool:
        """Return True: products are exact, whatever a user allows."""
        return True

    def product(self, operator: ROperator, binding: Binding) -> Product:
        """Return the matrix product of a tiled operator. Raises Unsuited."""
        return product_of(operator, binding, self.dtype, prologue=self.prologue)

    def block(self, p: Product) -> Shape:
        """Return the block of a tiled product under its config."""
        return shape_of(p.row_count, p.width, dict(p.operator.config), items=self.threads)


class RingMaps(OperandMaps):
    """The maps before an operand, as a macro that changes a variable."""

    zeros = "(float4)(0.0f)"

    def call(self, value: str, places: str) -> str:
        """Return the macro with its arguments."""
        return f"{self.name}maps({value}{places});"


def prologue_of(name: str, operand: Operand, binding: Binding) -> RingMaps | None:
    """Return the writer of the maps before an operand, or None without any."""
    return None if operand.prologue is None else RingMaps(name, operand, operand.prologue, binding, GPU_DIALECT)


def as_macro(lines: Sequence[str]) -> str:
    """Return statements as the body of a macro."""
    return " \\\n".join(["do {", *lines, "} while (0)"])


def ring_kernel(operator: ROperator, binding: Binding, instruction: Fma) -> TaskFunction:
    """Return the function of a tiled product. Raises Unsuited for another form, or an impossible block."""
    product = instruction.product(operator, binding)
    return RingKernel(product, binding, instruction.block(product)).function(instruction.name)


class RingKernel:
    """A writer of the function of one product."""

    target = GPU_DIALECT

    def __init__(self, product: Product, binding: Binding, shape: Shape) -> None:
        self.p, self.binding, self.s, self.text = product, binding, shape, Text()
        s = shape
        if not 0 < s.works <= s.threads or s.bk % s.slice_k or product.operator.reduce_bounds:
            raise Unsuited(f"{s.works} of {s.threads} work-items, {s.slice_k} slices of {s.bk}")
        self.depth: Depth = depth_of(product.main.reduce, s.bk)
        self.split = min(s.split_k, self.depth.blocks)
        self.a = Staged("a", product, product.a, product.rows, s.bm, self.depth, s.threads, PLAIN, GPU_DIALECT)
        self.b = Staged("b", product, product.b, product.columns, s.bn, self.depth, s.threads, PLAIN, GPU_DIALECT)
        self.prologue = prologue_of("a", product.a, binding) or prologue_of("b", product.b, binding)
        #: The byte of the prologue's tables in local memory. The sums of slices replace them after the last product.
        self.tables = round_up(4 * s.stages * (self.a.size + self.b.size), 16)
        staged = self.tables + (self.prologue.bytes if self.prologue else 0)
        self.scratch = max(staged, 4 * s.bm * s.bn * s.slice_k, 16)
        if self.scratch > MOST_LOCAL:
            raise Unsuited(f"{self.scratch} bytes of local memory")
        self.threads, self.helpers = s.threads, COPIES
        self.arguments = self.function_arguments()

    def function_arguments(self) -> tuple[Argument, ...]:
        """Return the operands, then the tensors that the maps around the contraction read, then outputs."""
        p = self.p
        inside = {p.main.name, *(c.name for c in p.after)}
        read = dict.fromkeys(self.prologue.prologue.constants if self.prologue else ())
        read |= dict.fromkeys(t for c in p.after for t in c.reads if t not in inside)
        operands = (Argument(p.a.tensor, False, self.a.packing), Argument(p.b.tensor, False, self.b.packing))
        return (*operands, *(Argument(t, False) for t in read), *(Argument(t, True) for t in p.operator.outputs))

    def function(self, family: str) -> TaskFunction:
        """Return the finished function."""
        text = self.text
        self.write_declarations()
        self.write_sums()
        tables = self.write_results()
        types = tuple(GPU_DIALECT.types["float32" if a.packing else self.binding.types[a.tensor].dtype] for a in self.arguments)
        pointers = [(t, a.written) for t, a in zip(types, self.arguments, strict=True)]
        shared = ", __global float *partials, __global int *arrived, int slot, int rank" * (self.split > 1)
        rest = head_of(self.target, "@", pointers)[:-1] + f"{shared}) {{\n{text}}}\n"
        defines = {**self.copy_macros(), **self._prologue_macros()}
        macros = "".join(f"#define {name} {text}\n" for name, text in defines.items())
        whole = tables + macros + rest + "".join(f"#undef {name.partition('(')[0]}\n" for name in defines)
        name = f"{family}_{hash_of(whole)}"
        partials = self.split * self.p.row_count * self.p.width if self.split > 1 else 0
        return TaskFunction(
            name,
            whole.replace("void @(", f"void {name}("),
            self.arguments,
            types,
            self.scratch,
            self.helpers,
            threads=self.threads,
            blocks=self.split,
            partials=partials,
        )

    # --- parts of the text --------------------------------------------------------------------------

    def copy_macros(self) -> dict[str, str]:
        """Return the copies of a block of each operand as macros of the block and the buffer: OpenCL C has no closures."""
        return {f"{stage.name}fetch(kb_, slot_)": self._macro_of(stage, None) for stage in (self.a, self.b)}

    def _prologue_macros(self) -> dict[str, str]:
        """Return the maps before the product as macros: of an element, and of this work-item's copies of a block."""
        maps = self.prologue
        if maps is None:
            return {}
        stage, (lines, value) = self.a if maps.name == "a" else self.b, maps.body()
        one = as_macro(["const float staged = value_;", *lines, f"value_ = {value};"])
        places = "".join(f", {z}" for z in maps.places)
        return {f"{stage.name}maps(value_{places})": one, f"{stage.name}prologue(kb_, slot_)": self._macro_of(stage, maps)}

    def _macro_of(self, stage: Staged, maps: RingMaps | None) -> str:
        """Return the copies of a block of an operand, or with ``maps`` these on the block."""
        text, n = Text(), stage.name
        text.line(f"__local float *const {n}s = {n}shared + (slot_) * {stage.size}; const int kb = (kb_);")
        text.all(stage.block_start())
        if maps is None:
            stage.fetch(text)
        else:
            stage.apply(text, maps)
        return as_macro(text.lines)

    def write_origins(self) -> None:
        """Write the work-item's number, and where the task's tile begins."""
        o = self.p.operator
        self.text.line("const int tid = rm_item();")
        for d, (place, tile, count) in enumerate(zip(split_digits("task", o.grid), o.tile, o.grid, strict=True)):
            self.text.line(f"const int o{d} = {'0' if count == 1 else place if tile == 1 else f'{place} * {tile}'};")

    def write_declarations(self) -> None:
        """Write the variables of a work-item: its place in the tile, and the operands' buffers and addresses."""
        s, text = self.s, self.text
        self.write_origins()
        text.line("__local float *const shared = (__local float *)scratch, *const ashared = shared;")
        text.line(f"__local float *const bshared = shared + {s.stages * self.a.size};")
        text.line("__global const float *const ag = p0, *const bg = p1;")
        # Two neighbouring work-items share their columns: reads of 16 bytes then merge across half a warp.
        across = s.bn // s.tn
        text.line(f"const int worker = min(tid, {s.works - 1}), slice = worker / {s.group}, place = worker % {s.group};")
        text.line(f"const int tx = (place >> 1) % {across}, ty = (place & 1) + (place >> 1) / {across} * 2;")
        self.a.setup(text)
        self.b.setup(text)
        if self.prologue:
            self.prologue.place_tables(text, self.tables)
            pointers = {a.tensor: f"p{k}" for k, a in enumerate(self.arguments) if k >= 2}
            self.prologue.copy(text, pointers, "tid", s.threads)

    def write_share(self) -> None:
        """Write the first and the last block of products that this group adds."""
        blocks = self.depth.blocks
        begin, end = "0", str(blocks)
        if self.split > 1:
            begin, end = f"{blocks} * rank / {self.split}", f"{blocks} * (rank + 1) / {self.split}"
        self.text.line(f"const int begin = {begin}, end = {end};")

    def write_sums(self) -> None:
        """Write the sums of this group's share of the products."""
        s, text = self.s, self.text
        self.write_share()
        text.line(f"float acc[{s.tm}][{s.tn}];")
        self._unrolled("acc[i][j] = 0.0f;")
        text.line(f"for (int i = 0; i < {s.stages - 1}; ++i) {{")
        text.line("if (begin + i < end) { afetch(begin + i, i); bfetch(begin + i, i); }")
        text.all(["rm_commit();", "}"])
        if self.prologue:  # waits for the tables only, not for later copies
            text.all([f"rm_arrived({s.stages - 1});", GPU_DIALECT.barrier])
        text.line(f"int use = 0, fill = {s.stages - 1};")
        with text.block("for (int at = begin; at < end; ++at)"):
            text.line(f"rm_arrived({s.stages - 2});")
            text.all([f"{self.prologue.name}prologue(at, use);"] if self.prologue else [])
            text.line(GPU_DIALECT.barrier)
            ahead = f"at + {s.stages - 1}"
            text.line(f"if ({ahead} < end) {{ afetch({ahead}, fill); bfetch({ahead}, fill); }}")
            text.line("rm_commit();")
            self._multiply()
            text.all(f"{n} = {n} == {s.stages - 1} ? 0 : {n} + 1;" for n in ("use", "fill"))

    def _multiply(self) -> None:
        s, text, part = self.s, self.text, self.s.bk // self.s.slice_k
        for n, stage, place in (("x", self.a, "ty"), ("y", self.b, "tx")):
            start = f"{stage.name}shared + use * {stage.size} + slice * {part * stage.pitch} + {place} * 4"
            text.line(f"__local const float *const {n}p = {start};")
        text.line(f"#pragma unroll {min(part, 16)}")
        with text.block(f"for (int k = 0; k < {part}; ++k)"):
            for n, stage, size, width in (("x", self.a, s.tm, s.bm), ("y", self.b, s.tn, s.bn)):
                text.line(f"float {n}[{size}];")
                for i in range(0, size, 4):
                    step = i // 4 * (width // (size // 4))
                    text.line(f"const float4 {n}v{i} = *(__local const float4 *)({n}p + k * {stage.pitch} + {step});")
                    text.line(" ".join(f"{n}[{i + e}] = {n}v{i}.{c};" for e, c in enumerate("xyzw")))
            self._unrolled("acc[i][j] = fma(x[i], y[j], acc[i][j]);")

    def _unrolled(self, statement: str) -> None:
        s = self.s
        self.text.line("#pragma unroll")
        self.text.line(f"for (int i = 0; i < {s.tm}; ++i) {{")
        self.text.line("#pragma unroll")
        self.text.all([f"for (int j = 0; j < {s.tn}; ++j) {statement}", "}"])

    def write_results(self) -> str:
        """Write the sums to local memory, their exchange between groups, the maps and the stores. Return the maps' tables."""
        s, text = self.s, self.text
        text.all(["rm_arrived(0);", GPU_DIALECT.barrier])
        row = f"slice * {s.bm} + ty * 4 + i % 4 + i / 4 * {s.bm // (s.tm // 4)}"
        column = f"tx * 4 + j % 4 + j / 4 * {s.bn // (s.tn // 4)}"
        with text.block(f"if (tid < {s.works})"):
            self._unrolled(f"shared[({row}) * {s.bn} + {column}] = acc[i][j];")
        text.line(GPU_DIALECT.barrier)
        value = " + ".join(f"shared[(i + {q * s.bm}) * {s.bn} + j]" for q in range(s.slice_k))
        if self.split > 1:
            self.declare_partials()
            with self.cell_loop():
                self.store_partial(value)
            value = self.add_partials()
        return self.write_maps(value, self.cell_loop())

    def declare_partials(self) -> None:
        """Write the address of the task's sums of all groups."""
        self.text.line(f"__global float *const all = partials + slot * {self.split * self.p.row_count * self.p.width};")

    def store_partial(self, value: str) -> None:
        """Write the store of this group's sum of cell ``e``."""
        self.text.line(f"all[rank * {self.p.row_count * self.p.width} + e] = {value};")

    def add_partials(self) -> str:
        """Write the exit of all groups but the last one. Return the sum of cell ``e`` over all groups."""
        text = self.text
        text.line("barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);")
        text.line("__local int *const last = (__local int *)scratch;")
        with text.block("if (tid == 0)"):  # its fences order the accesses of the whole group, before and after the barriers
            text.line("rm_fence();")
            text.line(f"last[0] = atomic_inc((volatile __global int *)(arrived + slot)) == {self.split - 1};")
            text.line("rm_fence();")
        text.all(["barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);", "if (!last[0]) return;"])
        text.line("if (tid == 0) arrived[slot] = 0;")
        return " + ".join(f"all[{q * self.p.row_count * self.p.width} + e]" for q in range(self.split))

    @contextmanager
    def cell_loop(self) -> Iterator[None]:
        """Write a loop over the tile's cells ``e``, in row ``i`` and column ``j``."""
        p = self.p
        self.text.line(f"#pragma unroll {UNROLL}")
        with self.text.block(f"for (int e = tid; e < {p.row_count * p.width}; e += {self.threads})"):
            self.text.line(f"const int i = e / {p.width}, j = e % {p.width};")
            yield

    def write_maps(self, value: str, cells: AbstractContextManager[None]) -> str:
        """Write the maps after the sum ``value`` and the stores of ``cells``, by the core's emitter. Return the maps' tables."""
        p, text, axes = self.p, self.text, self.p.main.axes
        places = {a.tensor: place_of(a.tensor, f"p{k}", self.binding) for k, a in enumerate(self.arguments) if k >= 2}
        ranges: dict[str, Interval] = {f"x{d}": (0, a.extent - 1) for d, a in enumerate(axes)}
        unit = FunctionContext(GPU_DIALECT, self.binding.types, {c.name: c for c in p.after}, places, ranges)
        point = tuple(Ref(f"x{d}") for d in range(len(axes)))
        block = Block(unit)
        block.memo[Load(p.main.name, point)] = Val("sum", p.main.dtype, atom=True)
        for name in p.operator.outputs:
            block.store(places[name], point, block.unrounded(Load(name, point)), ())
        with cells:
            text.all(f"const int x{d} = o{d};" for d in range(len(axes)) if d not in (*p.rows, *p.columns))
            tests = [*self._coordinates(p.rows, "i"), *self._coordinates(p.columns, "j")]
            with text.block(f"if ({' && '.join(tests)})" if tests else ""):
                text.line(f"const float sum = {value};")
                text.all(block.lines)
        return "".join(unit.tables.values())

    def _coordinates(self, axes: Sequence[int], index: str) -> list[str]:
        """Define the coordinates of the tile's ``index`` along ``axes``; return the tests that they are inside."""
        p, tests = self.p, list[str]()
        for d, place in zip(axes, split_digits(index, [p.operator.tile[d] for d in axes]), strict=True):
            self.text.line(f"const int x{d} = o{d} + {place};")
            tests += [f"x{d} < {p.axis(d).extent}"] if p.axis(d).extent % p.operator.tile[d] else []
        return tests
