"""The text of the persistent kernel: a block a vEU, its row's runs one after another.

Before a task a block waits for the task's counters, afterwards it adds one to those that the task feeds. Counters only
grow: in run number ``epoch`` (from 0) a counter must reach ``epoch * total + threshold``. Each is on a cache line of its
own. A wait that lasts longer than the limit reports itself, once, and makes every block give up. Values may also be
their own flags (``dataflow``): a word is a float, or ``EMPTY`` until its value is there. Of a tensor's two sets of words odd
and even runs use one each, and whoever sends a word empties that of the other set, which nobody reads in this run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rammer.codegen.dialects import CUDA

from rammer_cuda.kernels.cell_text import PREAMBLE, CellKernel
from rammer_cuda.persistent.table import COPY, HEAD, Form
from rammer_cuda.source import ORDER

#: 32-bit words from a counter to the next: one L2 line of 128 bytes.
LINE = 32
#: Polls between two looks at the clock and at whether another block gave up.
PATIENCE = 512
#: Counter number in a report that stands for "the words of vector so many"; lower numbers are counters.
WORDS = 0x80000000
#: The word that says "not there yet": a NaN that no arithmetic gives (CUDA's canonical NaN is 0x7fffffff).
EMPTY = 0xFFFFDEAD
#: Entries of the table that a block has at hand: the one it works on, the next, and one that slow warps may still read.
SLOTS = 3
#: The words of the report and control block, by name.
CONTROL = ("epoch", "finished", "aborted", "veu", "order", "counter", "seen", "wanted")


@dataclass(frozen=True, slots=True)
class Body:
    """What one kernel number runs: either a cell, or a generic function of so many pointers of the given C types."""

    name: str
    text: str
    types: tuple[str, ...]
    cell: CellKernel | None = None


_RUNTIME = """
struct rm_control {{ unsigned {control}; }};
struct rm_walk {{
  const unsigned *entries; unsigned *counters; rm_control *control; unsigned long long limit; unsigned epoch;
}};
__device__ __forceinline__ unsigned rm_acquire(const unsigned *from) {{
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}}
__device__ __forceinline__ void rm_release(unsigned *to) {{
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(to) : "memory");
}}
__device__ __forceinline__ unsigned long long rm_now() {{
  unsigned long long value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
  return value;
}}
// Start copying an entry of the table into shared memory.
__device__ __forceinline__ void rm_fetch(const rm_walk &walk, unsigned *to, int at) {{
  if (threadIdx.x < {words} / {copy}) {{
    const unsigned shared = (unsigned)__cvta_generic_to_shared(to + threadIdx.x * {copy});
    const unsigned *from = walk.entries + (size_t)at * {words} + threadIdx.x * {copy};
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared), "l"(from) : "memory");
  }}
  asm volatile("cp.async.commit_group;" ::: "memory");
}}
__device__ __forceinline__ void rm_fetched() {{ asm volatile("cp.async.wait_group 0;" ::: "memory"); }}
// Whether to stop waiting: another block gave up, or this one has waited too long and now says so.
__device__ __noinline__ bool rm_hopeless(const rm_walk &walk, unsigned long long &start, int order, unsigned counter,
                                         unsigned seen, unsigned wanted) {{
  if (rm_acquire(&walk.control->aborted)) return true;
  const unsigned long long now = rm_now();
  if (start == 0) start = now;
  if (now - start <= walk.limit) return false;
  if (atomicExch(&walk.control->aborted, 1u) == 0u) {{
    rm_control &c = *walk.control;
    c.veu = blockIdx.x; c.order = order; c.counter = counter; c.seen = seen; c.wanted = wanted;
  }}
  return true;
}}
// One wait of a task, by one thread. False if it was in vain.
__device__ __forceinline__ bool rm_reached(const rm_walk &walk, unsigned counter, unsigned wanted, int order) {{
  unsigned long long start = 0;
  for (;;) {{
    unsigned seen = 0;
    for (int i = 0; i < {patience}; ++i) {{
      seen = rm_acquire(walk.counters + counter * {line}u);
      if ((int)(seen - wanted) >= 0) return true;
    }}
    if (rm_hopeless(walk, start, order, counter, seen, wanted)) return false;
  }}
}}
__device__ __forceinline__ rm_vector<1> rm_peek(const unsigned *from, rm_vector<1> *) {{
  unsigned a;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(a) : "l"(from) : "memory");
  return {{{{__uint_as_float(a)}}}};
}}
__device__ __forceinline__ rm_vector<4> rm_peek(const unsigned *from, rm_vector<4> *) {{
  unsigned a, b, c, d;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {{%0, %1, %2, %3}}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "l"(from) : "memory");
  return {{{{__uint_as_float(a), __uint_as_float(b), __uint_as_float(c), __uint_as_float(d)}}}};
}}
// Words at N places, W side by side at each, by one thread. False if they never came.
template <int N, int W> __device__ __forceinline__ bool rm_receive(const rm_walk &walk, const unsigned *words, int span,
    const int (&at)[N], rm_vector<W> (&value)[N], int order, int number) {{
  const unsigned *const from = words + (walk.epoch & 1u ? span : 0);
  unsigned long long start = 0;
  for (;;) {{
    for (int i = 0; i < {patience}; ++i) {{
      bool all = true;
#pragma unroll
      for (int n = 0; n < N; ++n) value[n] = rm_peek(from + at[n], (rm_vector<W> *)nullptr);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int w = 0; w < W; ++w) all = all && __float_as_uint(value[n].at[w]) != {empty}u;
      if (all) return true;
    }}
    if (rm_hopeless(walk, start, order, {words_flag}u + number, 0, 1)) return false;
  }}
}}
__device__ __forceinline__ void rm_send(const rm_walk &walk, unsigned *words, int span, int at, float value) {{
  unsigned *const to = words + at, word = __float_as_uint(value);
  if (word == {empty}u) word = 0x7fffffffu;  // another NaN
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" :: "l"(to + (walk.epoch & 1u ? span : 0)), "r"(word) : "memory");
  to[walk.epoch & 1u ? 0 : span] = {empty}u;
}}
// All waits of a task, by the whole block. True if the block must give up.
__device__ __forceinline__ bool rm_wait(const rm_walk &walk, const unsigned *entry, int order) {{
  bool stuck = false;
  for (unsigned i = threadIdx.x; i < entry[1]; i += blockDim.x) {{
    const unsigned *const wait = entry + {head} + 3 * i;
    stuck = !rm_reached(walk, wait[0], walk.epoch * wait[2] + wait[1], order) || stuck;
  }}
  return __syncthreads_or(stuck);
}}
// Say that a task is done; the next entry is there when this returns.
__device__ __forceinline__ void rm_done(const rm_walk &walk, const unsigned *entry) {{
  const bool signals = threadIdx.x < entry[2];
  const unsigned counter = signals ? entry[{signal_at} + threadIdx.x] : 0u;
  rm_fetched();
  __syncthreads();
  if (signals) rm_release(walk.counters + counter * {line}u);
}}
template <typename T> __device__ __forceinline__ T *rm_pointer(const unsigned *entry, int i) {{
  return (T *)((const unsigned long long *)(entry + {pointer_at}))[i];
}}
"""

_WALK = """
__device__ __noinline__ bool run_{name}(const rm_walk &walk, unsigned (*slots)[{words}], int first, int count, int begin,
                                        char *scratch) {{
  rm_fetch(walk, slots[0], first);
  rm_fetched();
  __syncthreads();
  {hold}
  for (int i = 0, slot = 0; i < count; ++i) {{
    unsigned *const entry = slots[slot];
    slot = slot == {slots} - 1 ? 0 : slot + 1;
    if (i + 1 < count) rm_fetch(walk, slots[slot], first + i + 1);
    if (entry[1] && rm_wait(walk, entry, first + i - begin)) return false;
    {step}
  }}
  __syncthreads();
  return true;
}}
"""

_KERNEL = """
extern "C" __global__ void __launch_bounds__({threads}, 1) rm_persistent(const unsigned *entries, const int3 *runs,
    const int *rows, unsigned *counters, rm_control *control, unsigned long long limit) {{
  extern __shared__ __align__(16) char rm_scratch[];
  __shared__ __align__(16) unsigned slots[{slots}][{words}];
  const rm_walk walk = {{entries, counters, control, limit, rm_acquire(&control->epoch)}};
  bool alive = true;
  for (int r = rows[blockIdx.x], end = rows[blockIdx.x + 1], begin = r < end ? runs[r].y : 0; r < end && alive; ++r) {{
    const int3 run = runs[r];
    switch (run.x) {{
{cases}
    }}
  }}
  __syncthreads();
  // The last block to finish starts the next epoch; the end of the launch orders that before the next run.
  if (threadIdx.x == 0 && atomicAdd(&control->finished, 1u) == gridDim.x - 1) {{
    control->finished = 0;
    control->epoch = walk.epoch + 1;
  }}
}}
"""


def kernel_text(bodies: Sequence[Body], form: Form, threads: int) -> str:
    """The translation unit of the persistent kernel ``rm_persistent``, of blocks of ``threads``."""
    sizes = {"words": form.words, "copy": COPY, "line": LINE, "head": HEAD, "signal_at": form.signal_at, "slots": SLOTS,
             "pointer_at": form.pointer_at, "patience": PATIENCE, "control": ", ".join(CONTROL), "words_flag": WORDS,
             "empty": EMPTY}  # fmt: skip
    parts = [CUDA.preamble, ORDER, PREAMBLE, _RUNTIME.format(**sizes), *dict.fromkeys(b.text for b in bodies)]
    parts += [_WALK.format(name=b.name, words=form.words, slots=SLOTS, hold=_hold(b), step=_step(b)) for b in bodies]
    call = "alive = run_{}(walk, slots, run.y, run.z, begin, rm_scratch); break;"
    cases = "\n".join(f"      case {i}: {call.format(b.name)}" for i, b in enumerate(bodies))
    return "".join((*parts, _KERNEL.format(threads=threads, words=form.words, slots=SLOTS, cases=cases)))


def _pointers(body: Body, entry: str) -> str:
    return ", ".join(f"rm_pointer<{t}>({entry}, {i})" for i, t in enumerate(body.types))


def _hold(body: Body) -> str:
    if body.cell is None:
        return ""
    plain = _pointers(replace(body, types=body.types[: len(body.cell.arguments)]), "slots[0]")
    return f"float held[{body.cell.held}];\n  {body.cell.name}_hold({plain}, held, (int)slots[0][0]);"


def _step(body: Body) -> str:
    if body.cell is None:
        return f"{body.name}({_pointers(body, 'entry')}, scratch, (int)entry[0]);\n    rm_done(walk, entry);"
    walk = ", walk, first + i - begin" if body.cell.words else ""
    call = f"{body.cell.name}_step({_pointers(body, 'entry')}{walk}, held, (float *)scratch, (int)entry[0])"
    # A step with words fetches the next entry before its own last barrier.
    done = "if (entry[2]) rm_done(walk, entry);" if body.cell.words else "rm_done(walk, entry);"
    return f"if (!{call}) return false;\n    {done}"
