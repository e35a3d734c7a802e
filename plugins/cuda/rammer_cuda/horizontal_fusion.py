"""Horizontal fusion of launches with the same predecessors (FusionStitching's kernel packing).

The launch of a small operator leaves most of a GPU idle. Launches with the same predecessors are independent and start no later
as one kernel than alone. Consumers of one launch then wait for all. Their times may therefore differ by at most the launch
overhead, unless all have the same consumers. Each block of the kernel runs one operator's task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rammer.codegen import Argument, Text
from rammer.device.manifest import Binding
from rammer.ir.launches import Launch, first_consecutive
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram

from rammer_cuda.device import device_source
from rammer_cuda.families import family_of
from rammer_cuda.generic.kernel import STATIC_SHARED
from rammer_cuda.gpu import Gpu
from rammer_cuda.kernels.part import barrier_line, declare_pointer, is_narrower
from rammer_cuda.kernels.task import TaskKernel

#: Maximum launches of one kernel, and its pointers: parameters have 4 KiB.
MOST_PARTS, MOST_POINTERS = 8, 256


@dataclass(frozen=True, slots=True)
class LaunchPiece:
    """A launch: the positions of its predecessors (``after``), seconds of its tasks, and the fraction of the device that they
    fill. A fraction of 0 means that the kernel cannot share a launch."""

    after: tuple[int, ...]
    seconds: float
    share: float


def fuse_launches(
    plan: Sequence[Launch], kernels: Mapping[str, TaskKernel], program: RProgram, binding: Binding, gpu: Gpu
) -> tuple[list[Launch], dict[str, TaskKernel]]:
    """Fuse launches of one wave where that pays; return the launches and their kernels, fused ones under new names."""
    pieces = _launch_pieces(plan, kernels, program, binding, gpu)
    groups = [part for group in pack_launches(pieces, gpu.launch) for part in _split_group(plan, group, kernels, gpu)]
    place = {i: number for number, group in enumerate(groups) for i in group}
    result, made = list[Launch](), dict(kernels)
    for group in groups:
        first = plan[group[0]]
        after = tuple(sorted({place[i] for i in first.after}))
        if len(group) == 1:
            result.append(replace(first, after=after))
            continue
        name = "__".join(plan[i].operator for i in group)
        made[name] = combine_kernels([(kernels[plan[i].operator], plan[i].tasks) for i in group])
        parts = tuple((plan[i].operator, plan[i].tasks) for i in group)
        result.append(Launch(name, tuple(range(sum(len(tasks) for _, tasks in parts))), after, parts))
    return result, made


def pack_launches(pieces: Sequence[LaunchPiece], launch: float) -> list[tuple[int, ...]]:
    """Return the positions of the launches by kernel, kernels in a legal order. All tasks of a kernel are resident at once.
    ``launch`` is the launch overhead in seconds."""
    readers: list[list[int]] = [[] for _ in pieces]
    for i, piece in enumerate(pieces):
        for before in piece.after:
            readers[before].append(i)
    open_: dict[tuple[int, ...], list[list[int]]] = {}
    found: list[list[int]] = []
    for i, piece in enumerate(pieces):
        known = open_.setdefault(tuple(sorted(piece.after)), [])
        home = next((p for p in known if piece.share and _can_pack(pieces, readers, [*p, i], launch)), None)
        if home is not None:
            home.append(i)
            continue
        found.append([i])
        if piece.share:
            known.append(found[-1])
    return [tuple(p) for p in found]


def _can_pack(pieces: Sequence[LaunchPiece], readers: Sequence[list[int]], members: Sequence[int], launch: float) -> bool:
    """Return True if these launches fit on the device together and do not delay consumers by more than a launch."""
    times = [pieces[i].seconds for i in members]
    alike = all(readers[i] == readers[members[0]] for i in members)
    return sum(pieces[i].share for i in members) <= 1.0 and (alike or max(times) - min(times) <= launch)


def _launch_pieces(
    plan: Sequence[Launch], kernels: Mapping[str, TaskKernel], program: RProgram, binding: Binding, gpu: Gpu
) -> list[LaunchPiece]:
    """Return the pieces of the launches; only those that could share a launch are priced."""
    plain = [_is_plain_launch(x, program.operator[x.operator], kernels[x.operator]) for x in plan]
    beside_others = Counter(x.after for x, may in zip(plan, plain, strict=True) if may)
    times = dict[str, float]()  # equal kernels have equal times
    pieces = list[LaunchPiece]()
    for x, may in zip(plan, plain, strict=True):
        kernel = kernels[x.operator]
        if not may or beside_others[x.after] < 2:
            pieces.append(LaunchPiece(x.after, 0.0, 0.0))
            continue
        if kernel.entry not in times:
            operator = program.operator[x.operator]
            times[kernel.entry] = family_of(operator).seconds(operator, binding, gpu)
        pieces.append(LaunchPiece(x.after, times[kernel.entry], len(x.tasks) * kernel.threads / (gpu.sms * gpu.threads)))
    return pieces


def _is_plain_launch(launch: Launch, operator: ROperator, kernel: TaskKernel) -> bool:
    """Return True if a launch's kernel may share a launch: it needs only a plain launch."""
    alone = kernel.blocks > 1 or kernel.dynamic or operator.skips or not kernel.body
    return family_of(operator).packable and not alone and first_consecutive(launch.tasks) is not None


def _split_group(
    plan: Sequence[Launch], group: tuple[int, ...], kernels: Mapping[str, TaskKernel], gpu: Gpu
) -> list[tuple[int, ...]]:
    """Split a group so that each part fits one kernel. The limits are shared memory, pointers, parts, and that all blocks are
    resident at once. All blocks have the threads of the largest."""
    result = list[tuple[int, ...]]()
    for i in group:
        if not result or not _can_fuse([plan[k] for k in (*result[-1], i)], kernels, gpu):
            result.append(())
        result[-1] += (i,)
    return result


def _can_fuse(launches: Sequence[Launch], kernels: Mapping[str, TaskKernel], gpu: Gpu) -> bool:
    parts = [kernels[x.operator] for x in launches]
    blocks = sum(len(x.tasks) for x in launches)
    shared, pointers = sum(k.shared for k in parts), sum(len(k.arguments) for k in parts)
    together = blocks * max(k.threads for k in parts) <= gpu.sms * gpu.threads
    return together and len(parts) <= MOST_PARTS and shared <= STATIC_SHARED and pointers <= MOST_POINTERS


def combine_kernels(parts: Sequence[tuple[TaskKernel, tuple[int, ...]]]) -> TaskKernel:
    """Combine kernels, each with its consecutive tasks, into one: blocks in the order of the parts. All blocks have the threads
    of the largest part. Warps past those of a part exit at once, and its barrier covers the others only."""
    threads = max(k.threads for k, _ in parts)
    texts = list(dict.fromkeys(k.device for k, _ in parts))
    body, begin = Text(), 0
    parameters, arguments = list[str](), list[Argument]()
    body.line("const int block = (int)blockIdx.x;")
    for number, (kernel, tasks) in enumerate(parts):
        texts.append(_kernel_function(number, kernel, threads))
        names = [f"a{len(parameters) + k}" for k in range(len(kernel.parameters))]
        parameters += [declare_pointer(p, name) for p, name in zip(kernel.parameters, names, strict=True)]
        arguments += kernel.arguments
        tests = [f"block < {begin + len(tasks)}"] * (number + 1 < len(parts))
        call = f"rm_part{number}({''.join(f'{n}, ' for n in names)}nullptr, {tasks[0] - begin}, RmPart{{block}});"
        if is_narrower(kernel, threads):
            call = f"{{ if ((int)threadIdx.x < {kernel.threads}) {call} }}"
        body.line(f"{'else ' if number else ''}{f'if ({tests[0]}) ' if tests else ''}{call}")
        begin += len(tasks)
    shared = sum(k.shared for k, _ in parts)
    own = any(barrier_line(k, threads) for k, _ in parts)
    text = device_source("part", *["part_meet"] * own) + "".join(texts)
    return TaskKernel("", text, tuple(parameters), str(body), tuple(arguments), threads, shared).named("pack_")


def _kernel_function(number: int, kernel: TaskKernel, threads: int) -> str:
    """Return a kernel as a function whose ``blockIdx`` and barrier are those of its part."""
    head = ", ".join((*kernel.parameters, "const int *order", "int first", "const RmPart blockIdx"))
    return f"static __device__ void rm_part{number}({head}) {{\n{barrier_line(kernel, threads)}{kernel.body}}}\n"
