"""Host execution of any cuda kernel as a runner of the kernel search.

NaN fills shared memory, the surroundings of operands, and results. Memory that a kernel may read only after a wait for preceding
kernels is also NaN. Clusters and bulk copies are left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from random import Random

import numpy as np

from rammer.device.manifest import OpenOptions
from rammer.ir.operator import ROperator
from rammer_testing.cases import NetCase, pick_of
from rammer_testing.search import Search
from rammer_testing.single import Trial, UntiledOperator, images, judge, placed, subjects, trial_of

from . import host_wgmma
from .emulator.launch import HostKernel, launch_on_host
from .warps import WARPS
from rammer_cuda.backend import CudaBackend, open_backend
from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import task_kernel

#: Largest number of threads of a kernel that host threads emulate.
MOST_THREADS = 512
#: Copies that arrive when they are awaited, and other definitions that these kernels use.
LATE = """
#define __align__(n) __attribute__((aligned(n)))
#define __ldg(p) (*(p))
#define __ldcg(p) (*(p))
struct RmLate : std::vector<std::vector<std::function<void()>>> { RmLate() : vector(1) {} };
RM_OWN(RmLate, rm_late)
template <class T> static void rm_later(T *to, const T *from, bool valid, int bytes) {
  rm_late().back().push_back([=] { rm_move(to, from, valid, bytes); });
}
#define rm_copy4 rm_later4
#define rm_copy8 rm_later8
#define rm_copy16 rm_later16
#define rm_commit rm_late_commit
#define rm_arrived rm_late_arrived
static void rm_later4(float *to, const float *from, bool valid) { rm_later(to, from, valid, 4); }
template <class T> static void rm_later16(T *to, const T *from, bool valid) { rm_later(to, from, valid, 16); }
static void rm_later4(unsigned char *to, const unsigned char *from, bool valid) { rm_later(to, from, valid, 4); }
static void rm_later8(unsigned short *to, const unsigned short *from, bool valid) { rm_later(to, from, valid, 8); }
static void rm_later8(unsigned char *to, const unsigned char *from, bool valid) { rm_later(to, from, valid, 8); }
#define RM_FILLED(bytes) \
  static void rm_later##bytes(unsigned char *to, const unsigned char *from, bool valid, unsigned fill) { \
    if (valid) rm_later##bytes(to, from, true); else memset(to, (int)(fill & 255), bytes); \
  }
RM_FILLED(4)
RM_FILLED(8)
RM_FILLED(16)
static void rm_late_commit() { rm_late().emplace_back(); }
template <int N> static void rm_late_arrived() {
  while ((int)rm_late().size() - 1 > N) {
    for (auto &copy : rm_late().front()) copy();
    rm_late().erase(rm_late().begin());
  }
}
static void rm_blocks2_of(unsigned (&r)[4], const unsigned short *at, bool turn) {
  const int me = threadIdx.x, warp = me / 32 * 32, l = me % 32;
  rm_named[me] = at;
  rm_meet();
  for (int b = 0; b < 2; ++b) {
    unsigned short h[2];
    for (int e = 0; e < 2; ++e) {
      const int row = turn ? l % 4 * 2 + e : l / 4, column = turn ? l / 4 : l % 4 * 2 + e;
      h[e] = ((const unsigned short *)rm_named[warp + b * 8 + row])[column];
    }
    memcpy(&r[b], h, 4);
  }
  rm_meet();
}
template <bool TURN> static void rm_blocks2(unsigned (&r)[4], const unsigned short *at) { rm_blocks2_of(r, at, TURN); }
template <bool ROUND> static unsigned rm_tf32(float x) {
  unsigned r; memcpy(&r, &x, 4);
  if (ROUND && x == x && r << 1 < 0xff000000u) r = (r + 0x1000u) & 0xffffe000u;
  return r;
}
static void rm_words4(unsigned (&r)[4], const float *at) { rm_blocks4<false>(r, (const unsigned short *)at); }
"""


def told(kernels: Mapping[str, TaskKernel]) -> dict[str, tuple[object, ...]]:
    """Return all launch properties of every kernel for comparison. Packings are represented by their keys."""
    plain = [f.name for f in fields(TaskKernel) if f.name != "arguments"]
    arguments = {n: [(a.tensor, a.written, a.packing and a.packing.key) for a in k.arguments] for n, k in kernels.items()}
    return {n: (*(getattr(k, name) for name in plain), arguments[n]) for n, k in kernels.items()}


def planted(kernel: TaskKernel, edit: Callable[[str], str]) -> TaskKernel:
    """Return the kernel with a fault in its statements, or else in the text before them."""
    body = edit(kernel.body)
    made = replace(kernel, body=body) if body != kernel.body else replace(kernel, device=edit(kernel.device))
    assert made != kernel
    return made


def on_host(kernel: TaskKernel) -> str:
    """Return the text of ``kernel`` with its instructions emulated."""
    if "wgmma" in kernel.text:
        return host_wgmma.on_host(kernel)
    warps = WARPS.replace("abort();", "rm_lost = true;").replace("@BYTES@", str(max(kernel.dynamic, 64)))
    text = warps + LATE + kernel.text
    text = re.sub(r"extern __shared__ __align__\(16\) (\w+) (?!memory)(\w+)\[\];", r"\1 *const \2 = (\1 *)memory;", text)
    return text.replace("extern __shared__ __align__(16) char memory[];", "")


class HostSearch(Search):
    """The search over the kernels for ``target``, run on the host."""

    def __init__(self, target: str, each: int = 1) -> None:
        backend = open_backend(OpenOptions(target=target))
        assert isinstance(backend, CudaBackend)
        self.backend: CudaBackend = backend
        self.each = each

    def possible(self, tiled: ROperator, subject: UntiledOperator) -> bool:
        """Return True if the kernel exists and host threads can run it."""
        if not super().possible(tiled, subject):
            return False
        kernel = task_kernel(tiled, subject.binding)
        return kernel.blocks == 1 and kernel.threads <= MOST_THREADS and ("bulk" not in kernel.text or "wgmma" in kernel.text)

    def check(self, tiled: ROperator, trial: Trial) -> str:
        return problem_of(task_kernel(tiled, trial.subject.binding), tiled, trial)


def problem_of(kernel: TaskKernel, tiled: ROperator, trial: Trial) -> str:
    """Return the error in the results of ``kernel``, or "" if they are right."""
    binding = trial.subject.binding
    place = placed(tiled, binding, trial.constants, tiled.task_count)
    for number, feed in enumerate(trial.feeds):
        given = images(place, feed.inputs)
        results = {
            n: np.full(place.program.buffer[f"b_{n}"].nbytes, 0xFF, np.uint8).view(binding.types[n].dtype) for n in tiled.outputs
        }
        fixed = {n: np.ascontiguousarray(v) for n, v in trial.constants.items()}
        buffers = {**given, **results, **fixed}
        addresses = {n: b.ctypes.data + place.program.storage[n].offset * b.itemsize for n, b in buffers.items()}
        host = HostKernel.of(kernel, binding, fixed, on_host(kernel), tiled.task_count)
        launch_on_host(replace(host, switches=(number % 2 == 0, number % 2 == 1)), addresses, list(given.values()))
        if problem := judge(place, results, feed.wanted):
            return f"run {number}: {problem}"
    return ""


def run_cases(search: HostSearch, case: NetCase, random: Random) -> tuple[int, list[str]]:
    """Run candidates of the first contraction of ``case``, or of its first operator if it has no contraction. Return the number
    of runs, and every problem with the text that repeats it."""
    run, found = 0, list[str]()
    numbered = list(enumerate(subjects(case, search.backend)))
    products = [(n, s) for n, s in numbered if any(c.kind == "contraction" for c in s.operator.computes)]
    for number, subject in (products or numbered)[:1]:
        trial = trial_of(subject, case.seed)
        for tiled in search.candidates(subject, random):
            if search.possible(tiled, subject):
                problem, run = search.check(tiled, trial), run + 1
                found += [f"{replace(case, operator=number, pick=pick_of(tiled))}\n    {problem}"] if problem else []
    return run, found
