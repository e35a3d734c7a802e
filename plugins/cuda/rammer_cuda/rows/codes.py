"""The ``codes`` family: a matrix of quantised values times one or a few float vectors, bound by the matrix's bytes.

Like ``gemv``, but a warp computes each strip of results. Its lanes load words of quantised values, 16 bytes at once for long
sums. Packed words alternate between lanes after four neighbours of a sum, so a warp reads vectors by whole lines. A quantised
value becomes the mantissa of a float with a power of two. Subtracting that power and the zero point is exact. Four products are
summed before their block's scale is applied. More than a few vectors become parallel tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from rammer.codegen import Forms, Packing, Unsuited, Val, check_followers, packing_key, pad_axis, preload_elements, stored_loads
from rammer.codegen.products import WARP, Strips, ceiling_quotient
from rammer.device.manifest import Array, Binding
from rammer.ir.compute import Decoded
from rammer.ir.expr import Load, integer
from rammer.ir.operator import ROperator

from rammer_cuda.family import size_keys
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.frame import Frame, join_lanes
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.rows.gemv import BLOCKS, COLUMNS, GemvKernel, MatVec

#: Vectors of a task, and neighbours of a sum that belong to one lane.
VECTORS, RUN = (1, 2, 4, 8), 4
#: Maximum sums of a thread.
MOST_SUMS = 16
#: Bits of a float's mantissa.
MANTISSA = 23
#: Element types of vectors and scales.
FLOATS: Final = ("float32", "float16")
#: Costs of a kernel besides its bytes: cycles before the first product, operations per quantised value and per product.
START, DECODING, PRODUCT = 1500, 3.0, 1.5


def codes_of(operator: ROperator, binding: Binding) -> MatVec:
    """Return the form of a product with quantised values. Raises Unsuited with the reason if it does not apply."""
    main = operator.main
    d = main.decoded
    if d is None or operator.computes[0] is not main or 0 in main.shape:
        raise Unsuited("no product with codes")
    check_followers(main, operator.computes[1:])
    weights = {ld.tensor for ld in main.loads[1:]}
    if not weights <= set(binding.constants) or any(ld.tensor in weights for c in operator.computes[1:] for ld in c.loads):
        raise Unsuited("codes that are not constant, or that maps also read")
    if {binding.types[n].dtype for n in (d.x.tensor, d.scale.tensor)} - {*FLOATS} or main.dtype not in FLOATS:
        raise Unsuited("neither float32 nor float16")
    if main.reduce[0].extent % RUN or (d.block % RUN and d.block < main.reduce[0].extent):
        raise Unsuited("a sum or a block whose length is not a multiple of 4")
    column = next(i for i, a in enumerate(main.axes) if a.name == d.column)
    rows = tuple(i for i in range(len(main.axes)) if i != column)
    return MatVec(operator, main, d.codes, d.x, (column,), rows)


def decoded_product(m: MatVec) -> Decoded:
    """Return the decoded product of the main Compute."""
    assert m.main.decoded is not None
    return m.main.decoded


def words_per_load(m: MatVec) -> int:
    """Return the words of quantised values that a lane loads at once."""
    each = WARP * 32 // decoded_product(m).bits
    return next((n for n in (4, 2) if m.depth % (n * each) == 0), 1)


def steps_along(m: MatVec) -> int:
    """Return the number of loads of a lane for one result."""
    return -(-m.depth // (words_per_load(m) * WARP * 32 // decoded_product(m).bits))


def packing_of(m: MatVec, kind: str) -> Packing:
    """Return the packing of quantised values as unsigned bytes ``[columns, loads, lanes, words]``. Groups of four along a sum are
    dealt to the lanes in rotation."""
    d, depth, wide, loads = decoded_product(m), m.depth, words_per_load(m), steps_along(m)
    bias = _code_bias(d, kind)
    columns = m.main.axes[m.many[0]].extent
    groups = wide * 32 // d.bits // RUN

    def make(values: Array) -> Array:
        runs = np.ascontiguousarray(values).view(f"<u{d.bits * RUN // 8}")
        flips = sum(bias << place for place in range(0, d.bits * RUN, d.bits))
        whole = pad_axis(runs ^ runs.dtype.type(flips), 1, loads * groups * WARP)
        return np.ascontiguousarray(np.swapaxes(whole.reshape(columns, loads, groups, WARP), 2, 3)).view(np.uint8)

    key = packing_key("dealt codes", columns, depth, d.bits, bias, wide, loads)
    return Packing(key, columns * loads * WARP * wide * 4, make, "uint8")


def _code_bias(d: Decoded, kind: str) -> int:
    return 1 << d.bits - 1 if d.signed or kind == "int8" else 0


class CodesKernel(GemvKernel):
    """A kernel over words of quantised values; the code around the sums is that of ``gemv``."""

    def __init__(self, m: MatVec, binding: Binding) -> None:
        config = dict(m.operator.config)
        tile = [m.operator.tile[d] for d in range(len(m.main.axes))]
        tile[m.many[0]] = config.get("columns", 1)
        self.m, self.binding, self.lanes = m, binding, WARP
        self.strips = Strips(m.operator, tuple(tile))
        threads = self.strips.count * WARP
        if not self.strips.fits or self.strips.each > MOST_SUMS or threads > 1024:
            raise Unsuited(f"{threads} threads for strips of {self.strips.sizes}")
        joined = self.joined(m.vectors)
        if joined is None or joined[2] != 1:
            raise Unsuited("vectors that are not contiguous along the sum")
        kind = binding.types[m.matrix.tensor].dtype
        made, d = packing_of(m, kind), decoded_product(m)
        line = made.size // m.main.axes[m.many[0]].extent
        self.packing, self.matrix, self.vectors = made, ({d.column: line}, 0, 1), joined
        self.bias, self.signed = _code_bias(d, kind), kind == "int8"
        self.frame = Frame(m.operator, binding, {c.name: c for c in m.operator.computes[1:]}, threads, {m.matrix.tensor: made})
        self.block = self.frame.block

    def kernel(self) -> TaskKernel:
        f, s, m, d = self.frame, self.strips, self.m, decoded_product(self.m)
        self.deep = f.stop(m.main, m.main.reduce)
        f.line(f"const int lane = tid % {WARP}, group = tid / {WARP};")
        base = s.base(f, "group")
        points = s.points(base)
        self.columns, self.rows = self.distinct(points, self.matrix), self.distinct(points, self.vectors)
        strides = {ld: self.binding.storages[ld.tensor].strides[0] for ld in self._grain_loads()}
        self.grains = {
            ld: self.distinct(points, ({d.column: n if ld.indices[0] != integer(0) else 0}, 0, 1)) for ld, n in strides.items()
        }
        self.totals = [Val(f"sum{k}", "float32", atom=True) for k in range(s.each)]
        point = self.picked(base)
        reads = list(dict.fromkeys(ld for n in m.operator.outputs for ld in stored_loads(Load(n, point), f.inlined)))
        reads = [ld for ld in reads if ld.tensor in f.places]
        f.line("// The first words of codes, and what the maps read; constants before the wait for earlier kernels.")
        self._words("0", "h")
        preload_elements(self.block, f.constants(reads))
        f.line("rm_after();")
        preload_elements(self.block, reads)
        self.sum()
        join_lanes(f, m.main, self.totals, WARP)
        self.finish(point, [f"lane < {s.each}", *s.own(f, point)])
        return f.kernel("c_")

    def _grain_loads(self) -> list[Load]:
        """Return the loads of scales and zero points."""
        d = decoded_product(self.m)
        found = [d.scale] + ([d.zero] if d.zero is not None else [])
        if any(self.binding.storages[ld.tensor].strides[1] != 1 for ld in found):
            raise Unsuited("scales that are not stored block by block")
        return found

    # --- sums -----------------------------------------------------------------------------------

    def _words(self, turn: str, name: str, declare: bool = True) -> None:
        """Load the words of load number ``turn`` into ``{name}{column}``."""
        wide = words_per_load(self.m)
        kind = f"uint{wide}" if wide > 1 else "unsigned"
        pointer = self.frame.places[self.m.matrix.tensor].pointer
        for c, address in enumerate(self.columns):
            place = f"(const {kind} *)({pointer} + (size_t)({address})) + ({turn}) * {WARP} + lane"
            self.block.line(f"{f'{kind} ' if declare else ''}{name}{c} = *({place});")

    def sum(self) -> None:
        """Write the loads in order: the next one's words, then this one's products."""
        f, loads, wide = self.frame, steps_along(self.m), words_per_load(self.m)
        f.line("// Products and their sums.")
        self.block.lines += [f"float {t.text} = 0.0f;" for t in self.totals]
        groups = wide * 32 // decoded_product(self.m).bits // RUN
        turns = ceiling_quotient(self.deep, groups * WARP * RUN) if self.deep else str(loads)
        with f.scope(f"for (int turn = 0; turn < {turns}; ++turn)", "#pragma unroll 1"):
            for c in range(len(self.columns)):
                f.line(f"const {f'uint{wide}' if wide > 1 else 'unsigned'} w{c} = h{c};")
            with f.scope(f"if (turn + 1 < {turns})"):
                self._words("turn + 1", "h", declare=False)
            for g in range(groups):
                f.line(f"const int k{g} = (turn * {groups} + {g}) * {WARP * RUN} + lane * {RUN};")
                whole = loads * groups * WARP * RUN == self.m.depth and not self.deep
                with f.scope("" if whole else f"if (k{g} < {self.deep or self.m.depth})"):
                    self._multiply_four(g)

    def _multiply_four(self, g: int) -> None:
        """Write the products of group ``g``'s four values of every column with every vector."""
        f, d = self.frame, decoded_product(self.m)
        for r, address in enumerate(self.rows):
            self._load_vector(f"v{r}", f"{address} + k{g}")
        group = f"k{g} / {d.block}" if d.block < self.m.depth else "0"
        names = {}
        for prefix, (load, addresses) in zip(("scale", "zero"), self.grains.items(), strict=False):
            kind = self.binding.types[load.tensor].dtype
            pointer = self.frame.places[load.tensor].pointer
            for n, address in enumerate(addresses):
                place = f"{address} + {group}"
                text = f"rm_load_f16({pointer} + {place})" if kind == "float16" else f"(float){pointer}[{place}]"
                f.line(f"const float {prefix}{n} = {text};")
            names[prefix] = {k: f"{prefix}{n}" for n, ks in enumerate(addresses.values()) for k in ks}
        for c, ks in enumerate(self.columns.values()):
            zero = f" - {names['zero'][ks[0]]}" if "zero" in names else ""
            for i, part in enumerate("xyzw"):
                f.line(f"const float d{c}_{part} = {self._decode_value(c, g * RUN + i)}{zero};")
            for r, js in enumerate(self.rows.values()):
                for k in (k for k in ks if k in js):
                    total = f"v{r}.x * d{c}_x"
                    for part in "yzw":
                        total = f"fmaf(v{r}.{part}, d{c}_{part}, {total})"
                    f.line(f"sum{k} = fmaf({total}, {names['scale'][ks[0]]}, sum{k});")

    def _load_vector(self, name: str, place: str) -> None:
        """Load four neighbouring elements of a vector."""
        f, load = self.frame, self.m.vectors
        pointer, half = f.places[load.tensor].pointer, self.binding.types[load.tensor].dtype == "float16"
        assert self.vectors is not None
        if not self.wide(load, self.vectors):
            each = [f"rm_load_f16({pointer} + {place} + {i})" if half else f"{pointer}[{place} + {i}]" for i in range(RUN)]
        elif not half:
            f.line(f"const float4 {name} = *(const float4 *)({pointer} + {place});")
            return
        else:
            f.line(f"const uint2 {name}h = *(const uint2 *)({pointer} + {place});")
            parts = [f"(unsigned short)({name}h.{x}{s})" for x in "xy" for s in ("", " >> 16")]
            f.line(f"const unsigned short {name}e[{RUN}] = {{{', '.join(parts)}}};")
            each = [f"rm_load_f16({name}e + {i})" for i in range(RUN)]
        f.line(f"const float4 {name} = make_float4({', '.join(each)});")

    def _decode_value(self, c: int, j: int) -> str:
        """Return quantised value ``j`` of a lane's load for column ``c``, without its zero point."""
        bits = decoded_product(self.m).bits
        word, place = divmod(j * bits, 32)
        text = f"w{c}.{'xyzw'[word]}" if words_per_load(self.m) > 1 else f"w{c}"
        if place + bits > MANTISSA:
            base = MANTISSA // bits * bits
            text, place = f"({text} >> {base})", place - base
        mask, exponent = (1 << bits) - 1 << place, 127 + MANTISSA - place << MANTISSA
        return f"(__uint_as_float(({text} & {mask}u) | {exponent}u) - {float((1 << MANTISSA - place) + self.bias)}f)"


def _enumerate_tilings(m: MatVec, gpu: Gpu) -> Iterator[MatVec]:
    """Yield columns and vectors of a warp, and warps of a block."""
    live = [d for d in m.few if m.main.axes[d].extent > 1][-1:]
    count = m.main.axes[live[0]].extent if live else 1
    for columns in COLUMNS:
        for vectors in dict.fromkeys(min(v, count) for v in VECTORS):
            if columns * vectors > MOST_SUMS:
                continue
            config = (("columns", columns),)
            for threads in BLOCKS:
                tile = [vectors if d in live else 1 for d in range(len(m.main.axes))]
                tile[m.many[0]] = min(m.main.axes[m.many[0]].extent, threads // WARP * columns)
                here = replace(m, operator=replace(m.operator, tile=tuple(tile), family="codes", config=config))
                if tile[m.many[0]] >= columns:
                    yield here


def _predict_seconds(m: MatVec, binding: Binding, gpu: Gpu) -> float:
    d, tile = decoded_product(m), m.operator.tile
    vectors = math.prod(tile[r] for r in m.few)
    weights = m.depth * m.main.axes[m.many[0]].extent * math.prod(m.operator.grid[r] for r in m.few)
    size = weights * (d.bits / 8 + 5 / max(d.block, 1))
    operations = weights * (DECODING + PRODUCT * vectors + 1.0 / dict(m.operator.config).get("columns", 1))
    busy = operations / (WARP * RUN * gpu.sms * gpu.model_clock)
    return START / gpu.model_clock + max(size / gpu.bandwidth, busy)


CODES: Final = Forms(codes_of, _enumerate_tilings, _predict_seconds, lambda m, binding: CodesKernel(m, binding).kernel()).family(
    "codes", size_keys("columns")
)
