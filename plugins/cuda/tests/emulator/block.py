"""The C++ around a CUDA kernel that runs on the host: a block's threads, their barriers and shuffles.

Under ThreadSanitizer they are POSIX threads. Otherwise one system thread runs all of them, each until it waits. If a barrier is
missing, the first thread thus reads data that later threads have not written yet. Threads never poll, and the launch ends at once
if all of them wait.
"""

from __future__ import annotations

#: Includes of kernels and of the instruction stand-ins. They are compiled once per process, since parsing them takes longer than
#: most kernels do.
INCLUDES = "".join(
    f"#include <{name}>\n"
    for name in (
        "atomic",
        "chrono",
        "cmath",
        "cstdint",
        "cstdio",
        "cstdlib",
        "cstring",
        "deque",
        "functional",
        "pthread.h",
        "sched.h",
        "setjmp.h",
        "sys/mman.h",
        "ucontext.h",
        "vector",
    )
)
#: ``RM_OWN(type, name)``: a variable of every thread, accessed by ``name()``. ``rm_wait(ready)`` waits until ``ready()`` and
#: returns false if that never happens.
_THREADS = """
#define RM_OWN(type, name) static thread_local type name##_own; static type &name() { return name##_own; }
static thread_local Place threadIdx, blockIdx;
template <class F> static bool rm_wait(F ready) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(300);
  while (!ready()) {
    sched_yield();
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}
// Barriers by turns, as threads come to them: ThreadSanitizer takes what one does before it reaches the next barrier for ordered
// before a late sleeper of this one where both are the same object.
typedef pthread_barrier_t Barrier;
static void rm_make(Barrier &barrier, int threads) { pthread_barrier_init(&barrier, nullptr, threads); }
static void rm_pass_barrier(Barrier &barrier) { pthread_barrier_wait(&barrier); }
"""
_TURNS = """
#define RM_OWN(type, name) static type name##_of[1024]; static type &name() { return name##_of[threadIdx.x]; }
static Place threadIdx, blockIdx;
static jmp_buf rm_places[1024], rm_home;
static bool rm_done[1024];
static int rm_threads, rm_live, rm_step, rm_idle;
static bool rm_hung;
// The next thread that has not ended, upwards and downwards by turns, so that either of two is the first one.
static void rm_next() {
  do {
    threadIdx.x += rm_step;
    if (threadIdx.x < 0 || threadIdx.x >= rm_threads) { rm_step = -rm_step; threadIdx.x += rm_step; }
  } while (rm_done[threadIdx.x]);
  _longjmp(rm_places[threadIdx.x], 1);
}
template <class F> static bool rm_wait(F ready) {
  while (!ready()) {
    if (rm_hung || ++rm_idle > 4 * rm_threads) { rm_hung = true; return false; }
    if (!_setjmp(rm_places[threadIdx.x])) rm_next();
  }
  rm_idle = 0;
  return true;
}
struct Barrier { int threads, here, turn; };
static void rm_make(Barrier &barrier, int threads) { barrier = {threads, 0, 0}; }
static void rm_pass_barrier(Barrier &barrier) {
  if (++barrier.here == barrier.threads) { barrier.here = 0; ++barrier.turn; rm_idle = 0; return; }
  const int turn = barrier.turn;
  rm_wait([&] { return barrier.turn != turn; });
}
"""
HEAD = (
    f"""
#define RM_INF INFINITY
#define RM_NAN NAN
#define __global__
#define __device__
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __shared__ static
struct float4 {{ float x, y, z, w; }};
static float4 make_float4(float x, float y, float z, float w) {{ return {{x, y, z, w}}; }}
struct uint2 {{ unsigned x, y; }};
static uint2 make_uint2(unsigned x, unsigned y) {{ return {{x, y}}; }}
struct uint4 {{ unsigned x, y, z, w; }};
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {{ return {{x, y, z, w}}; }}
static float __uint_as_float(unsigned bits) {{ float f; memcpy(&f, &bits, 4); return f; }}
struct Place {{ int x; }};
static Place blockDim;
#ifdef __SANITIZE_THREAD__
{_THREADS}
#else
{_TURNS}
#endif
"""
    + """
static Barrier rm_block[2], rm_warps[32][2];
RM_OWN(int, rm_block_turn)
RM_OWN(int, rm_warp_turn)
static unsigned long long rm_mail[1024];
// What stand-ins for instructions may do in several ways, by number: one compilation serves all.
extern "C" { int rm_switches[4]; }
static void __syncthreads() { rm_pass_barrier(rm_block[rm_block_turn()++ % 2]); }
static void rm_warp_meet() { rm_pass_barrier(rm_warps[threadIdx.x / 32][rm_warp_turn()++ % 2]); }
// What a kernel may read only after it has waited for others is NaN until every thread of the block has. ``rm_kept`` is how many
// buffers that are, and 0 where nothing is checked: then this orders nothing.
static void **rm_given, **rm_values; static long *rm_sizes; static int rm_kept, rm_expected;
static std::atomic<int> rm_here; static std::atomic<bool> rm_lost;
static void rm_forget() {
  for (int k = 0; k < rm_kept; ++k) memset(rm_given[k], 255, rm_sizes[k]);
  rm_here = 0;
}
static void rm_after() {
  if (!rm_kept) return;
  if (rm_here.fetch_add(1) == rm_expected - 1) {
    for (int k = 0; k < rm_kept; ++k) memcpy(rm_given[k], rm_values[k], rm_sizes[k]);
    ++rm_here;
  }
  if (!rm_wait([] { return rm_here > rm_expected || rm_lost; })) rm_lost = true;
}
static int min(int a, int b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }
#define __expf(x) expf(x)
static float __fdividef(float a, float b) { return a / b; }
static float rm_load_f16(const unsigned short *p) {
  const int e = *p >> 10 & 31, m = *p & 1023;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1024 + m, e - 25) : ldexpf(m, -24);
  return *p >> 15 ? -v : v;
}
static void rm_store_f16(unsigned short *p, float value) {
  const float v = fabsf(value);
  int e = 0, h = 0x7e00;
  if (v >= 65520.0f) h = 0x7c00;
  else if (v < 6.103515625e-05f) h = (int)lrintf(ldexpf(v, 24));
  else if (v == v) { const float f = frexpf(v, &e); h = ((e + 14) << 10) + (int)lrintf(ldexpf(f, 11)) - 1024; }
  *p = (unsigned short)(h | std::signbit(value) << 15);
}
static float rm_round_f16(float value) {
  unsigned short h;
  rm_store_f16(&h, value);
  return rm_load_f16(&h);
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) {
  const int me = threadIdx.x;
  memcpy(&rm_mail[me], &value, sizeof value);
  rm_warp_meet();
  memcpy(&value, &rm_mail[me ^ mask], sizeof value);
  rm_warp_meet();
  return value;
}
static void **rm_pointers; static int rm_blocks, rm_first;
static void rm_made(int threads) {
  for (int k = 0; k < 2; ++k) {
    rm_make(rm_block[k], threads);
    for (int w = 0; w < threads / 32; ++w) rm_make(rm_warps[w][k], 32);
  }
}
"""
)
#: The text after the kernel, which reports if its threads wait for ever.
TAIL = """
static void rm_call() { @NAME@(@POINTERS@, nullptr, rm_first); __syncthreads(); }
#ifdef __SANITIZE_THREAD__
static void *rm_thread(void *number) {
  threadIdx.x = (int)(long)number;
  for (blockIdx.x = 0; blockIdx.x < rm_blocks; ++blockIdx.x) rm_call();
  return nullptr;
}
static bool rm_run(int threads) {
  pthread_t ids[1024];
  for (long t = 0; t < threads; ++t) pthread_create(&ids[t], nullptr, rm_thread, (void *)t);
  for (int t = 0; t < threads; ++t) pthread_join(ids[t], nullptr);
  return false;
}
#else
static const size_t rm_stack = 256 << 10;
static void rm_begin() {
  if (!_setjmp(rm_places[threadIdx.x])) _longjmp(rm_home, 1);
  rm_call();
  rm_done[threadIdx.x] = true; rm_idle = 0;
  if (--rm_live == 0) _longjmp(rm_home, 1);
  rm_next();
}
static void rm_start(char *stack) {
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stack; context.uc_stack.ss_size = rm_stack; context.uc_link = nullptr;
  makecontext(&context, rm_begin, 0);
  if (!_setjmp(rm_home)) setcontext(&context);
}
static void rm_take_turns() { if (!_setjmp(rm_home)) _longjmp(rm_places[threadIdx.x], 1); }
static bool rm_run(int threads) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *stacks = (char *)mmap(nullptr, threads * rm_stack, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (stacks == MAP_FAILED) abort();
  rm_threads = threads; rm_hung = false;
  for (blockIdx.x = 0; blockIdx.x < rm_blocks; ++blockIdx.x) {
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) {
      rm_done[threadIdx.x] = false;
      rm_start(stacks + threadIdx.x * rm_stack);
    }
    rm_live = threads; rm_step = 1; rm_idle = 0; threadIdx.x = 0;
    rm_take_turns();
    if (rm_kept && blockIdx.x + 1 < rm_blocks) rm_forget();
  }
  munmap(stacks, threads * rm_stack);
  return rm_hung;
}
#endif
extern "C" int rm_launch(void **pointers, int blocks, int threads, int first) {
  rm_pointers = pointers; rm_blocks = blocks; rm_first = first; blockDim.x = threads;
  rm_made(threads);
  return rm_run(threads);
}
extern "C" int rm_launch_after(void **pointers, int blocks, int threads, int first, int kept, void **given, void **values,
                               long *sizes) {
  rm_kept = kept; rm_expected = threads; rm_given = given; rm_values = values; rm_sizes = sizes; rm_lost = false;
  rm_forget();
  return rm_launch(pointers, blocks, threads, first) || rm_lost;
}
"""
