"""Warpgroup products (PTX ``wgmma``, sm_90a) as values: tf32 with operand A in registers, float16 with both in shared memory.

Three tf32 products replace one of fp32: ``x = big + small`` with ``big`` rounded to tf32's 11 bits. ``small`` then has at most 12
bits, of which the tensor core drops the last. ``small * small`` is below fp32's last bit. Tensor cores truncate when they add.
Sums stay in them for a few products only, the small ones first, and are then added to fp32 sums outside. If one product replaces
one, sums stay on the tensor cores, and constants are rounded and arranged at load time.

Shared memory has the layout without swizzle: core matrices of 8 x 16 bytes (PTX ISA, "Strides", "Canonical Layouts", "Matrix
Descriptor Format"). Matrices of neighbouring columns follow each other; those of the next products come after all columns. One
descriptor therefore fits either order inside a core matrix: rows of one column's products, or of one product's columns (float16
alone, with the transposing bit). In float16 neither operand has to be constant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

import numpy as np

from rammer.codegen import BYTE, Product, Text, Unsuited
from rammer.codegen.products import Depth, Shape, Staged
from rammer.device.manifest import Array

from rammer_cuda.contraction.block import GROUP, MOST, THREADS, WarpgroupShape, warpgroup_shape
from rammer_cuda.contraction.halo import InputHalo
from rammer_cuda.contraction.instruction import EVERY, LOWER, Form, Fragment, Instruction
from rammer_cuda.contraction.staging import BYTE_CORES, FLOAT32_CORES, HALF_CORES, TF32_CORES, WORDS
from rammer_cuda.device import device_source, fill_template
from rammer_cuda.gpu import Gpu

#: The order of products within 8 in which a result's registers serve as the next product's operand. Lane t holds columns 2t and
#: 2t + 1 of a result, and products t and t + 4 of an operand.
RESULT_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class ProductLoop(Protocol):
    """The loop of the multiplying warpgroups, as an instruction writes it (``kernel.Producers``)."""

    @property
    def s(self) -> WarpgroupShape: ...
    @property
    def i(self) -> Wgmma: ...
    @property
    def text(self) -> Text: ...
    @property
    def depth(self) -> Depth: ...
    @property
    def read(self) -> Staged: ...
    @property
    def matrix(self) -> Staged: ...
    @property
    def halo(self) -> InputHalo | None: ...
    @property
    def whole(self) -> int: ...
    @property
    def turned(self) -> tuple[bool, bool]: ...
    @property
    def signed(self) -> tuple[bool, bool]: ...
    def blocks(self) -> AbstractContextManager[None]: ...
    def complete(self) -> list[str]: ...
    def release(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Wgmma(Instruction):
    """A product of 64 rows (or, transposed, columns) by all columns (rows) of the other operand; the form has 8 of them.

    ``staged`` lists the operand that warpgroups divide and the other operand. The latter is a constant if ``constant`` is set,
    and a block needs ``parts`` arrays of it. ``loop`` writes the code of multiplying warpgroups. ``channels`` is
    ``InputHalo.unroll``.
    """

    loop: Callable[[ProductLoop], None]
    constant: bool
    parts: int
    channels: int = 0
    unroll: ClassVar[int] = 8

    def needs(self, gpu: Gpu) -> bool:
        """Return True if the GPU has the instruction."""
        return gpu.warpgroups

    def runs_down(self, p: Product) -> bool:
        """Return True if warpgroups divide the rows. Raises Unsuited if a constant operand is needed and not exactly one is
        packable."""
        if not self.constant:
            return bool(dict(p.operator.config).get("down", 1))
        a, b = (o.packable and len(axes) <= 1 for o, axes in ((p.a, p.rows), (p.b, p.columns)))
        if a == b:
            raise Unsuited("not one constant operand")
        return b

    def block(self, p: Product) -> WarpgroupShape:
        """Return the block of a tiled product under its config."""
        config = dict(p.operator.config)
        return warpgroup_shape(p.row_count, p.width, config, self.runs_down(p), self.most, self.dtype == BYTE)

    @property
    def most(self) -> int:
        """The most columns (rows) of the undivided side."""
        return 2 * MOST if self.dtype == "float16" else MOST

    def check(self, s: Shape) -> None:
        """Raise Unsuited if ``s`` is an impossible block."""
        assert isinstance(s, WarpgroupShape)
        if s.halo and self.form.a is None:
            raise Unsuited("halos are for operands in registers")
        if s.bk % self.form.k or s.stages < 3 or not 32 <= s.threads <= 1024:
            raise Unsuited(f"blocks of {s.bk} products in {s.stages} buffers, {s.threads} threads")

    def line(self, width: int) -> int:
        """Return the elements from one row of the finished tile in shared memory to the next. In float16 they are 8 or 24 (mod
        32), so that at most two stores of a warp reach one bank. Other types were not measured with that."""
        return width + (8 - width) % 16 if self.dtype == "float16" else width

    def sums(self, s: Shape) -> str:
        """Return the extents of a thread's sums."""
        return f"[1][{s.tn}]"

    def products(self, fixed: int, turned: tuple[bool, bool], signed: tuple[bool, bool]) -> str:
        """Return device functions for ``fixed`` columns and operands that are ``turned`` (transposed) or ``signed`` (bytes)."""
        if self.dtype == BYTE:
            return byte_preamble(fixed, signed)
        return half_preamble(fixed, turned) if self.form.a is None else wgmma_preamble([fixed])

    def leave(self, s: Shape, line: int) -> list[str]:
        """Return the lines that store the registers to shared memory, the tile's rows as rows."""
        assert isinstance(s, WarpgroupShape)
        row, column = (" + ".join(side) for side in (self.form.c.rows, self.form.c.columns))
        place = f"({row}) * {line} + j * 8 + {column}" if s.down else f"(j * 8 + {column}) * {line} + {row}"
        return [
            "const int warp = tid / 32, lg = tid % 32 / 4, lt = tid % 4;",
            "#pragma unroll",
            f"for (int j = 0; j < {s.fixed // 8}; ++j)",
            "#pragma unroll",
            "for (int e = 0; e < 4; ++e)",
            f"  {self.totals}[{place}] = acc[0][j * 4 + e];",
        ]


@dataclass(frozen=True, slots=True)
class Registers:
    """The code that reads a block of the operand in registers: the wait, the start address and the release. ``steps`` is the
    number of instructions, ``pitch`` the elements from one product to the next, ``element`` the offset of element e."""

    wait: tuple[str, ...]
    place: str
    leave: tuple[str, ...]
    steps: int
    pitch: int
    element: str
    k: str

    def read(self, statement: str) -> list[str]:
        """Return the lines of ``statement`` with ``{element}`` for every register ``[s][e]``."""
        element = f"at[(s * 8 + {self.k}) * {self.pitch} + {self.element}]"
        return [
            "#pragma unroll",
            f"for (int s = 0; s < {self.steps}; ++s)",
            "#pragma unroll",
            "for (int e = 0; e < 4; ++e)",
            f"  {statement.format(element=element)}",
        ]


def _register_reads(k: ProductLoop, held: Fragment) -> Registers:
    """Return the code that reads this thread's elements of the operand in registers; write the part that all blocks share."""
    text, n, s, halo = k.text, k.read, k.s, k.halo
    (row, other), (inner, step) = held.rows, held.columns
    text.line("const int warp = tid / 32, lg = tid % 32 / 4, lt = tid % 4;")
    if halo is None:
        place = f"const float *const at = {n.name}shared + (slot * {s.bk} + {inner}) * {n.pitch} + {row};"
        return Registers((), place, (), s.bk // 8, n.pitch, other, step)
    for h in (0, 1):
        text.line(f"const int row{h} = min({row} + {8 * h}, {n.count - 1});")
        text.line(f"const int at{h} = {halo.place(f'row{h}')} + {inner} * {halo.pitch};")
    wait = (
        f"const int turn = kb / {halo.taps} - begin / {halo.taps}, tap = kb % {halo.taps};",
        "if (i == 0 || tap == 0) rm_barrier_wait(halo_full + turn % 2 * 8, turn / 2 & 1);",
    )
    place = f"const float *const at = {n.name}shared + turn % 2 * {s.bk * halo.pitch} + {halo.tap('tap')};"
    leave = f"if (tid % 32 == 0 && tap == {halo.taps - 1}) rm_barrier_arrive(halo_empty + turn % 2 * 8);"
    return Registers(wait, place, (leave,), s.bk // 8, halo.pitch, "(e % 2 ? at1 : at0)", step)


def three_products(k: ProductLoop) -> None:
    """Write three products for one, with each warpgroup at an independent pace."""
    s, steps, m, text = k.s, k.s.bk // 8, k.matrix, k.text
    groups, fixed = s.works // THREADS, s.fixed
    held = _register_reads(k, WORDS_A)
    turn, pass_on = list[str](), list[str]()
    if groups > 1:
        # Warpgroups alternate. Otherwise their products would interleave, and then all of them would convert at once.
        some = " && begin < end" if k.depth.stops else ""  # a run may leave a block of a cluster without products
        text.all(["const int mine = tid / 128 + 1;", f"if (mine == {groups}{some}) rm_turn_pass(1);"])
        turn = ["rm_turn_wait(mine);"]
        pass_on = [f"if (kb + 1 < end || mine < {groups}) rm_turn_pass(mine == {groups} ? 1 : mine + 1);"]
    with k.blocks():
        text.all(
            [
                *held.wait,
                *k.complete(),
                held.place,
                f"unsigned big[{steps}][4], small[{steps}][4];",
                *held.read("rm_halves({element}, big[s][e], small[s][e]);"),
                f"float part[{fixed // 2}];",
                *turn,
                f"rm_products{fixed}(part, big, small, rm_matrix({m.name}shared + slot * {k.whole}, {fixed}),",
                f"  rm_matrix({m.name}shared + (slot + {s.stages}) * {k.whole}, {fixed}));",
                *pass_on,
                "rm_warpgroup_wait<0>();",
                "rm_pin(big); rm_pin(small); rm_pin(part);",
                "if (tid % 32 == 0) rm_barrier_arrive(empty + 8 * slot);",
                *held.leave,
                "#pragma unroll",
                f"for (int j = 0; j < {fixed // 2}; ++j) acc[0][j] += part[j];",
            ]
        )


def one_product(k: ProductLoop) -> None:
    """Write the loop: wait for the previous block's products, read and round the next block, start its products.

    Reading earlier gains nothing while other warpgroups multiply, and is wrong. Products in flight read the operand's registers,
    which ptxas ignores when it loads the next values (ResNeXt-29 on an H200: an error of 2e-2 instead of 7e-4)."""
    text, s, m = k.text, k.s, k.matrix
    held = _register_reads(k, WORDS_A)
    text.line(f"unsigned held[{s.bk // 8}][4];")
    with k.blocks():
        text.all(
            [
                "rm_warpgroup_wait<0>();",
                k.release(),
                *held.wait,
                *k.complete(),
                held.place,
                *held.read("held[s][e] = rm_rounded({element});"),
                "rm_pin(held);",
                *held.leave,
                f"rm_products{s.fixed}(acc[0], held, rm_matrix({m.name}shared + slot * {k.whole}, {s.fixed}));",
            ]
        )
    text.all(["rm_warpgroup_wait<0>();", "rm_pin(acc[0]);"])


def from_shared(k: ProductLoop) -> None:
    """Write the loop for operands in shared memory: start a block's products, wait for those of the previous block."""
    text, s, r, m = k.text, k.s, k.read, k.matrix
    name = byte_name(s.fixed, k.signed) if k.i.dtype == BYTE else half_name(s.fixed, k.turned)
    call = f"rm_products_{name}<{s.bk // k.i.form.k}, {2 * s.through}, {2 * s.fixed}>"
    text.line("rm_pin(acc[0]);")  # zeros must be in registers before the first products, which the compiler cannot know
    with k.blocks():
        text.all(
            [
                *k.complete(),
                f"{call}(acc[0],",
                f"  rm_matrix({r.name}shared + slot * {r.size} + tid / {THREADS} * {GROUP * r.staging.lot}, {s.through}),",
                f"  rm_matrix({m.name}shared + slot * {k.whole}, {s.fixed}));",
                "rm_warpgroup_wait<1>();",
                k.release(),
            ]
        )
    text.all(["rm_warpgroup_wait<0>();", "rm_pin(acc[0]);"])


def wgmma_preamble(columns: Sequence[int]) -> str:
    """Return device functions for tf32 products of these numbers of columns (multiples of 8, at most 256)."""
    return device_source("wgmma") + "".join(_product_text(n) for n in sorted(set(columns)))


def _product_text(n: int) -> str:
    count = n // 2
    return fill_template(
        "wgmma_tf32",
        n=n,
        count=count,
        last=count + 5,
        matrix=count + 4,
        step=n * 8 * 4 // 16,
        operands=",".join(f"%{count + i}" for i in range(4)),
        **_sum_operands(count),
    )


def half_preamble(n: int, turned: tuple[bool, bool]) -> str:
    """Return the device function ``rm_products_{half_name}``: float16 products of ``n`` columns. ``turned`` is set per operand if
    neighbouring rows (or columns) are contiguous instead of neighbouring products."""
    count = n // 2
    return device_source("wgmma") + fill_template(
        "wgmma_f16",
        n=n,
        count=count,
        name=half_name(n, turned),
        first=count,
        second=count + 1,
        last=count + 2,
        ta=int(turned[0]),
        tb=int(turned[1]),
        **_sum_operands(count),
    )


def byte_preamble(n: int, signed: tuple[bool, bool]) -> str:
    """Return the device function ``rm_products_{byte_name}``: products of bytes of ``n`` columns, of either sign."""
    count = n // 2
    return device_source("wgmma") + fill_template(
        "wgmma_i8",
        n=n,
        count=count,
        name=byte_name(n, signed),
        first=count,
        second=count + 1,
        last=count + 2,
        ta="us"[signed[0]] + "8",
        tb="us"[signed[1]] + "8",
        **_sum_operands(count, "r"),
    )


def byte_name(n: int, signed: tuple[bool, bool]) -> str:
    """Return the name suffix of the byte product function."""
    return f"i8_{n}_{'us'[signed[0]]}{'us'[signed[1]]}"


def _sum_operands(count: int, kind: str = "f") -> dict[str, str]:
    """Return the sums as operands of an instruction, in registers of ``kind``."""
    outputs = ", ".join(f'"+{kind}"(d[{i}])' for i in range(count))
    return {"results": ",".join(f"%{i}" for i in range(count)), "outputs": outputs}


def half_name(n: int, turned: tuple[bool, bool]) -> str:
    """Return the name suffix of the float16 product function."""
    return f"f16_{n}_{'nt'[turned[0]]}{'nt'[turned[1]]}"


def split_tf32(values: Array) -> tuple[Array, Array]:
    """Split float32 ``values`` into the part rounded to tf32 and the rest."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    big = ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)
    return big, values - big


#: Fragments of a warpgroup: results of 64 x 8, and an operand of 8 products in registers (PTX ISA, "Register Fragments").
RESULTS = Fragment(("warp * 16 + lg", "e / 2 * 8"), ("lt * 2", "e % 2"), 4)
WORDS_A = Fragment(("warp * 16 + lg", "e % 2 * 8"), ("lt", "e / 2 * 4"), 4)

OF_WORDS = Form(64, 8, 8, THREADS, WORDS_A, None, RESULTS)
#: Both operands in shared memory.
OF_PAIRS = Form(64, 8, 16, THREADS, None, None, RESULTS)
OF_FOURS = Form(64, 8, 32, THREADS, None, None, RESULTS)

WGMMA_TF32X3 = Wgmma("gemm_wgmma3", "float32", OF_WORDS, (WORDS, FLOAT32_CORES), ("float32",), three_products, True, 2)
WGMMA_TF32 = Wgmma("gemm_wgmma1", "float32", OF_WORDS, (WORDS, TF32_CORES), LOWER, one_product, True, 1, 8)
WGMMA_F16 = Wgmma("gemm_wgmma_f16", "float16", OF_PAIRS, (HALF_CORES, HALF_CORES), EVERY, from_shared, False, 1)
WGMMA_I8 = Wgmma("gemm_wgmma_i8", BYTE, OF_FOURS, (BYTE_CORES, BYTE_CORES), EVERY, from_shared, False, 1)

#: Warpgroup instructions by family.
WARPGROUPS: Final[Mapping[str, Wgmma]] = {i.name: i for i in (WGMMA_TF32X3, WGMMA_TF32, WGMMA_F16, WGMMA_I8)}
