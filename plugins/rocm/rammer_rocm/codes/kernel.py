"""The ``codes`` family: products of floats with weights quantised to a few bits, as panels of words.

A 32-bit word holds neighbouring weights of one column along the reduction. A vector of words covers one column per lane. In
registers a quantised value becomes the mantissa of a float with base 2**23. Subtracting 2**23 and the zero point yields an exact
number. Blocks begin at word boundaries. Few rows multiply the unscaled numbers and scale each block's sum; more rows share
numbers that are scaled first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rammer.codegen import (
    Packing,
    Unsuited,
    block_sizes,
    check_followers,
    in_tiles,
    make_packing,
    packing_key,
    pad_axis,
    write_in_blocks,
)
from rammer.codegen.vector_text import STORED
from rammer.device.manifest import Array, Binding
from rammer.ir.compute import Axis, Compute, Decoded
from rammer.ir.expr import Load, Ref
from rammer.ir.operator import ROperator

from rammer_rocm.dialect import CPU_DIALECT
from rammer_rocm.kernels.task import TaskFunction
from rammer_rocm.kernels.vector import check_maps, read_element, read_vector, vector_type
from rammer_rocm.panel.kernel import Panel
from rammer_rocm.panel.recognise import PanelOperand, PanelProduct, check_form, load_access

#: Maximum number of rows of a register tile that multiply unscaled numbers.
BARE = 4
#: Rows at multiples of this many elements share cache sets; more than FEW of them are copied.
SETS, FEW = 256, 4


@dataclass(frozen=True, slots=True)
class Words:
    """Packing of a column's quantised values into words. A column has ``blocks`` blocks of ``block`` values (``last`` in the last
    block), stored with ``bits`` bits each. ``bias`` is added to signed values."""

    bits: int
    bias: int
    block: int
    blocks: int
    last: int

    @staticmethod
    def of(product: Decoded, depth: int, kind: str) -> Words:
        """Return the word packing for sums of ``depth`` values with storage type ``kind``."""
        block = min(product.block, depth)
        blocks = -(-depth // block)
        signed = product.signed or kind == "int8"
        bias = 1 << product.bits - 1 if signed else 0
        return Words(product.bits, bias, block, blocks, depth - (blocks - 1) * block)

    @property
    def each(self) -> int:
        """Number of quantised values per word."""
        return 32 // self.bits

    @property
    def words(self) -> int:
        """Number of words per block."""
        return -(-self.block // self.each)

    @property
    def line(self) -> int:
        """Number of words per column."""
        return self.blocks * self.words

    def packed(self, lines: Array) -> Array:
        """Convert columns ``[.., bytes]``, as the model stores them, to words ``[.., line]``."""
        flips = np.uint32(sum(self.bias << place for place in range(0, 32, self.bits)))
        raw = np.ascontiguousarray(lines).view(np.uint8)
        if (self.blocks == 1 or self.block % self.each == 0) and raw.shape[-1] % 4 == 0:
            words = np.ascontiguousarray(raw).view("<u4").astype(np.uint32) ^ flips
            return pad_axis(words, words.ndim - 1, self.line)
        parts = raw[..., None] >> np.arange(0, 8, self.bits, dtype=np.uint8) & np.uint8((1 << self.bits) - 1)
        depth = (self.blocks - 1) * self.block + self.last
        codes = (parts.reshape(*raw.shape[:-1], -1)[..., :depth] ^ np.uint8(self.bias)).astype(np.uint32)
        axis = codes.ndim
        blocks = pad_axis(codes, axis - 1, self.blocks * self.block).reshape(*codes.shape[:-1], self.blocks, self.block)
        fours = pad_axis(blocks, axis, self.words * self.each).reshape(*codes.shape[:-1], self.line, self.each)
        return np.asarray((fours << np.arange(0, 32, self.bits, dtype=np.uint32)).sum(-1, dtype=np.uint32))


def check_codes(operator: ROperator, binding: Binding) -> Compute:
    """Return the dequantised product of an operator that ``codes`` panels can compute. Raises Unsuited with the reason."""
    main = check_form(operator)
    product = main.decoded
    if product is None or operator.computes[0] is not main:
        raise Unsuited("no product with codes")
    weights = {ld.tensor for ld in main.loads[1:]}
    if not weights <= set(binding.constants) or product.x.tensor in binding.constants:
        raise Unsuited("codes that are not constant, or constant rows")
    kinds = {binding.types[n].dtype for n in (*operator.inputs, *(c.name for c in operator.computes)) if n not in weights}
    kinds.add(binding.types[product.scale.tensor].dtype)
    if not kinds <= STORED.keys():
        raise Unsuited(f"{', '.join(sorted(kinds - STORED.keys()))} among its tensors")
    check_maps(operator)
    check_followers(main, operator.computes[1:])
    if any(ld.tensor in weights for c in operator.computes[1:] for ld in c.loads):
        raise Unsuited("maps that read the weights")
    load_access(product.x, binding)
    return main


def codes_product(operator: ROperator, binding: Binding) -> PanelProduct:
    """Return a tiled operator as a product with quantised columns. Raises Unsuited."""
    main = check_codes(operator, binding)
    product = main.decoded
    assert product is not None
    rows = [a.name for a, t in zip(main.axes, operator.tile, strict=True) if t > 1 and a.name != product.column]
    if len(rows) > 1:
        raise Unsuited("several row axes")
    row = rows[0] if rows else ""
    return PanelProduct(operator, main, product.x, product.codes, row, (product.column,), {}, operator.computes[1:])


def write_codes_task(product: PanelProduct, binding: Binding, lanes: int) -> TaskFunction:
    """Return the task function of a tiled quantised product with config ``mr`` (rows) and ``nv`` (vectors of ``lanes``). Raises
    Unsuited if it cannot be written."""
    return Codes(product, binding, lanes).function()


def words_of(p: PanelProduct, binding: Binding) -> Words:
    """Return the word packing of a product's quantised weights."""
    assert p.main.decoded is not None
    return Words.of(p.main.decoded, p.depth, binding.types[p.b.tensor].dtype)


def has_staged_rows(p: PanelProduct, binding: Binding) -> bool:
    """Return True if rows are copied to scratch first: they are not float32, or they share cache sets."""
    stride = load_access(p.a, binding).step(p.row) if p.row else 0
    return binding.types[p.a.tensor].dtype != "float32" or (p.rows > FEW and stride % SETS == 0)


class Codes(Panel):
    """A writer of one task function over words of quantised weights."""

    family, floats = "codes", False

    @property
    def product(self) -> Decoded:
        """The dequantised product that the kernel computes."""
        assert self.p.main.decoded is not None
        return self.p.main.decoded

    @property
    def words(self) -> Words:
        """The word packing of the quantised weights."""
        return words_of(self.p, self.binding)

    # --- operands -------------------------------------------------------------------------------

    def rows_operand(self) -> PanelOperand:
        """Return the rows in place, or copied contiguously as float32."""
        found = super().rows_operand()
        if not has_staged_rows(self.p, self.binding):
            return found
        text, lanes, depth, step = self.text, self.lanes, self.p.depth, found.steps[self.product.depth]
        pitch = -(-depth // lanes) * lanes + lanes
        self.scratch = self.p.rows * pitch * 4
        text.line("__global float *held = (__global float *)scratch;")
        with text.block("for (int i = 0; i < rows; ++i)"):
            text.line(f"__global const {found.spelling} *from = A + i * {found.row_step};")
            text.line(f"__global float *to = held + i * {pitch};")
            whole = depth // lanes * lanes if step == 1 else 0
            if whole:
                vector = read_vector(found.dtype, lanes, "from + k")
                text.line(f"for (int k = 0; k < {whole}; k += {lanes}) vstore{lanes}({vector}, 0, to + k);")
            text.line(f"for (int k = {whole}; k < {depth}; ++k) to[k] = {read_element(found.dtype, 'from', f'k * {step}')};")
        return PanelOperand("held", {self.product.depth: 1}, row_step=pitch)

    def columns_operand(self) -> PanelOperand:
        """Return the packed words, scales and zero points, each in the order of access."""
        words, product = self.words, self.product
        grain, column = Axis("grain__", words.blocks), Axis(product.column, self.p.extent[product.column])
        tile, unit = self.p.tile[column.name], self.nv * self.lanes
        tiles, size = -(-column.extent // tile), -(-tile // unit) * unit

        def arrange(lines: Array) -> Array:
            cut = in_tiles(lines[None], tile, unit).reshape(tiles, size // unit, unit, -1)
            return np.swapaxes(cut, -1, -2)

        def pointer(name: str, tensor: str, count: int, made: Packing) -> None:
            kind = CPU_DIALECT.types[made.dtype]
            place = f"(size_t)t_{column.name} * {size * count}"
            self.text.line(f"__global const {kind} *{name} = {self.pointer(tensor, packed=made)} + {place};")

        key = packing_key("codes", tile, unit, column.extent, words)
        packed = Packing(key, tiles * size * words.line, lambda values: arrange(words.packed(values)), "uint32")
        pointer("B", product.codes.tensor, words.line, packed)
        grains = [("S", product.scale, "float32")]
        if product.zero is not None:
            grains.append(("Z", product.zero, self.binding.types[product.zero.tensor].dtype))
        for name, load, kind in grains:
            by_block = Load(load.tensor, (load.indices[0], Ref(grain.name) if words.blocks > 1 else load.indices[1]))
            count = tiles * size * words.blocks
            made = make_packing(by_block, (column, grain), count, arrange, "grains", tile, unit, dtype=kind)
            pointer(name, load.tensor, words.blocks, made)
        return PanelOperand("B", {}, packed=True, dtype="uint32")

    # --- the microkernel ------------------------------------------------------------------------

    def pointers(self, a: PanelOperand, b: PanelOperand) -> None:
        """Write pointers ``b``, ``s`` and ``z`` to the first column, and ``a0``, ``a1``, ... to every row."""
        text, full, words = self.text, self.nv * self.lanes, self.words
        zero = self.product.zero
        kinds = [("uint", "b", "B", words.line), ("float", "s", "S", words.blocks)]
        if zero is not None:
            kinds.append((CPU_DIALECT.types[self.binding.types[zero.tensor].dtype], "z", "Z", words.blocks))
        for kind, name, start, count in kinds:
            text.line(f"__global const {kind} *{name} = {start} + c / {full} * {full * count} + c % {full};")
        for i in range(self.mr):
            # Rows past the end repeat the last row; they are never stored.
            text.line(f"__global const {a.spelling} *a{i} = {a.pointer} + min(r + {i}, rows - 1) * {a.row_step};")

    def multiply(self, a: PanelOperand, b: PanelOperand, nv: int) -> None:
        """Write the sum block by block."""
        text, words, kind = self.text, self.words, vector_type(self.lanes)
        for i in range(self.mr):
            text.line(f"{kind} {', '.join(f's{i}_{j} = 0' for j in range(nv))};")

        def walk(first: str, end: str) -> None:
            with text.block(f"for (int g = {first}; g < {end}; ++g)"):
                self._sum_block(a, nv)

        sizes = block_sizes(words.blocks, 1 if self.mr <= BARE else words.block)
        write_in_blocks(text, self._accumulator_names("s", nv), kind, sizes, ("0", str(words.blocks)), walk)
        for i in range(self.mr):
            text.line(" ".join(f"tile[{i * nv + j}] = s{i}_{j};" for j in range(nv)))

    def _accumulator_names(self, letter: str, nv: int) -> list[str]:
        """Return the names of a register tile's accumulators."""
        return [f"{letter}{i}_{j}" for i in range(self.mr) for j in range(nv)]

    def _sum_block(self, a: PanelOperand, nv: int) -> None:
        """Write the sums of block ``g``."""
        text, kind, lanes, full = self.text, vector_type(self.lanes), self.lanes, self.nv * self.lanes
        bare, many = self.mr <= BARE, range(nv)
        for j in many:
            text.line(f"const {kind} scale{j} = vload{lanes}({j}, s + g * {full});")
            if self.product.zero is not None:
                text.line(f"const {kind} zero{j} = convert_{kind}(vload{lanes}({j}, z + g * {full}));")
                if bare:
                    text.all(f"const {kind} zero{j}_{p} = zero{j} + {self._mantissa_offset(p)};" for p in self._places)
        if bare:
            text.all(f"{kind} {', '.join(f't{i}_{j} = 0' for j in many)};" for i in range(self.mr))
        self._walk_block(a, nv)
        if bare:
            each = [f"s{i}_{j} = fma(t{i}_{j}, scale{j}, s{i}_{j});" for i in range(self.mr) for j in many]
            text.line(" ".join(each))

    def _walk_block(self, a: PanelOperand, nv: int) -> None:
        """Write the loop over the words of block ``g``, then the values of a partial last word."""
        text, words = self.text, self.words
        sizes = {words.last} if words.blocks == 1 else {words.block, words.last}
        if len(sizes) == 1:
            text.line(f"const int count = {min(sizes)};")
        else:
            text.line(f"const int count = g < {words.blocks - 1} ? {words.block} : {words.last};")

        def walk(first: str, end: str) -> None:
            with text.block(f"for (int q = {first}; q < {end}; ++q)"):
                self._multiply_word(a, nv, str(words.each))

        sums = self._accumulator_names("t" if self.mr <= BARE else "s", nv)
        blocks = block_sizes(max(sizes) // words.each, words.each)
        write_in_blocks(text, sums, vector_type(self.lanes), blocks, ("0", f"count / {words.each}"), walk)
        if any(size % words.each for size in sizes):
            with text.block(f"if (count % {words.each})"):
                text.line(f"const int q = count / {words.each};")
                self._multiply_word(a, nv, f"count % {words.each}")

    def _multiply_word(self, a: PanelOperand, nv: int, count: str) -> None:
        """Write the products of ``count`` values of word ``q`` for every vector of columns."""
        text, words, lanes, full = self.text, self.words, self.lanes, self.nv * self.lanes
        for j in range(nv):
            text.line(f"{vector_type(lanes, 'uint')} w{j} = vload{lanes}({j}, b + (g * {words.words} + q) * {full});")
        if count != str(words.each):
            with text.block(f"for (int n = 0; n < {count}; ++n)"):
                self._multiply_code(a, nv, "n", 0)
                text.line(" ".join(f"w{j} >>= {words.bits}u;" for j in range(nv)))
            return
        for n in range(words.each):
            turn, place = divmod(n, len(self._places))
            if turn and not place:
                text.line(" ".join(f"w{j} >>= {self._places[-1] + words.bits}u;" for j in range(nv)))
            with text.block(""):
                self._multiply_code(a, nv, str(n), self._places[place])

    @property
    def _places(self) -> range:
        """The bit positions in a word from which a value can become a mantissa without a shift."""
        return range(0, 24 - self.words.bits, self.words.bits)

    def _mantissa_offset(self, place: int) -> str:
        """Return the float whose mantissa represents a quantised 0, including the bias."""
        return f"{float((1 << 23 - place) + self.words.bias)}f"

    def _multiply_code(self, a: PanelOperand, nv: int, n: str, place: int) -> None:
        """Multiply value number ``n`` of the words, which begins at bit ``place``."""
        text, words, kind = self.text, self.words, vector_type(self.lanes)
        bare, has_zero = self.mr <= BARE, self.product.zero is not None
        text.line(f"const int k = (g * {words.block} + q * {words.each} + {n}) * {a.steps[self.product.depth]};")
        mask, exponent = (1 << words.bits) - 1 << place, 150 - place << 23
        for j in range(nv):
            zero = f"zero{j}_{place}" if bare and has_zero else self._mantissa_offset(place)
            number = f"as_{kind}((w{j} & {mask}u) | {exponent}u) - {zero}"
            if not bare:
                number = f"({number}{f' - zero{j}' if has_zero else ''}) * scale{j}"
            text.line(f"const {kind} d{j} = {number};")
        sums = "t" if bare else "s"
        for i in range(self.mr):
            fmas = " ".join(f"{sums}{i}_{j} = fma(x, d{j}, {sums}{i}_{j});" for j in range(nv))
            text.line(f"{{ const {kind} x = {read_element(a.dtype, f'a{i}', 'k')}; {fmas} }}")
