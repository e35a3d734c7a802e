"""A program on an OpenCL device as far as it is planned without a driver: its memory, its constants and its launches.

Executors (``resident.py``) and code objects for absent cards (``code_object.py``) share it, so both record the same calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from rammer.device.driver_calls import Argument, DriverCalls, buffer_argument, int32, int64
from rammer.device.manifest import Array
from rammer.device.shared_constants import WantedForm
from rammer.ir.constants import parts_of
from rammer.ir.launches import Launch, first_consecutive, make_launches
from rammer.ir.program import RProgram
from rammer.ir.types import itemsize

from rammer_rocm.constants import PlacedConstants, packed_form, plain_form, round_up
from rammer_rocm.memory import DeviceMemory
from rammer_rocm.program_kernels import Function, Pointer
from rammer_rocm.source import LaunchPart

if TYPE_CHECKING:
    from rammer_rocm.kernels.task import TaskFunction

#: The array of machine code that has the binary.
BINARY: Final = "binary"
#: Maximum launches of one kernel: each adds its registers' maximum and parameters (OpenCL guarantees 1024 bytes of parameters).
MOST_PARTS: Final = 6
#: Launches with more groups per vEU than this are not joined: alone they fill the device.
MOST_GROUPS: Final = 4
#: Alignment in floats of the memory that groups of a task share.
LINE: Final = 64


class PlannedProgram:
    """The addresses of a program's tensors and constants."""

    program: RProgram
    functions: Mapping[str, Function]
    memory: DeviceMemory
    constants: PlacedConstants

    def wanted_forms(self, constants: Mapping[str, Array]) -> dict[tuple[str, str], WantedForm]:
        """Return the forms of the constants that kernels read, but not of those in the program's memory."""
        filling = {self.program.storage[n].buffer: n for n in constants if n in self.program.storage}
        wanted, parts = dict[tuple[str, str], WantedForm](), parts_of(constants)
        for a in (a for f in self.functions.values() for a in f.arguments):
            name = self.program.storage[a.tensor].buffer if a.packing is None else a.tensor
            if a.packing is not None:
                wanted[name, a.packing.key] = packed_form(parts[name], a.packing)
            elif name in filling and name not in self.memory.buffers:
                wanted[name, ""] = plain_form(
                    parts[filling[name]], self.program.storage[filling[name]], self.program.buffer[name]
                )
        return wanted

    def argument_address(self, argument: Pointer, buffers: Mapping[str, int]) -> tuple[int, int]:
        """Return the number of the buffer of constants and the byte in it; 0 and the byte in the arena for other tensors."""
        if argument.packing is not None:
            return self.constants.places[argument.tensor, argument.packing.key]
        storage = self.program.storage[argument.tensor]
        inside = storage.offset * itemsize(self.program.buffer[storage.buffer].dtype)
        if storage.buffer in buffers:
            return 0, buffers[storage.buffer] + inside
        number, start = self.constants.places[storage.buffer, ""]
        return number, start + inside

    def record_calls(self, calls: DriverCalls, memory: int, constants: Sequence[int]) -> dict[str, Any] | None:
        """Record the launches of a run. ``memory`` and ``constants`` are the numbers of the program's allocations. Returns other
        facts of the executor, or None if its calls cannot be recorded."""
        return None


class PlannedLaunches(PlannedProgram):
    """The launches of a program, in the order of a run.

    A launch has the tasks of one operator in one wave (``rammer.ir.launches``). Launches that do not depend on each other share a
    kernel if their groups have equal work-items. ``veus`` are those of the device that the kernels were written for."""

    def plan_launches(self, veus: int) -> None:
        """Plan the kernels and their launches."""
        self.levels = launch_levels(make_launches(self.program))
        ports = {self.program.storage[p.tensor].buffer for p in (*self.program.inputs, *self.program.outputs)}
        #: Buffers in the program's memory in every run. Those of ports may be a caller's arrays.
        self.fixed = self.memory.buffers.keys() - ports
        #: The steps of a run, in order: the launches of a kernel, or a range of levels that one launch runs.
        self.steps = self.make_steps(veus)
        self.plan = [step for step in self.steps if not isinstance(step, range)]
        #: The parts of each kernel, by its number.
        self.written = list({_key(parts): parts for parts in map(self.parts_of, self.plan)}.values())
        self.number = {_key(parts): i for i, parts in enumerate(self.written)}

    def make_steps(self, veus: int) -> list[list[Launch] | range]:
        """Return the steps of a run."""
        return [joined for level in self.levels for joined in join_level(level, self.functions, veus)]

    def parts_of(self, joined: Sequence[Launch]) -> list[LaunchPart]:
        """Return the parts of the kernel of these launches."""
        found = list[LaunchPart]()
        for x in joined:
            f = self.functions[x.operator]
            plain = (k for k, a in enumerate(f.arguments) if a.packing is None)
            inside = frozenset(k for k in plain if self.program.storage[f.arguments[k].tensor].buffer in self.fixed)
            found.append(LaunchPart(cast("TaskFunction", f), inside, first_consecutive(x.tasks) is None))
        return found

    def entry_of(self, parts: Sequence[LaunchPart]) -> str:
        """Return the name of the kernel that has these parts."""
        return f"launch_{self.number[_key(parts)]}"

    def groups_of(self, launch: Launch) -> int:
        """Return the groups of one launch."""
        return len(launch.tasks) * self.functions[launch.operator].blocks

    def sharing_places(self, joined: Sequence[Launch]) -> list[tuple[int, int]]:
        """Return the first partial sum (floats) and the first counter of each launch of a kernel, then the ends."""
        found = [(0, 0)]
        for x in joined:
            f, (place, counter) = self.functions[x.operator], found[-1]
            tasks = len(x.tasks) if f.blocks > 1 else 0
            found.append((round_up(place + f.partials * tasks, LINE), counter + tasks))
        return found

    def sharing_sizes(self) -> tuple[int, int]:
        """Return the bytes of partial sums and of counters. Kernels and levels run in order, so all use the same memory."""
        ends = [self.sharing_places(launches)[-1] for launches in (*self.plan, *self.levels)]
        floats, words = (max((end[i] for end in ends), default=0) for i in (0, 1))
        return max(4 * floats, 64), max(4 * words, 64)

    def record_calls(self, calls: DriverCalls, memory: int, constants: Sequence[int]) -> dict[str, Any] | None:
        """Record the launches of a run, in order."""
        partials, arrived = map(calls.allocate, self.sharing_sizes())
        for joined in self.plan:
            parts = self.parts_of(joined)
            values: list[Argument] = [buffer_argument(memory)] * any(part.inside for part in parts)
            for x, part, (place, counter) in zip(joined, parts, self.sharing_places(joined), strict=False):
                f = self.functions[x.operator]
                for k, (number, start) in enumerate(self.argument_address(a, self.memory.buffers) for a in f.arguments):
                    buffer = buffer_argument(constants[number - 1] if number else memory)
                    values += [int64(start)] if k in part.inside else [buffer, int64(start)]
                table = [buffer_argument(calls.allocate_table(np.array(x.tasks, np.int32)))] if part.ordered else []
                values += [*table, int32(first_consecutive(x.tasks) or 0), int32(self.groups_of(x))]
                if f.blocks > 1:
                    values += [buffer_argument(partials), int64(place), buffer_argument(arrived), int32(counter)]
            threads = self.functions[joined[0].operator].threads
            calls.launch((BINARY, self.entry_of(parts)), sum(map(self.groups_of, joined)), threads, values)
        return {}


def _key(parts: Sequence[LaunchPart]) -> tuple[object, ...]:
    """Return what distinguishes the kernels of launches: equal functions have one name."""
    return tuple((part.function.entry, part.inside, part.ordered) for part in parts)


def launch_levels(launches: Sequence[Launch]) -> list[list[Launch]]:
    """Return launches by level, in a legal order: those of a level do not depend on each other."""
    level, levels = list[int](), list[list[Launch]]()
    for x in launches:
        level.append(max((level[i] + 1 for i in x.after), default=0))
        if level[-1] == len(levels):
            levels.append([])
        levels[level[-1]].append(x)
    return levels


def join_level(level: Sequence[Launch], functions: Mapping[str, Function], veus: int) -> list[list[Launch]]:
    """Return the launches of each kernel of a level. A kernel's launches do not depend on each other."""
    kernels, most = list[list[Launch]](), MOST_GROUPS * veus
    open_ = dict[int, list[list[Launch]]]()  # kernels with room, by work-items of a group
    for x in level:
        groups, threads = count_groups([x], functions), functions[x.operator].threads
        room = (k for k in open_.get(threads, ()) if len(k) < MOST_PARTS and count_groups(k, functions) <= most)
        kernel = next(room, None) if groups <= most else None
        if kernel is None:
            kernel = []
            kernels.append(kernel)
            open_.setdefault(threads, []).append(kernel)
        kernel.append(x)
    return kernels


def count_groups(launches: Sequence[Launch], functions: Mapping[str, Function]) -> int:
    """Return the groups of launches."""
    return sum(len(x.tasks) * functions[x.operator].blocks for x in launches)
