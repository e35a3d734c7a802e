"""Horizontal fusion of launches with the same predecessors (FusionStitching's kernel packing).

The launch of a small operator leaves most of a GPU idle. Launches with the same predecessors are independent and start no later
as one kernel than alone. Consumers of one launch then wait for all. Their times may therefore differ by at most the launch
overhead, unless all have the same consumers. Each block of the kernel runs one operator's task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_

from rammer.codegen import Argument, Text
from rammer.device.manifest import Binding
from rammer.ir.launches import Launch, first_consecutive, reduce_edges
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
    prices = _Prices(kernels, program, binding, gpu)
    plan = delay_launches(plan, [prices.piece(x) for x in plan])
    pieces = [prices.piece(x) for x in plan]
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
    direct = reduce_edges([sum(1 << i for i in x.after) for x in result])
    return [replace(x, after=after) for x, after in zip(result, direct, strict=True)], made


def delay_launches(plan: Sequence[Launch], pieces: Sequence[LaunchPiece]) -> list[Launch]:
    """Return the launches in a legal order. A small one starts no earlier than it must to end before its first reader can start,
    beside a launch that the reader waits for, so that the two can share a launch. A graph that casts all inputs at its start
    would else have many edges across it, and the casts would delay the start."""
    after, before, readers = [{*x.after} for x in plan], _ancestors(plan), _readers(plan)
    level = list[int]()
    for x in plan:
        level.append(1 + max((level[i] for i in x.after), default=0))
    for i in (i for i in range(len(plan) - 1, -1, -1) if pieces[i].share and readers[i]):
        first = min(readers[i], key=lambda r: level[r])
        chain = [p for p in range(first) if before[first] >> p & 1 and level[p] > level[i]]
        spent = 0.0  # from the level on until the reader starts
        for depth in sorted({level[p] for p in chain}, reverse=True):
            here = [p for p in chain if level[p] == depth]
            spent += max(pieces[p].seconds for p in here)
            here = [p for p in here if pieces[p].share > 0 and pieces[i].share + pieces[p].share <= 1.0]
            here = [p for p in here if not any(before[q] >> i & 1 or q == i for q in after[p])]
            if here and spent >= pieces[i].seconds:
                other = max(here, key=lambda p: pieces[p].seconds)
                after[i] |= after[other]
                level[i] = depth
                break
    order = sorted(range(len(plan)), key=lambda i: (level[i], i))
    place = {i: k for k, i in enumerate(order)}
    return [replace(plan[i], after=tuple(sorted(place[p] for p in after[i]))) for i in order]


def _ancestors(pieces: Sequence[Launch | LaunchPiece]) -> list[int]:
    """Return the bit set of each launch's direct and indirect predecessors."""
    result = list[int]()
    for x in pieces:
        found = 0
        for p in x.after:
            found |= result[p] | 1 << p
        result.append(found)
    return result


def _readers(pieces: Sequence[Launch | LaunchPiece]) -> list[list[int]]:
    """Return the direct successors of each launch."""
    result: list[list[int]] = [[] for _ in pieces]
    for i, x in enumerate(pieces):
        for p in x.after:
            result[p].append(i)
    return result


def pack_launches(pieces: Sequence[LaunchPiece], launch: float) -> list[tuple[int, ...]]:
    """Return the positions of the launches by kernel, kernels in a legal order. All tasks of a kernel are resident at once.
    ``launch`` is the launch overhead in seconds."""
    readers, before = _readers(pieces), _ancestors(pieces)
    open_: dict[tuple[int, ...], list[int]] = {}
    found, above, home = list[list[int]](), list[int](), list[int]()  # groups, their predecessors, and the group of each launch
    for i, piece in enumerate(pieces):
        waits = {home[p] for p in piece.after}
        behind = {g for g in waits if any(above[w] >> g & 1 for w in waits)}
        known = open_.setdefault(tuple(sorted(waits - behind)), [])
        place = next((g for g in known if piece.share and _can_pack(pieces, readers, before, [*found[g], i], launch)), None)
        if place is None:
            place = len(found)
            found.append([])
            above.append(reduce(or_, (1 << g | above[g] for g in waits), 0))
            known += [place] * (piece.share > 0)
        found[place].append(i)
        home.append(place)
    return [tuple(p) for p in found]


def _can_pack(
    pieces: Sequence[LaunchPiece], readers: Sequence[list[int]], before: Sequence[int], members: Sequence[int], launch: float
) -> bool:
    """Return True if these launches fit on the device together and do not delay consumers by more than a launch, beyond the
    members that they wait for."""
    if sum(pieces[i].share for i in members) > 1.0:
        return False
    longest = max(pieces[i].seconds for i in members)
    followers = {r for i in members for r in readers[i]}
    return all(longest - max(pieces[i].seconds for i in members if before[r] >> i & 1) <= launch for r in followers)


@dataclass(frozen=True)
class _Prices:
    """The prices of launches; equal kernels share them."""

    kernels: Mapping[str, TaskKernel]
    program: RProgram
    binding: Binding
    gpu: Gpu
    known: dict[str, float] = field(default_factory=dict)

    def may_share(self, x: Launch) -> bool:
        """Return True if a launch's kernel may share a launch: it needs only a plain launch."""
        operator, kernel = self.program.operator[x.operator], self.kernels[x.operator]
        alone = kernel.blocks > 1 or kernel.dynamic or operator.skips or not kernel.body
        return family_of(operator).packable and not alone and first_consecutive(x.tasks) is not None

    def piece(self, x: Launch) -> LaunchPiece:
        """Return the piece of a launch."""
        kernel, operator = self.kernels[x.operator], self.program.operator[x.operator]
        if not self.may_share(x):
            return LaunchPiece(x.after, 0.0, 0.0)
        if kernel.entry not in self.known:
            self.known[kernel.entry] = family_of(operator).seconds(operator, self.binding, self.gpu)
        return LaunchPiece(x.after, self.known[kernel.entry], len(x.tasks) * kernel.threads / (self.gpu.sms * self.gpu.threads))


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
