"""The OpenCL program of an rProgram: task functions and the kernels that walk the table.

Two executors share them. ``waves``: one launch per wave, one work-group per vEU. ``single``: one launch for the whole program, in
which work-groups claim the rows of a wave and synchronise at its end. A group never waits for an unclaimed row, so the launch
ends with any number of co-resident groups. A group that has waited too long ends the launch early: its partner was interrupted,
or has much more work. All groups then exit at the next row. The thread may sleep instead of spinning, and the host relaunches
where the program stopped. For a loop program one launch runs all iterations. The moves between two iterations are a wave of one
row, and each iteration has the next epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

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
{cases}      }}{barrier}{end}
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

    The fields are vEUs, work-items per group, scratch bytes per vEU, and constant buffers. ``traced``: kernels record the start
    and end of each task. ``turns``: one launch runs all iterations of a loop program."""

    veus: int
    threads: int
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
    head = f"__attribute__((reqd_work_group_size({shape.threads}, 1, 1)))"
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
    # Tasks of a row may depend on each other: the whole group must finish one task before the next.
    fence = "\n      barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);" if shape.threads > 1 else ""
    begin, end = (_BEGIN, _END) if shape.traced else ("", "")
    return _WALK.format(row=row, words=RUN_WORDS, cases=cases, barrier=fence, begin=begin, end=end)


def _call_text(function: TaskFunction, shape: WalkShape) -> str:
    pointers = [f"(__global {kind} *)({shape.base(f'a[{2 * k}]')} + a[{2 * k + 1}])" for k, kind in enumerate(function.types)]
    return f"{function.entry}({', '.join([*pointers, 'scratch', 'task'])})"


def _scratch_text(shape: WalkShape) -> str:
    if shape.threads == 1:
        return f"__global char *scratch = spill + get_group_id(0) * (size_t){shape.scratch};"
    return f"__local char scratch[{max(shape.scratch, 4)}] __attribute__((aligned(64)));"
