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

from rammer_cuda.cell.kernel import PREAMBLE
from rammer_cuda.dialect import CUDA
from rammer_cuda.kernels.task import HeldKernel
from rammer_cuda.persistent.table import COPY, HEAD, Form
from rammer_cuda.source import ORDER

#: 32-bit words from a counter to the next: one L2 line of 128 bytes.
LINE = 32
#: Polls between two looks at the clock and at whether another block gave up.
PATIENCE = 512
#: The word that says "not there yet": a NaN that no arithmetic gives (CUDA's canonical NaN is 0x7fffffff).
EMPTY = 0xFFFFDEAD
#: Entries of the table that a block has at hand: the one it works on, the next, and one that slow warps may still read.
SLOTS = 3
#: The control block by name; behind it is, for each row, one more than the entry that it gave up at.
CONTROL = ("epoch", "finished", "aborted")


@dataclass(frozen=True, slots=True)
class Body:
    """What one kernel number runs: a kernel that holds constants, or a generic function of so many pointers of the C types."""

    name: str
    text: str
    types: tuple[str, ...]
    held: HeldKernel | None = None


#: With RM_TRACE each task leaves its SM, when its last wait (as thread 0 sees it) ended, and when its last warp ended.
_TRACE = """
#ifdef RM_TRACE
struct RmRecord { unsigned long long start, end, sm; };
__device__ RmRecord *rm_records;
__device__ const unsigned *rm_begins;
#define RM_RECORD(order) rm_records[rm_begins[blockIdx.x] + (order)]
#define RM_BEGIN(order) if (threadIdx.x == 0) { \\
    unsigned sm; asm volatile("mov.u32 %0, %smid;" : "=r"(sm)); \\
    RM_RECORD(order).sm = sm; RM_RECORD(order).start = rm_now(); }
#define RM_END(order) if (threadIdx.x % 32 == 0) atomicMax(&RM_RECORD(order).end, rm_now());
#else
#define RM_BEGIN(order)
#define RM_END(order)
#endif
"""

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
// Whether to stop waiting: another block gave up, or this one has waited too long. Notes where this row stopped.
__device__ __noinline__ bool rm_hopeless(const rm_walk &walk, unsigned long long &start, int order) {{
  const unsigned long long now = rm_now();
  if (start == 0) start = now;
  if (!rm_acquire(&walk.control->aborted) && now - start <= walk.limit) return false;
  atomicExch(&walk.control->aborted, 1u);
  ((unsigned *)(walk.control + 1))[blockIdx.x] = order + 1;
  return true;
}}
// One wait of a task, by one thread. False if it was in vain.
__device__ __forceinline__ bool rm_reached(const rm_walk &walk, unsigned counter, unsigned wanted, int order) {{
  unsigned long long start = 0;
  for (;;) {{
    for (int i = 0; i < {patience}; ++i)
      if ((int)(rm_acquire(walk.counters + counter * {line}u) - wanted) >= 0) return true;
    if (rm_hopeless(walk, start, order)) return false;
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
    const int (&at)[N], rm_vector<W> (&value)[N], int order) {{
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
      if (all) {{ RM_BEGIN(order) return true; }}
    }}
    if (rm_hopeless(walk, start, order)) return false;
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
    RM_BEGIN(first + i - begin)
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


def kernel_text(bodies: Sequence[Body], form: Form, threads: int, traced: bool = False) -> str:
    """The translation unit of the persistent kernel ``rm_persistent``, of blocks of ``threads``; ``traced``, every task
    leaves a record in ``rm_records[rm_begins[vEU] + order]``."""
    sizes = {"words": form.words, "copy": COPY, "line": LINE, "head": HEAD, "signal_at": form.signal_at, "slots": SLOTS,
             "pointer_at": form.pointer_at, "patience": PATIENCE, "control": ", ".join(CONTROL), "empty": EMPTY}  # fmt: skip
    parts = ["#define RM_TRACE 1\n" if traced else "", CUDA.preamble, ORDER, _TRACE, PREAMBLE, _RUNTIME.format(**sizes)]
    parts += dict.fromkeys(b.text for b in bodies)
    parts += [_WALK.format(name=b.name, words=form.words, slots=SLOTS, hold=_hold(b), step=_step(b)) for b in bodies]
    call = "alive = run_{}(walk, slots, run.y, run.z, begin, rm_scratch); break;"
    cases = "\n".join(f"      case {i}: {call.format(b.name)}" for i, b in enumerate(bodies))
    return "".join((*parts, _KERNEL.format(threads=threads, words=form.words, slots=SLOTS, cases=cases)))


def _pointers(body: Body, entry: str) -> str:
    return ", ".join(f"rm_pointer<{t}>({entry}, {i})" for i, t in enumerate(body.types))


def _hold(body: Body) -> str:
    if body.held is None:
        return ""
    plain = _pointers(replace(body, types=body.types[: len(body.held.arguments)]), "slots[0]")
    return f"float held[{body.held.held}];\n  {body.held.name}_hold({plain}, held, (int)slots[0][0]);"


def _step(body: Body) -> str:
    end = "RM_END(first + i - begin)"
    if body.held is None:
        return f"{body.name}({_pointers(body, 'entry')}, scratch, (int)entry[0]);\n    {end}\n    rm_done(walk, entry);"
    walk = ", walk, first + i - begin" if body.held.words else ""
    call = f"{body.held.name}_step({_pointers(body, 'entry')}{walk}, held, (float *)scratch, (int)entry[0])"
    # A step with words fetches the next entry before its own last barrier.
    done = "if (entry[2]) rm_done(walk, entry);" if body.held.words else "rm_done(walk, entry);"
    return f"if (!{call}) return false;\n    {end}\n    {done}"
