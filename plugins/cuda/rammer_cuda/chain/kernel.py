"""The ``gemm_chain`` family: a chain of matrix products (``chain.recognise``), 64 rows a warpgroup, entirely on chip.

A warpgroup's results are in registers in the order of the next product's operand (``warpgroup.RESULT_ORDER``). So only the first
operand, the last result and the weights are moved. Weights pass through a ring of ``stages`` shared-memory buffers, one layer
each. A thread starts each bulk copy as soon as every warp has left the buffer. Warpgroups run independently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from rammer.codegen import Argument, Block, Forms, FunctionContext, Text, Unsuited, format_sum, split_digits, weighted_terms
from rammer.device.manifest import Binding
from rammer.ir.expr import Interval, Load, Ref

from rammer_cuda.chain.recognise import Chain, Layer, chain_of
from rammer_cuda.contraction.warpgroup import wgmma_preamble
from rammer_cuda.device import device_source
from rammer_cuda.dialect import CUDA
from rammer_cuda.family import size_keys
from rammer_cuda.gpu import TARGETS, Gpu
from rammer_cuda.kernels.epilogue import write_epilogue
from rammer_cuda.kernels.task import TaskKernel, declare_parameter, origin_lines, place_of

#: Rows and threads of a warpgroup.
GROUP, THREADS = 64, 128
#: The SM that kernels are written for: all GPUs with warpgroup products have the same.
SM = TARGETS["sm_90a"]
#: Candidate numbers of warpgroups a block and of weight buffers.
GROUPS, STAGES = (4, 2, 3, 1), (6, 4, 3, 2)
#: Steps that tensor cores accumulate internally, which truncates.
CHUNK = 4
#: Bytes reserved for barriers, two for each layer.
BARRIERS = 1024
#: Cycles of a launch with its first weights and rows, of one product's tensor work per 8 columns, of its waits and conversions
#: per product, and of the maps per result of a thread: 38 us predicted, 41 us measured for 65,536 rows of 8 layers of 64 on an
#: H200.
START, MATRIX, LAYER, RESULT = 4500, 5.5, 500, 22
#: Bytes of weights that bulk copies bring an SM in a cycle (assumed, near the measured ``cost.L2_BYTES``).
MOVED = 24.0
#: Shared memory of each block that the system reserves (NVIDIA Hopper tuning guide: 1 KiB).
RESERVED = 1024


def _enumerate_tilings(chain: Chain, gpu: Gpu) -> Iterator[Chain]:
    """Yield tilings whose registers suffice, with the most buffers that fit and with fewer."""
    for groups in GROUPS:
        tiled = replace(chain.operator, tile=_tile_shape(chain, groups * GROUP), family="gemm_chain")
        most = min(len(chain.layers), max(s for s in (0, *STAGES) if _shared_bytes(chain, groups, s) <= gpu.shared))
        if groups * THREADS * chain.registers > gpu.registers or most < 2:
            continue
        for stages in sorted({most, min(most, 3), 2}):
            yield replace(chain, operator=replace(tiled, config=(("groups", groups), ("stages", stages))))


def _predict_seconds(chain: Chain, binding: Binding, gpu: Gpu) -> float:
    """Return the predicted seconds of all tasks, without the launch."""
    config = dict(chain.operator.config)
    groups, stages = config["groups"], config["stages"]
    resident = min(_resident_blocks(chain, groups, stages), -(-chain.operator.task_count // gpu.sms))
    rounds = -(-chain.operator.task_count // (gpu.sms * resident))
    tensor, alone = 0.0, 0.0
    for layer in chain.layers:
        depth, width = layer.padded
        work = MATRIX * 3 * depth / 8 * width / 8  # three tf32 products, each in steps of depth 8
        tensor += work * groups * resident
        alone += work + LAYER + RESULT * width / 2
    moved = sum(8 * math.prod(x.padded) for x in chain.layers) * resident / MOVED
    return (START + rounds * max(tensor, alone, moved)) / gpu.model_clock


def _resident_blocks(chain: Chain, groups: int, stages: int) -> int:
    """Return the number of blocks that an SM holds at once."""
    room, registers = _shared_bytes(chain, groups, stages) + RESERVED, groups * THREADS * chain.registers
    return max(1, min(SM.shared // room, SM.registers // registers))


def _shared_bytes(chain: Chain, groups: int, stages: int) -> int:
    """Return the bytes of shared memory: weights, barriers, and operands of the warpgroups after the first chunk."""
    parked = max(0, *(x.padded[0] // 8 - CHUNK for x in chain.layers)) * 16 * groups * THREADS
    return stages * chain.weights_bytes + BARRIERS + parked


def _tile_shape(chain: Chain, rows: int) -> tuple[int, ...]:
    """Return a tile of about ``rows`` rows: inner row axes whole, one split, the outer ones 1; the column axis whole."""
    shape, left = chain.operator.anchor.shape, rows
    tile = list(shape)
    for d in reversed(chain.rows):
        tile[d] = min(shape[d], max(left, 1))
        left //= max(shape[d], 1)
    return tuple(tile)


class _ChainText:
    def __init__(self, chain: Chain, binding: Binding) -> None:
        self.c, self.binding, self.text = chain, binding, Text()
        config = dict(chain.operator.config)
        self.groups, self.stages = config.get("groups", 2), min(config.get("stages", 2), len(chain.layers))
        if not 1 <= self.groups <= 8 or self.stages < 2 or chain.row_count > self.groups * GROUP:
            raise Unsuited(f"{chain.row_count} rows for {self.groups} warpgroups")
        if len(chain.layers) * 16 > BARRIERS:
            raise Unsuited(f"{len(chain.layers)} layers")
        inside = {c.name for c in chain.operator.computes}
        read = dict.fromkeys(t for x in chain.layers for c in x.maps for t in c.reads if t not in inside)
        self.arguments = [
            Argument(chain.first.tensor, False),
            *(Argument(x.weights.tensor, False, x.packing) for x in chain.layers),
            *(Argument(t, False) for t in read),
            *(Argument(t, True) for t in chain.operator.outputs),
        ]
        self.places = {
            a.tensor: place_of(a.tensor, f"p{k}", binding) for k, a in enumerate(self.arguments) if k and a.packing is None
        }
        self.tables: dict[str, str] = {}

    def kernel(self) -> TaskKernel:
        """Return the finished kernel."""
        threads, dynamic = self.groups * THREADS, _shared_bytes(self.c, self.groups, self.stages)
        self._write_origins()
        self._write_start()
        self._first()
        for number, layer in enumerate(self.c.layers):
            self._write_layer(number, layer)
        parameters = tuple(declare_parameter("float", a, k, self.binding) for k, a in enumerate(self.arguments))
        before = wgmma_preamble([x.padded[1] for x in self.c.layers]) + device_source("bulk_copy") + "".join(self.tables.values())
        shape = threads, dynamic, dynamic, 1, _resident_blocks(self.c, self.groups, self.stages)
        return TaskKernel("", before, parameters, str(self.text), tuple(self.arguments), *shape).named("g_")

    def _write_origins(self) -> None:
        text, o = self.text, self.c.operator
        text.line("// The task, and this thread's two rows.")
        text.line("const int tid = (int)threadIdx.x, lg = tid % 32 / 4, lt = tid % 4;")
        text.line("const int task = order ? order[blockIdx.x] : first + (int)blockIdx.x;")
        text.all(origin_lines(o))
        # Each thread has two rows at a distance of 8. Rows outside the result repeat the last one and are not stored.
        for h in (0, 1):
            text.line(f"const int row{h} = tid / 32 * 16 + lg + {8 * h};")
            tests = [f"row{h} < {self.c.row_count}"]
            for d, place in zip(self.c.rows, split_digits(f"row{h}", [o.tile[d] for d in self.c.rows]), strict=True):
                extent = o.anchor.axes[d].extent
                text.line(f"const int x{d}_{h} = min(o{d} + {place}, {extent - 1});")
                tests += [f"o{d} + {place} < {extent}"] if extent % o.tile[d] else []
            text.line(f"const bool inside{h} = {' && '.join(tests)};")

    def _write_start(self) -> None:
        """Write the barriers, and the copies of the first layers' weights: constants, which need not wait for earlier kernels."""
        text, layers, weights = self.text, self.c.layers, self.stages * self.c.weights_bytes
        text.line("// Barriers, and the weights of the first layers.")
        text.line("extern __shared__ __align__(128) float shared[];")
        text.line("const unsigned base = (unsigned)__cvta_generic_to_shared(shared);")
        text.line(f"float *const parked = shared + {(weights + BARRIERS) // 4} + tid;")
        text.line(f"const unsigned full = base + {weights}, empty = full + {8 * len(layers)};")
        with text.block("if (tid == 0)"):
            with text.block(f"for (int i = 0; i < {len(layers)}; ++i)"):
                text.line(f"rm_barrier_init(full + 8 * i, 1); rm_barrier_init(empty + 8 * i, {self.groups * 4});")
            text.line("rm_barriers_made();")
            text.all(self._load(k) for k in range(self.stages))
        text.all(["__syncthreads();", "rm_after();"])

    def _load(self, number: int) -> str:
        """Return the start of the copy of a layer's weights into its buffer."""
        bytes_ = 8 * math.prod(self.c.layers[number].padded)
        return f"rm_bulk(base + {number % self.stages * self.c.weights_bytes}, p{number + 1}, {bytes_}, full + {8 * number});"

    def _first(self) -> None:
        """Write the loads of the first operand into ``in0``: for every 8 products four values of the thread's two rows."""
        o, layer, text = self.c.first, self.c.layers[0], self.text
        steps = layer.padded[0] // 8
        text.all(["// The first operand.", f"float in0[{CHUNK}][4];"])
        step = o.steps.get(layer.inner.name, 0)
        others = [s for a, s in o.steps.items() if a != layer.inner.name]
        pairs = step == 1 and o.aligned and layer.inner.extent % 2 == 0 and all(s % 2 == 0 for s in (*others, o.constant))
        for h in (0, 1):
            names = {a.name: f"x{d}_{h}" for d, a in enumerate(layer.main.axes) if d != self.c.column}
            text.line(f"const float *const from{h} = p0 + ({format_sum(weighted_terms(o.steps, names), o.constant)});")
        text.line("#pragma unroll")
        with text.block(f"for (int s = 0; s < {steps}; ++s)"):
            text.line("const int k = s * 8 + lt * 2;")
            for h in (0, 1):
                if pairs:
                    test = f"k < {layer.inner.extent}"
                    text.line(f"const float2 w{h} = {test} ? *(const float2 *)(from{h} + k) : make_float2(0.0f, 0.0f);")
                    text.line(self._store_operand(0, str(h), f"w{h}.x"))
                    text.line(self._store_operand(0, str(h + 2), f"w{h}.y"))
                    continue
                for e in (0, 1):
                    value = f"(k + {e} < {layer.inner.extent} ? from{h}[(k + {e}) * {step}] : 0.0f)"
                    text.line(self._store_operand(0, str(h + 2 * e), value))

    def _write_layer(self, number: int, layer: Layer) -> None:
        text, (depth, width) = self.text, layer.padded
        text.all([f"// Layer {number}: products.", f"float d{number}[{width // 2}];"])
        for first in range(0, depth // 8, CHUNK):
            with text.block(""):
                self._products(number, layer, first)
        last = number == len(self.c.layers) - 1
        if number + self.stages < len(self.c.layers):
            text.line(f"if (tid % 32 == 0) rm_barrier_arrive(empty + {8 * number});")
        # The buffer of the previous layer: most warps have left it by now.
        previous = number - 1
        if previous >= 0 and previous + self.stages < len(self.c.layers):
            with text.block("if (tid == 0)"):
                text.all([f"rm_barrier_wait(empty + {8 * previous}, 0);", self._load(previous + self.stages)])
        text.line(f"// Layer {number}: maps{'' if last else ', into the next operand'}.")
        if not last:
            text.line(f"float in{number + 1}[{CHUNK}][4];")
        self._write_results(number, layer, last)

    def _products(self, number: int, layer: Layer, first: int) -> None:
        """Write the products of a chunk of the operand that begins at step ``first``."""
        text, (depth, width) = self.text, layer.padded
        steps = min(CHUNK, depth // 8 - first)
        place, target = f"shared + {number % self.stages * self.c.weights_bytes // 4}", "part" if first else f"d{number}"
        text.line(f"unsigned big[{steps}][4], small[{steps}][4];")
        text.all(["#pragma unroll", f"for (int s = 0; s < {steps}; ++s)", "#pragma unroll", "for (int e = 0; e < 4; ++e)"])
        text.line(f"  rm_halves({self._value(number, f's + {first}', 'e', parked=first > 0)}, big[s][e], small[s][e]);")
        text.line(f"float part[{width // 2}];" if first else f"rm_barrier_wait(full + {8 * number}, 0);")
        text.line(f"rm_products{width}({target}, big, small, rm_matrix({place} + {first * 8 * width}, {width}),")
        text.line(f"  rm_matrix({place} + {(depth + first * 8) * width}, {width}));")
        text.all(["rm_warpgroup_wait<0>();", f"rm_pin({target}); rm_pin(big); rm_pin(small);"])
        if first:
            text.all(["#pragma unroll", f"for (int i = 0; i < {width // 2}; ++i) d{number}[i] += part[i];"])

    def _value(self, number: int, step: str, slot: str, parked: bool) -> str:
        """Return the location of an operand's value: registers for the first chunk, shared memory for later ones."""
        if not parked:
            return f"in{number}[{step}][{slot}]"
        return f"parked[(({step} - {CHUNK}) * 4 + {slot}) * {self.groups * THREADS}]"

    def _store_operand(self, number: int, slot: str, value: str) -> str:
        """Return the store of ``value`` as the next operand's, in the unrolled loop over ``s``."""
        here, there = self._value(number, f"min(s, {CHUNK - 1})", slot, False), self._value(number, "s", slot, True)
        return f"if (s < {CHUNK}) {here} = {value}; else {there} = {value};"

    def _write_results(self, number: int, layer: Layer, last: bool) -> None:
        """Write the maps on every result of the thread, into the next operand or to memory."""
        text, column = self.text, self.c.column
        # Loads that depend on the column wait for the products: registers are scarce until then.
        text.all([f"int at{number} = lt * 2;", f'asm volatile("" : "+r"(at{number}) :: "memory");', "#pragma unroll"])
        with text.block(f"for (int s = 0; s < {layer.padded[1] // 8}; ++s)"):
            text.line("#pragma unroll")
            with text.block("for (int e = 0; e < 4; ++e)"):
                text.line(f"const int x{column} = s * 8 + at{number} + e % 2;")
                text.all(f"const int x{d} = e / 2 ? x{d}_1 : x{d}_0;" for d in self.c.rows)
                inside = f"x{column} < {layer.column.extent}" if layer.column.extent % 8 else ""
                lines, value = self._emit_maps(number, layer, last)
                if last:
                    text.line(f"if (!((e / 2 ? inside1 : inside0){f' && {inside}' if inside else ''})) continue;")
                    text.all(lines)
                else:
                    # Result e is value (e / 2, e % 2) of (row, column); an operand's values are (e % 2, e / 2).
                    text.line("float next = 0.0f;")
                    with text.block(f"if ({inside})" if inside else ""):
                        text.all([*lines, f"next = {value};"])
                    text.line(self._store_operand(number + 1, "e / 2 + e % 2 * 2", "next"))

    def _emit_maps(self, number: int, layer: Layer, last: bool) -> tuple[list[str], str]:
        """Return the statements of the maps at one point, including the last layer's stores, and the value for the next layer."""
        point = tuple(Ref(f"x{d}") for d in range(len(layer.main.axes)))
        ranges: dict[str, Interval] = {f"x{d}": (0, a.extent - 1) for d, a in enumerate(layer.main.axes)}
        unit = FunctionContext(CUDA, self.binding.types, {c.name: c for c in layer.maps}, self.places, ranges)
        block = Block(unit)
        write_epilogue(block, self.places, Load(layer.main.name, point), "sum", "float32", [layer.last] if last else [])
        value = "" if last else block.load(Load(layer.last, point)).text
        self.tables |= unit.tables
        return [f"const float sum = d{number}[s * 4 + e];", *block.lines], value


_FORMS: Final = Forms(chain_of, _enumerate_tilings, _predict_seconds, lambda chain, binding: _ChainText(chain, binding).kernel())
CHAIN: Final = replace(
    _FORMS.family("gemm_chain", size_keys("groups", "stages")),
    supported_by=lambda gpu: gpu.warpgroups,
    max_candidates=1 << 10,
    exclusive=lambda *operator: True,
    keeps_operand_on_chip=True,
    fused_forms=frozenset({"trailing maps", "further sums"}),
)
