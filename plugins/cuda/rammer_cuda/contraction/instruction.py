"""The instructions of products, each as a value: shape, threads, fragments, and staging of operands.

A fragment maps a thread's registers to elements of a matrix, as the C expressions that kernels use. Every form proves at
construction that its fragments cover its matrices exactly once. The tests execute instructions on the host with the same
fragments, so a wrong fragment changes results.

``FFMA`` is a product of one thread; ``MMA_*`` are a warp's products on tensor cores (PTX ``mma.sync``). Warpgroup products are in
``contraction.warpgroup``. The walk over the sum and its end, which all share, are in ``contraction.kernel``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Final

import numpy as np

from rammer.codegen import BYTE, Product, Unsuited, product_of
from rammer.codegen.products import PLAIN, Shape, Staged, Staging, Turned, shape_of
from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator

from rammer_cuda.contraction.staging import BYTES, HALVES, TF32_TURNED, TF32_WORDS, WORDS
from rammer_cuda.device import device_source
from rammer_cuda.gpu import Gpu

#: Reduced precisions that users may allow for products of float32 operands. By default products are as exact as float32.
LOWER = ("tf32", "bfloat16")
EVERY = ("float32", *LOWER)


@dataclass(frozen=True, slots=True)
class Fragment:
    """The positions of a thread's ``elements`` in a matrix. Along either side, a position is the sum of the thread's part and the
    part of element ``e``. The thread's part depends on ``warp``, ``lg`` (lane / 4) and ``lt`` (lane % 4)."""

    rows: tuple[str, str]
    columns: tuple[str, str]
    elements: int

    def places(self, threads: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (thread, element, row, column) of all elements in ``threads`` threads."""
        thread, e = (n.reshape(-1) for n in np.indices((threads, self.elements)))
        known = {"warp": thread // 32, "lg": thread % 32 // 4, "lt": thread % 4, "e": e}
        sides = (eval(" + ".join(side).replace("/", "//"), {}, known) for side in (self.rows, self.columns))
        yield from zip(*(np.broadcast_to(n, thread.shape).tolist() for n in (thread, e, *sides)), strict=True)

    def prove(self, threads: int, rows: int, columns: int) -> None:
        """Raise ValueError unless ``threads`` threads hold every element of ``rows x columns`` once."""
        held = Counter((row, column) for _, _, row, column in self.places(threads))
        if held != Counter(product(range(rows), range(columns))):
            raise ValueError(f"{self} of {threads} threads does not cover {rows} x {columns} once")


@dataclass(frozen=True, slots=True)
class Form:
    """An instruction shape: ``threads`` threads add ``k`` products to each of ``m x n`` sums. ``a``, ``b`` and ``c`` are the
    fragments of the matrices in registers."""

    m: int
    n: int
    k: int
    threads: int
    a: Fragment | None
    b: Fragment | None
    c: Fragment

    def __post_init__(self) -> None:
        for held, rows, columns in ((self.a, self.m, self.k), (self.b, self.k, self.n), (self.c, self.m, self.n)):
            if held is not None:
                held.prove(self.threads, rows, columns)


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction and its kernel family.

    ``name`` is the kernel family's. ``dtype`` is that of operands in memory ("int8": bytes of either sign). ``staged`` is the
    staging of both in shared memory. ``precisions`` are the supported precisions of products."""

    name: str
    dtype: str
    form: Form
    staged: tuple[Staging, Staging]
    precisions: tuple[str, ...]
    #: Rows of the epilogue in flight.
    unroll: ClassVar[int] = 4

    @property
    def lanes(self) -> int:
        """The threads that multiply together."""
        return self.form.threads

    @property
    def depth(self) -> int:
        """The products that are added at a time."""
        return self.form.k

    @property
    def item(self) -> int:
        """Bytes of an element in shared memory."""
        return self.staged[0].item

    def needs(self, gpu: Gpu) -> bool:
        """Return True if a GPU has the copies of the ring. GPUs with these copies have all warp instructions."""
        return gpu.copies

    def serves(self, precision: str) -> bool:
        """Return True if the instruction supports ``precision``; float16 does not restrict float32 operands."""
        return (precision if precision in LOWER else "float32") in self.precisions

    @property
    def operand_rounding(self) -> str:
        """The format to which float32 operands are rounded, or "" if products are exact. The exact instructions are those that
        support float32."""
        return "" if "float32" in self.precisions else self.precisions[0]

    @property
    def number(self) -> str:
        """The C type of sums; sums of bytes are exact."""
        return "int" if self.dtype == BYTE else "float"

    @property
    def totals(self) -> str:
        """The sums in shared memory, as C text."""
        return "totals" if self.dtype == BYTE else "shared"

    @property
    def prologue(self) -> bool:
        """Return True if maps before the contraction are supported: on float32 elements, in shared memory."""
        return self.dtype == "float32"

    def product(self, operator: ROperator, binding: Binding) -> Product:
        """Return the matrix product of a tiled operator. Raise Unsuited for another form or other operands."""
        return product_of(operator, binding, self.dtype, prologue=self.prologue)

    def block(self, p: Product) -> Shape:
        """Return the block of a tiled product under its config."""
        return shape_of(p.row_count, p.width, dict(p.operator.config), self.form.threads > 1)

    def check(self, s: Shape) -> None:
        """Raise Unsuited if ``s`` is an impossible block."""
        if not 32 <= s.threads <= 1024 or s.bk % (s.slice_k * self.form.k):
            raise Unsuited(f"{s.threads} threads, {s.slice_k} slices of {s.bk}")


@dataclass(frozen=True, slots=True)
class Ffma(Instruction):
    """An FFMA instruction with ``tm x tn`` results a thread, from 16 bytes of either operand at a time."""

    device: ClassVar[str] = device_source("ffma")

    def line(self, width: int) -> int:
        """Return the elements from one row of the finished tile in shared memory to the next."""
        return width

    def sums(self, s: Shape) -> str:
        """Return the extents of a thread's sums."""
        return f"[{s.tm}][{s.tn}]"

    def places(self, s: Shape, a: Staged, b: Staged) -> list[str]:
        """Return the statements that define this thread's slice and position in the tile."""
        # Two neighbouring lanes share their columns and every other lane its rows: shared-memory reads of 16 bytes then merge
        # across half a warp.
        across = s.bn // s.tn
        return [
            f"const int worker = min(tid, {s.works - 1}), slice = worker / {s.group}, place = worker % {s.group};",
            f"const int tx = (place >> 1) % {across}, ty = (place & 1) + (place >> 1) / {across} * 2;",
        ]

    def multiply(self, s: Shape, a: Staged, b: Staged) -> list[str]:
        """Return the multiplication of one buffer of the ring into the registers."""
        part = s.bk // s.slice_k
        return [
            f"rm_multiply<{s.tm}, {s.tn}, {s.bm}, {s.bn}, {part}, {a.pitch}, {b.pitch}>(",
            f"  ashared + (use * {s.bk} + slice * {part}) * {a.pitch} + ty * 4,",
            f"  bshared + (use * {s.bk} + slice * {part}) * {b.pitch} + tx * 4, acc);",
        ]

    def leave(self, s: Shape, line: int) -> list[str]:
        """Return the stores of the registers to shared memory, row by row."""
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {s.tm}; ++i)",
            "#pragma unroll",
            f"for (int j = 0; j < {s.tn}; j += 4)",
            f"  *(float4 *)(shared + (slice * {s.bm} + ty * 4 + i % 4 + i / 4 * {s.bm // (s.tm // 4)}) * {line} + tx * 4"
            f" + j / 4 * {s.bn // (s.tn // 4)}) = *(float4 *)(acc[i] + j);",
        ]


@dataclass(frozen=True, slots=True)
class Mma(Instruction):
    """A tensor-core instruction with ``tm x tn`` fragments a warp.

    The device function ``function``, from ``files``, multiplies them. ``flags`` are its template arguments for the layout of both
    operands. With ``blocks``, ldmatrix reads the operands: every lane addresses one row."""

    function: str
    files: tuple[str, ...]
    flags: Callable[[Staged, Staged], tuple[bool, ...]] = lambda a, b: ()
    blocks: bool = False

    @property
    def device(self) -> str:
        """The text of the device files."""
        return device_source(*self.files)

    def line(self, width: int) -> int:
        """Return a row pitch of 8 or 24 (mod 32) elements: float2 stores of half a warp then reach every bank once."""
        return width + (8 - width) % 16

    def sums(self, s: Shape) -> str:
        """Return the extents of a thread's sums."""
        return f"[{s.tm}][{s.tn}][{self.form.c.elements}]"

    def places(self, s: Shape, a: Staged, b: Staged) -> list[str]:
        """Return this warp's part of the tile and this lane's part of a fragment. For operands that ldmatrix reads, the lane's
        part is its row."""
        across, part = s.bn // (8 * s.tn), s.bk // s.slice_k
        lines = [
            f"const int warp = tid / 32, slice = warp / {s.group // 32}, place = warp % {s.group // 32};",
            f"const int ty = place / {across} * {16 * s.tm}, tx = place % {across} * {8 * s.tn};",
            "const int lg = tid % 32 / 4, lt = tid % 4;",
        ]
        if self.blocks:
            # The blocks of A are (m, k), (m + 8, k), (m, k + 8), (m + 8, k + 8); those of B (k, n), (k + 8, n), (k, n + 8) and (k
            # + 8, n + 8): the layout determines the row that each lane addresses.
            lines.append("const int l8 = tid % 8, lb = tid / 8 % 2 * 8, lc = tid / 16 % 2 * 8;")
            wide = " * 2" if self.dtype == BYTE else ""  # 16 bytes of products
            for stage, own, across_, along in ((a, "ty", "lb", f"lc{wide}"), (b, "tx", "lc", f"lb{wide}")):
                row = f"({own} + l8 + {across_}) * {stage.pitch} + slice * {part} + {along}"
                turned = f"(slice * {part} + l8 + {along}) * {stage.pitch} + {own} + {across_}"
                lines.append(f"const int {stage.name}at = {row if isinstance(stage.arrangement, Turned) else turned};")
        elif isinstance(a.arrangement, Turned):
            lines.append(f"const int aat = (ty + tid % 16) * {a.pitch} + slice * {part} + tid / 16 % 2 * 4;")
        return lines

    def multiply(self, s: Shape, a: Staged, b: Staged) -> list[str]:
        """Return the multiplication of one buffer of the ring into the registers."""
        part = s.bk // s.slice_k
        flags = "".join(f", {str(f).lower()}" for f in self.flags(a, b))
        return [
            f"{self.function}<{s.tm}, {s.tn}, {part}, {a.pitch}, {b.pitch}{flags}>(",
            f"  ashared + {self._lane_place(s, a, 'lt', 'ty + lg')}, bshared + {self._lane_place(s, b, 'lt', 'tx + lg')}, acc);",
        ]

    def multiply_rows(self, s: Shape, halo: str, b: Staged) -> list[str]:
        """Return the multiplication of a tap: rows at the offsets ``ahalo`` from the address ``halo``."""
        _, turned = self.flags(b, b)
        return [
            f"rm_multiply_rows_f16<{s.tm}, {s.tn}, {s.bk // s.slice_k}, {b.pitch}, {str(turned).lower()}>(",
            f"  {halo}, ahalo, bshared + {self._lane_place(s, b, 'lt', 'tx + lg')}, acc);",
        ]

    def _lane_place(self, s: Shape, stage: Staged, k: str, e: str) -> str:
        """Return the start of this lane's reads in a buffer."""
        if self.blocks or isinstance(stage.arrangement, Turned):
            return f"use * {stage.size} + {stage.name}at"
        return f"(use * {s.bk} + slice * {s.bk // s.slice_k} + {k}) * {stage.pitch} + {e}"

    def leave(self, s: Shape, line: int) -> list[str]:
        """Return the stores of the registers to shared memory, two neighbours at a time."""
        (row, _), (column, _), pair = self.form.c.rows, self.form.c.columns, f"{self.number}2"
        return [
            "#pragma unroll",
            f"for (int i = 0; i < {s.tm}; ++i)",
            "#pragma unroll",
            f"for (int j = 0; j < {s.tn}; ++j)",
            "#pragma unroll",
            "for (int h = 0; h < 2; ++h)",
            f"  *({pair} *)({self.totals} + (slice * {s.bm} + ty + i * 16 + h * 8 + {row}) * {line} + tx + j * 8 + {column})"
            f" = make_{pair}(acc[i][j][2 * h], acc[i][j][2 * h + 1]);",
        ]


#: A single thread; results of a warp's 16 x 8; operands of 8 products of 4 bytes, and of 16 of 2 bytes (PTX ISA, "Matrix
#: Fragments for mma.m16n8k8" and "... mma.m16n8k16").
ONE = Fragment(("0", "0"), ("0", "0"), 1)
RESULTS = Fragment(("lg", "e / 2 * 8"), ("lt * 2", "e % 2"), 4)
WORDS_A, WORDS_B = Fragment(("lg", "e % 2 * 8"), ("lt", "e / 2 * 4"), 4), Fragment(("lt", "e * 4"), ("lg", "0"), 2)
PAIRS_A = Fragment(("lg", "e / 2 % 2 * 8"), ("lt * 2", "e % 2 + e / 4 * 8"), 8)
PAIRS_B = Fragment(("lt * 2", "e % 2 + e / 2 * 8"), ("lg", "0"), 4)
OF_WORDS = Form(16, 8, 8, 32, WORDS_A, WORDS_B, RESULTS)
OF_PAIRS = Form(16, 8, 16, 32, PAIRS_A, PAIRS_B, RESULTS)
#: Operands of 32 products of a byte ("Matrix Fragments for mma.m16n8k32").
FOURS_A = Fragment(("lg", "e / 4 % 2 * 8"), ("lt * 4", "e % 4 + e / 8 * 16"), 16)
FOURS_B = Fragment(("lt * 4", "e % 4 + e / 4 * 16"), ("lg", "0"), 8)
OF_FOURS = Form(16, 8, 32, 32, FOURS_A, FOURS_B, RESULTS)

FFMA = Ffma("gemm", "float32", Form(1, 1, 1, 1, ONE, ONE, ONE), (PLAIN, PLAIN), EVERY)
#: Three tf32 products for one of fp32, with an error of fp32's size.
MMA_TF32X3 = Mma("gemm_tf32x3", "float32", OF_WORDS, (WORDS, WORDS), ("float32",), "rm_multiply_tf32x3", ("mma", "mma_tf32x3"))
#: If the user allows it: one product, summed in float32 inside the tensor cores. Packed constants are rounded when a program is
#: loaded; constant rows have the layout of ldmatrix. All other operands are rounded on their way to registers (``cvt.rna``: to
#: nearest, halves away from zero).
MMA_TF32 = Mma(
    "gemm_tf32",
    "float32",
    OF_WORDS,
    (TF32_TURNED, TF32_WORDS),
    LOWER,
    "rm_multiply_tf32",
    ("mma", "mma_tf32"),
    lambda a, b: (a.packing is not None, b.packing is None),
)
#: float16 operands, float32 sums; ldmatrix reads either order of a block, one of them transposed.
MMA_F16 = Mma(
    "gemm_f16",
    "float16",
    OF_PAIRS,
    (HALVES, HALVES),
    EVERY,
    "rm_multiply_f16",
    ("mma", "mma_f16"),
    lambda a, b: (a.deep, b.deep),
    blocks=True,
)
#: If the user allows it: float32 operands, rounded to bfloat16 on their way to registers; float32 sums.
MMA_BF16 = Mma("gemm_bf16", "float32", OF_PAIRS, (WORDS, WORDS), ("bfloat16",), "rm_multiply_bf16", ("mma_bf16",))
#: Bytes with or without signs, of either operand; exact sums in int32.
MMA_I8 = Mma(
    "gemm_i8",
    BYTE,
    OF_FOURS,
    (BYTES, BYTES),
    EVERY,
    "rm_multiply_i8",
    ("mma", "mma_i8"),
    lambda a, b: (a.operand.signed, b.operand.signed),
    blocks=True,
)

#: Ring instructions by family name.
RING: Final[Mapping[str, Any]] = {i.name: i for i in (FFMA, MMA_TF32X3, MMA_TF32, MMA_F16, MMA_BF16, MMA_I8)}
