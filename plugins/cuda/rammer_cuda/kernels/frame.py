"""The common frame of thread-per-element kernel families: parameters, task origins, the finished text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rammer.codegen import Argument, Block, FunctionContext, Packing, Text, Unsuited, Val, affine_address, spell_type
from rammer.codegen.products import WARP, stopped_axes
from rammer.device.manifest import Binding
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Expr, Interval, Load, Ref
from rammer.ir.operator import ROperator

from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.lengths import length_names, with_lengths
from rammer_cuda.kernels.task import TaskKernel, place_of

#: Elements of one 16-byte load of float32.
VECTOR = 4


@dataclass
class Frame:
    """A kernel under construction: ``p0, p1, ...`` point at the operator's inputs, then its outputs.

    ``block`` collects the statements; Computes in ``inlined`` are computed at their reads. The task's origin along the anchor's
    axis ``k`` is ``o{k}``. ``device``, ``dynamic``, ``resident`` and ``blocks`` are the kernel's (``TaskKernel``). With several
    blocks per task, ``rank`` is the block's number.
    """

    operator: ROperator
    binding: Binding
    inlined: dict[str, Compute]
    threads: int
    packed: dict[str, Packing] = field(default_factory=dict)
    shared: int = 0
    dynamic: int = 0
    device: str = ""
    resident: int = 0
    blocks: int = 1
    stops: bool = field(default=False, init=False)  #: True if the kernel reads lengths of the run.

    def __post_init__(self) -> None:
        tensors = [(n, False) for n in self.operator.inputs] + [(n, True) for n in self.operator.outputs]
        self.arguments = tuple(Argument(n, written, self.packed.get(n)) for n, written in tensors)
        self.places = {a.tensor: place_of(a.tensor, f"p{k}", self.binding) for k, a in enumerate(self.arguments)}
        ranges: dict[str, Interval] = {}
        self.unit = FunctionContext(CUDA, self.binding.types, self.inlined, self.places, ranges)
        self.block = Block(self.unit)
        self._write_origins()

    def _write_origins(self) -> None:
        operator, below = self.operator, self.operator.task_count
        self.line("// The task, and where its tile begins.")
        self.line("const int tid = (int)threadIdx.x;")
        if self.blocks > 1:
            self.line(f"const int rank = (int)blockIdx.x % {self.blocks}, slot = (int)blockIdx.x / {self.blocks};")
        slot = "slot" if self.blocks > 1 else "(int)blockIdx.x"
        self.line(f"const int task = order ? order[{slot.removeprefix('(int)')}] : first + {slot};")
        for d, (tile, count) in enumerate(zip(operator.tile, operator.grid, strict=True)):
            below //= count
            place = f"task / {below} % {count}" if below > 1 else f"task % {count}"
            self.line(f"const int o{d} = {f'({place}) * {tile}' if count > 1 else '0'};")
            self.unit.ranges[f"o{d}"] = (0, (count - 1) * tile)

    def line(self, text: str) -> None:
        """Write one statement to the kernel."""
        self.block.line(text)

    @contextmanager
    def scope(self, head: str, *before: str, end: str = "}") -> Iterator[None]:
        """Enclose the statements written inside in a scope, after the lines ``before``."""
        self.block.lines += [*before, f"{head} {{"]
        yield
        self.line(end)

    def variable(self, name: str, text: str, extent: int) -> Ref:
        """Define an integer variable in ``[0, extent)``."""
        self.line(f"const int {name} = {text};")
        self.unit.ranges[name] = (0, max(extent - 1, 0))
        return Ref(name)

    def constants(self, loads: Sequence[Load]) -> list[Load]:
        """Return the ``loads`` that read values known at compile time."""
        return [ld for ld in loads if ld.tensor in self.binding.constants]

    def kernel(self, prefix: str) -> TaskKernel:
        """Return the finished kernel; its name is ``prefix`` and a hash of the text."""
        types = [spell_type(CUDA, self.binding.types[a.tensor].dtype) for a in self.arguments]
        constant = ("" if a.written else "const " for a in self.arguments)
        parameters = tuple(f"{c}{t} *p{k}" for k, (c, t) in enumerate(zip(constant, types, strict=True)))
        device = self.device + "".join(self.unit.tables.values())
        text = Text()
        text.all(line.lstrip() for line in self.block.lines)
        made = TaskKernel("", device, parameters, str(text), self.arguments, self.threads, self.shared, self.dynamic)
        made = replace(made, resident=self.resident, blocks=self.blocks)
        return (with_lengths(self.operator, made) if self.stops else made).named(prefix)

    def stop(self, c: Compute, axes: Sequence[Axis]) -> str:
        """Define a variable for the end of a run's products or elements along the joined ``axes`` of ``c``. Returns its name, or
        "" if they always extend to the bound."""
        live = [a for a in axes if a.extent > 1]
        found = stopped_axes(self.operator, c, live[:1], length_names(self.operator), CUDA)
        if not found:
            return ""
        self.stops, below = True, math.prod(a.extent for a in live[1:])
        (first,) = found.values()
        self.line(first.definition)
        self.line(f"const int deep = {first.name}{f' * {below}' if below > 1 else ''};")
        return "deep"


def steps_of(load: Load, strides: Sequence[int]) -> tuple[dict[str, int], int] | None:
    """Return the element address of ``load`` as ``(step by axis, constant)``, or None if it is not affine or padded."""
    if load.fill is not None:
        return None
    try:
        return affine_address(load, strides)
    except Unsuited:
        return None


def define_coordinates(frame: Frame, stem: str, index: str, extents: Sequence[int]) -> list[Expr]:
    """Define variables ``{stem}{k}``: the digits of the integer ``index`` in the mixed radix ``extents``."""
    result: list[Expr] = []
    below = 1
    for n in extents:
        below *= n
    for k, n in enumerate(extents):
        below //= n
        text = index if below == 1 else f"{index} / {below}"
        text = text if k == 0 else f"({text}) % {n}" if below > 1 else f"{text} % {n}"
        result.append(frame.variable(f"{stem}{k}", text, n))
    return result


def is_quad_aligned(load: Load, binding: Binding, along: set[str]) -> bool:
    """Return True if elements of ``load``, of float32 or float16, are adjacent along one of the axes ``along`` in fours. Every
    fourth element is at a multiple of the bytes of four."""
    storage = binding.storages[load.tensor]
    found = steps_of(load, storage.strides)
    if found is None or binding.types[load.tensor].dtype not in ("float32", "float16") or storage.offset % VECTOR:
        return False
    steps, constant = found
    ahead = [s for a, s in steps.items() if a in along]
    return ahead == [1] and constant % VECTOR == 0 and all(s % VECTOR == 0 for a, s in steps.items() if a not in along)


def join_lanes(frame: Frame, c: Compute, totals: Sequence[Val], lanes: int, number: int = 0) -> None:
    """Combine each of ``totals`` of ``lanes`` neighbouring threads into every one of them. A butterfly of shuffles combines a
    warp, whose lanes all get the same bits. The warps are combined in order through shared memory named by ``number``."""
    block, kind, narrow = frame.block, spell_type(CUDA, totals[0].cdtype), min(lanes, WARP)
    other = Val("other", totals[0].cdtype, atom=True)
    if narrow > 1:
        with frame.scope(f"for (int s = {narrow // 2}; s > 0; s >>= 1)", "#pragma unroll"):
            block.line(f"{kind} other;")
            for total in totals:
                block.line(f"other = __shfl_xor_sync(0xffffffffu, {total.text}, s);")
                block.line(block.combine(c, total.text, other))
    if lanes <= WARP:
        return
    share, warps, all_warps = f"part{number}", lanes // WARP, frame.threads // WARP
    frame.shared += all_warps * 8 * len(totals)
    block.line(f"__shared__ {kind} {share}[{len(totals)}][{all_warps}];")
    block.lines += [f"if (tid % {WARP} == 0) {share}[{k}][tid / {WARP}] = {t.text};" for k, t in enumerate(totals)]
    block.line("__syncthreads();")
    for k, total in enumerate(totals):
        block.line(f"{total.text} = {share}[{k}][tid / {lanes} * {warps}];")
        with frame.scope(f"for (int w = 1; w < {warps}; ++w)", "#pragma unroll"):
            block.line(f"const {kind} other = {share}[{k}][tid / {lanes} * {warps} + w];")
            block.line(block.combine(c, total.text, other))


def join_blocks(frame: Frame, c: Compute, total: Val, number: int = 0, side: int = 1) -> None:
    """Combine ``total`` over the blocks of a cluster in rank order. All threads of a block have it, or one for each of ``side``
    rows, ``local``."""
    block, kind, shared = frame.block, spell_type(CUDA, total.cdtype), f"whole{number}"
    frame.shared += 8 * side
    own = "local" if side > 1 else "0"
    block.line(f"__shared__ {kind} {shared}[{side}];")
    block.line(f"if (tid < {side}) {shared}[{own}] = {total.text};")
    block.line("rm_cluster_meet();")
    block.line(f"{total.text} = rm_peer_value({shared} + {own}, 0);")
    with frame.scope(f"for (int r = 1; r < {frame.blocks}; ++r)", "#pragma unroll"):
        block.line(f"const {kind} other = rm_peer_value({shared} + {own}, r);")
        block.line(block.combine(c, total.text, Val("other", total.cdtype, atom=True)))
