"""The OpenCL program of an rProgram: task functions and the kernels that walk the table.

The table executor has two forms. ``waves``: one launch per wave, one work-item per vEU. ``single``: one launch per program, in
which work-groups claim the rows of a wave and synchronise at its end. A group never waits for an unclaimed row, so the launch
ends with any number of co-resident groups. A group that has waited too long ends the launch early: its partner was interrupted,
or has much more work. All groups then exit at the next row. The thread may sleep instead of spinning, and the host relaunches
where the program stopped. For a loop program one launch runs all iterations. The moves between two iterations are a wave of one
row, and each iteration has the next epoch.

The launch executor (``launch_text``) has a group of work-items for each task, which the device places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rammer_rocm.ring.device_text import FENCE

if TYPE_CHECKING:
    from rammer.codegen.c_target import CTarget

    from rammer_rocm.kernels.task import TaskFunction

#: 32-bit words of one run in the table: function, argument row, first task, count, step.
RUN_WORDS = 5
#: Polls of a counter before a waiting group ends the launch: about 0.1 ms, while a launch costs a few us.
PATIENCE = 50_000
#: 32-bit words between the counters of two waves: one cache line.
LINE_WORDS = 16

_WALK = """  for (int r = starts[{row}]; r < starts[{row} + 1]; ++r) {{
    __global const int *run = runs + r * {words};
    __global const long *a = arguments + run[1];
    for (int i = 0, task = run[2]; i < run[3]; ++i, task += run[4]) {{{begin}
      switch (run[0]) {{
{cases}      }}{end}
    }}
  }}
"""
#: The device's clock, in device-specific ticks. On an NVIDIA GPU it is chip-wide, while OpenCL C names only an SM's clock.
CLOCK: Final = """
#if defined(cl_khr_kernel_clock) && defined(__opencl_c_kernel_clock_scope_device)
#define rm_clock() clock_read_device()
#elif defined(cl_nv_pragma_unroll)
inline static ulong rm_clock(void) { ulong t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) : : "memory"); return t; }
#elif defined(__AMDGCN__)
#define rm_clock() __builtin_amdgcn_s_memrealtime()
#else
#define rm_clock() __builtin_readcyclecounter()
#endif
__kernel void clock_now(__global ulong *now) { *now = rm_clock(); }
"""
#: Code of a traced walk before and after a task.
_BEGIN = "\n      const ulong begin = rm_clock();"
_END = """
      if (!get_local_id(0)) { records[2 * (firsts[r] + i)] = begin; records[2 * (firsts[r] + i) + 1] = rm_clock(); }"""
_PARAMETERS = (
    "__global char *memory, __global const long *arguments, __global const int *starts, "
    "__global const int *runs, __global char *spill{constants}"
)
_SINGLE = """{head}
__kernel void program({parameters},
    __global const int *filled, volatile __global atomic_int *sync, int epoch, int launch, int waves)
{{
  {scratch}
  volatile __global atomic_int *left = sync + waves * ({line} + {veus});
  for (int wave = 0; wave < waves; ++wave) {{
    volatile __global atomic_int *done = sync + wave * {line};
    volatile __global atomic_int *claims = sync + waves * {line} + wave * {veus};
    if (atomic_load_explicit(done, memory_order_acquire, memory_scope_device) == filled[wave] * epoch) continue;
    for (int i = 0; i < {veus}; ++i) {{
      const int veu = ((int)get_group_id(0) + i) % {veus};
      const int row = wave * {veus} + veu;
      if (starts[row] == starts[row + 1]) continue;
      if (atomic_load_explicit(left, memory_order_relaxed, memory_scope_device) == launch) return;
      int idle = epoch - 1;
      if (!atomic_compare_exchange_strong_explicit(claims + veu, &idle, epoch, memory_order_acq_rel,
                                                   memory_order_relaxed, memory_scope_device)) continue;
{walk}      atomic_fetch_add_explicit(done, 1, memory_order_release, memory_scope_device);
    }}
    int polls = 0;
    while (atomic_load_explicit(done, memory_order_acquire, memory_scope_device) < filled[wave] * epoch)
      if (++polls > {patience}) {{
        atomic_store_explicit(left, launch, memory_order_relaxed, memory_scope_device);
        return;
      }}
  }}
}}
"""
_TURNS = """{head}
__kernel void program({parameters}, __global const int *filled, volatile __global atomic_int *sync,
    int epoch, int launch, int waves, __global const long *moves, int moved, int turns, int skipped)
{{
  {scratch}
  volatile __global atomic_int *left = sync + (waves + 1) * ({line} + {veus});
  for (int turn = 0;; ++turn, ++epoch, ++moved) {{
    volatile __global atomic_int *seam = sync + (waves + 1) * {line};
    if (atomic_load_explicit(sync, memory_order_acquire, memory_scope_device) < moved) {{
      if (atomic_load_explicit(left, memory_order_relaxed, memory_scope_device) == launch) return;
      int idle = moved - 1;
      if (atomic_compare_exchange_strong_explicit(seam, &idle, moved, memory_order_acq_rel,
                                                  memory_order_relaxed, memory_scope_device)) {{
        rm_between(memory, moves, turn, turns, skipped);
        atomic_fetch_add_explicit(sync, 1, memory_order_release, memory_scope_device);
      }}
      int polls = 0;
      while (atomic_load_explicit(sync, memory_order_acquire, memory_scope_device) < moved)
        if (++polls > {patience}) {{
          atomic_store_explicit(left, launch, memory_order_relaxed, memory_scope_device);
          return;
        }}
    }}
    if (turn == turns) return;
    for (int wave = 0; wave < waves; ++wave) {{
      volatile __global atomic_int *done = sync + (wave + 1) * {line};
      volatile __global atomic_int *claims = seam + (wave + 1) * {veus};
      if (atomic_load_explicit(done, memory_order_acquire, memory_scope_device) >= filled[wave] * epoch) continue;
      for (int i = 0; i < {veus}; ++i) {{
        const int veu = ((int)get_group_id(0) + i) % {veus};
        const int row = wave * {veus} + veu;
        if (starts[row] == starts[row + 1]) continue;
        if (atomic_load_explicit(left, memory_order_relaxed, memory_scope_device) == launch) return;
        int idle = epoch - 1;
        if (!atomic_compare_exchange_strong_explicit(claims + veu, &idle, epoch, memory_order_acq_rel,
                                                     memory_order_relaxed, memory_scope_device)) continue;
{walk}        atomic_fetch_add_explicit(done, 1, memory_order_release, memory_scope_device);
      }}
      int polls = 0;
      while (atomic_load_explicit(done, memory_order_acquire, memory_scope_device) < filled[wave] * epoch)
        if (++polls > {patience}) {{
          atomic_store_explicit(left, launch, memory_order_relaxed, memory_scope_device);
          return;
        }}
    }}
  }}
}}
"""
#: ``moves`` begins with the start index of each move time (``repeat.TIMES``); ``repeat.MOVE_WORDS`` is the size of a move.
_BETWEEN: Final = """
inline static void rm_move(__global char *memory, __global const long *moves, int when, int turn, int skipped) {
  for (long i = moves[when]; i < moves[when + 1]; ++i) {
    __global const long *m = moves + 6 + 7 * i;
    const long to = m[0] + (turn + (m[1] < 0 ? skipped : 0)) * m[1], from = m[2] + (turn + (m[3] < 0 ? skipped : 0)) * m[3];
    const long size = min(m[4], min(m[5] - to, m[6] - from));
    __global uchar *d = (__global uchar *)memory + to;
    __global const uchar *s = (__global const uchar *)memory + from;
    long b = 0;
    for (; b + 16 <= size; b += 16) vstore16(vload16(0, s + b), 0, d + b);
    for (; b < size; ++b) d[b] = s[b];
  }
}
inline static void rm_between(__global char *memory, __global const long *moves, int turn, int turns, int skipped) {
  if (turn == 0) { rm_move(memory, moves, 0, 0, skipped); rm_move(memory, moves, 1, 0, skipped); }
  else rm_move(memory, moves, 3, turn - 1, skipped);
  rm_move(memory, moves, turn < turns ? 2 : 4, turn, skipped);
}
"""
_WAVE = """{head}
__kernel void wave_{number}({parameters}, int first)
{{
  {scratch}
  const int row = first + (int)get_group_id(0);
{walk}}}
"""


@dataclass(frozen=True, slots=True)
class WalkShape:
    """The specialisation of the walking kernels.

    The fields are vEUs, scratch bytes per vEU, and constant buffers. ``traced``: kernels record the start and end of each task.
    ``turns``: one launch runs all iterations of a loop program."""

    veus: int
    scratch: int
    constants: int = 0
    traced: bool = False
    turns: bool = False

    @property
    def parameters(self) -> str:
        """The parameters common to all kernels."""
        constants = "".join(f", __global char *constants{i}" for i in range(self.constants))
        records = ", __global ulong *records, __global const int *firsts" if self.traced else ""
        return _PARAMETERS.format(constants=constants + records)

    def base(self, number: str) -> str:
        """Return the buffer with this number: 0 is the program's buffer, constants follow."""
        others = "".join(f"{number} == {i + 1} ? constants{i} : " for i in range(self.constants))
        return f"({others}memory)" if others else "memory"


def program_text(
    functions: Sequence[TaskFunction], sets: Sequence[Sequence[int]], shape: WalkShape, dialect: CTarget, single: bool
) -> str:
    """Return the complete OpenCL program. ``sets[i]`` are the indices of the functions that ``wave_i`` calls. With ``single`` one
    kernel, ``program``, calls all functions."""
    called = [f for function in functions for f in _ordered_callees(function)]
    parts = [
        dialect.preamble,
        *([CLOCK] if shape.traced else []),
        *([_BETWEEN] if shape.turns else []),
        *dict.fromkeys(f.helpers for f in (*called, *functions) if f.helpers),
    ]
    parts += dict.fromkeys(f.text for f in (*called, *functions))
    head = _group_attribute(1)
    if single:
        walk = _walk_text(functions, range(len(functions)), "row", shape)
        parts.append(
            (_TURNS if shape.turns else _SINGLE).format(
                head=head,
                parameters=shape.parameters,
                scratch=_scratch_text(shape),
                walk=walk,
                veus=shape.veus,
                line=LINE_WORDS,
                patience=PATIENCE,
            )
        )
        return "\n".join(parts)
    for number, members in enumerate(sets):
        walk = _walk_text(functions, members, "row", shape)
        parts.append(_WAVE.format(head=head, number=number, parameters=shape.parameters, scratch=_scratch_text(shape), walk=walk))
    return "\n".join(parts)


def _ordered_callees(function: TaskFunction) -> list[TaskFunction]:
    """Return the functions that a function calls, in declaration order."""
    inner = function.inner
    return [] if inner is None else [*_ordered_callees(inner), inner]


def _walk_text(functions: Sequence[TaskFunction], members: Sequence[int], row: str, shape: WalkShape) -> str:
    cases = "".join(f"        case {i}: {_call_text(functions[i], shape)}; break;\n" for i in members)
    begin, end = (_BEGIN, _END) if shape.traced else ("", "")
    return _WALK.format(row=row, words=RUN_WORDS, cases=cases, begin=begin, end=end)


def _call_text(function: TaskFunction, shape: WalkShape) -> str:
    pointers = [f"(__global {kind} *)({shape.base(f'a[{2 * k}]')} + a[{2 * k + 1}])" for k, kind in enumerate(function.types)]
    return f"{function.entry}({', '.join([*pointers, 'scratch', 'task'])})"


def _scratch_text(shape: WalkShape) -> str:
    return f"__global char *scratch = spill + get_group_id(0) * (size_t){shape.scratch};"


def _group_attribute(threads: int) -> str:
    return f"__attribute__((reqd_work_group_size({threads}, 1, 1)))"


@dataclass(frozen=True, slots=True)
class LevelShape:
    """The specialisation of the kernel that runs levels: its functions, the buffers of constants, the ports that may be the
    caller's arrays, the pointers of a row, the work-items of a group, and the polls of a group in a trial and in a run."""

    functions: Sequence[TaskFunction]
    constants: int
    ports: int
    pointers: int
    threads: int
    polls: tuple[int, int]


@dataclass(frozen=True, slots=True)
class LaunchPart:
    """A function of a launch. The pointers with numbers in ``inside`` point into the program's memory, all others have a buffer
    each: every buffer of a launch costs time of the host. ``ordered``: a table has the numbers of the tasks."""

    function: TaskFunction
    inside: frozenset[int] = frozenset()
    ordered: bool = True


def launch_text(
    kernels: Sequence[Sequence[LaunchPart]], dialect: CTarget, traced: bool = False, levels: LevelShape | None = None
) -> str:
    """Return the complete OpenCL program of launches, and with ``levels`` the kernel that runs levels.

    Kernel ``launch_i`` has the tasks of all functions of ``kernels[i]``, which have equal work-items: first those of the first
    function, then those of the next. A task has a group, or ``blocks`` groups."""
    called = [*(part.function for parts in kernels for part in parts), *(levels.functions if levels else ())]
    functions = dict.fromkeys(f for part in called for f in (*_ordered_callees(part), part))
    parts = [dialect.preamble, FENCE, *([CLOCK] if traced else []), *dict.fromkeys(f.helpers for f in functions if f.helpers)]
    parts += dict.fromkeys(f.text for f in functions)
    parts += [_launch_kernel(number, parts, traced) for number, parts in enumerate(kernels)]
    return "\n".join([*parts, *([_levels_kernel(levels, traced)] if levels else [])])


def _launch_kernel(number: int, parts: Sequence[LaunchPart], traced: bool) -> str:
    """Return the kernel of one launch. Its parameters are the program's memory if it is used, those of every part, then the
    records."""
    names, lines = ["__global char *memory"] * any(part.inside for part in parts), list[str]()
    for i, part in enumerate(parts):
        f, pointers = part.function, list[str]()
        for k, kind in enumerate(f.types):
            base = "memory" if k in part.inside else f"b{i}_{k}"
            names += [f"__global char *{base}"] * (k not in part.inside) + [f"long a{i}_{k}"]
            pointers.append(f"(__global {kind} *)({base} + a{i}_{k})")
        names += [f"__global const int *order{i}"] * part.ordered + [f"int first{i}", f"int count{i}"]
        calls = [*pointers, "scratch", "task"]
        slot = "group"
        if f.blocks > 1:
            names += [f"__global float *partials{i}", f"long place{i}", f"__global int *arrived{i}", f"int counter{i}"]
            slot = f"group / {f.blocks}"
            calls += [f"partials{i} + place{i}", f"arrived{i} + counter{i}", slot, f"group % {f.blocks}"]
        lines.append(f"  if (group < count{i}) {{")
        lines.append(f"    const int task = {f'order{i}[{slot}]' if part.ordered else f'first{i} + {slot}'};")
        lines += ["    const ulong begin = rm_clock();"] if traced else []
        lines.append(f"    {f.entry}({', '.join(calls)});")
        if traced:
            lines.append("    barrier(CLK_LOCAL_MEM_FENCE);")
            lines.append("    __global ulong *const times = records + 2 * (record + get_group_id(0));")
            lines.append("    if (!get_local_id(0)) { times[0] = begin; times[1] = rm_clock(); }")
        lines += ["    return;", "  }", f"  group -= count{i};"]
    names += ["__global ulong *records", "int record"] if traced else []
    scratch = f"  {_local_scratch([part.function for part in parts])}"
    head = f"{_group_attribute(parts[0].function.threads)}\n__kernel void launch_{number}({', '.join(names)})"
    return "\n".join([head, "{", scratch, "  int group = (int)get_group_id(0);", *lines, "}\n"])


#: 64-bit words of a unit of work before its pointers: function, task, slot, rank, partial sums, counters.
UNIT_WORDS: Final = 6
#: Polls of a group before it gives up waiting for others, in a trial of the groups that run at the same time and in a run, on a
#: GPU: tenths of a second, and seconds.
GPU_POLLS: Final = (300_000, 20_000_000)
#: The same on other devices, whose groups wait for other processes, too.
CPU_POLLS: Final = (500_000_000, 2_000_000_000)
#: A copy of the row of unit ``u`` to local memory.
_FETCH: Final = "if (u < end) for (int i = item; i < {width}; i += {threads}) row[i] = units[u * (long){width} + i];"
#: Work-items load the row of their group's next unit while they run a unit: the rows do not depend on other groups.
_PERSISTENT: Final = """{head}
__kernel void program({parameters}, __global const long *units, __global const int *starts, __global float *partials,
    __global int *arrived, volatile __global int *sync{records}, int base, int levels, int before)
{{
  {scratch}
  const int group = (int)get_group_id(0), groups = (int)get_num_groups(0);
  if (levels == 0) {{
    if (get_local_id(0) == 0) {{
      atomic_inc(sync);
      int polls = 0;
      while (sync[0] < before && !sync[32] && polls < {trial}) ++polls;
      if (polls >= {trial}) sync[32] = 1;
    }}
    return;
  }}
  __local long row[{width}];
  __local int given_up;
  const int item = rm_item();
  starts += base;
  int u = starts[0] + group, end = starts[1], after = levels > 1 ? starts[2] : end;
  {fetch}
  for (int level = 0; level < levels; ++level) {{
    const int later = level + 2 < levels ? starts[level + 3] : after;
    const bool idle = u >= end;
    for (; u < end; u += groups) {{
      barrier(CLK_LOCAL_MEM_FENCE);
      __local const long *const a = row + {words};
      const int task = (int)row[1], next = u + groups < end ? u + groups : end + group;
      const bool more = next < (u + groups < end ? end : after);
      const long ahead = more && item < {width} ? units[next * (long){width} + item] : 0;{begin}
      switch ((int)row[0]) {{
{cases}      }}
      barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);{end}
      if (more && item < {width}) row[item] = ahead;
      if (more) for (int i = item + {threads}; i < {width}; i += {threads}) row[i] = units[next * (long){width} + i];
    }}
    if (level + 1 == levels) break;
    u = end + group;
    end = after;
    after = later;
    if (idle) {{ {fetch} }}
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (item == 0) {{
      rm_raise(sync);
      const int wanted = (before + level + 1) * groups;
      int polls = 0, seen = rm_seen(sync);
      for (; seen < wanted && polls < {patience} && ((++polls & 63) || !sync[32]); seen = rm_seen(sync));
      if (seen < wanted) sync[32] = 1;
      given_up = seen < wanted;
    }}
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    if (given_up) return;
  }}
  if (get_local_id(0) == 0) atomic_inc(sync);
}}
"""


def _levels_kernel(levels: LevelShape, traced: bool) -> str:
    """Return the kernel of one launch that runs consecutive levels."""
    width, constants = UNIT_WORDS + 2 * levels.pointers, [f"constants{i}" for i in range(levels.constants)]
    others = [*constants, *(f"(port{i} + start{i})" for i in range(levels.ports))]
    cases = "".join(f"        case {i}: {_unit_call(f, others)}; break;\n" for i, f in enumerate(levels.functions))
    parameters = [f"__global char *{n}" for n in ("memory", *constants)]
    parameters += [f"__global char *port{i}, long start{i}" for i in range(levels.ports)]
    times = "__global ulong *const times = records + 2 * (record + u);"
    record = f"\n      if (!get_local_id(0)) {{ {times} times[0] = begin; times[1] = rm_clock(); }}"
    return _PERSISTENT.format(
        head=_group_attribute(levels.threads),
        parameters=", ".join(parameters),
        scratch=_local_scratch(levels.functions),
        width=width,
        fetch=_FETCH.format(width=width, threads=levels.threads),
        threads=levels.threads,
        words=UNIT_WORDS,
        cases=cases,
        trial=levels.polls[0],
        patience=levels.polls[1],
        records=", __global ulong *records, int record" * traced,
        begin="\n      const ulong begin = rm_clock();" * traced,
        end=record * traced,
    )


def _unit_call(function: TaskFunction, others: Sequence[str]) -> str:
    bases = ["".join(f"a[{2 * k}] == {i} ? {other} : " for i, other in enumerate(others, 1)) for k in range(len(function.types))]
    pointers = [
        f"(__global {kind} *)(({base}memory) + a[{2 * k + 1}])"
        for k, (kind, base) in enumerate(zip(function.types, bases, strict=True))
    ]
    shared = ["partials + row[4]", "arrived + row[5]", "(int)row[2]", "(int)row[3]"] if function.blocks > 1 else []
    return f"{function.entry}({', '.join([*pointers, 'scratch', 'task', *shared])})"


def _local_scratch(functions: Sequence[TaskFunction]) -> str:
    return f"__local char scratch[{max(4, *(f.scratch for f in functions))}] __attribute__((aligned(64)));"
