"""Transfers between GPUs: the device code on host threads, which emulate blocks of two GPUs with delays, and planted faults.
Memory that others write holds other values until its flag is set."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rammer.errors import BadInput

from rammer_cuda.compile import compile_cubin
from rammer_cuda.gpu import TARGETS
from rammer_cuda.peer.entries import (
    LONG,
    SHORT,
    PeerEntry,
    PeerKind,
    blocks_of,
    device_text,
    encode_entries,
    exchange_text,
    spread_over,
)
from rammer_cuda.peer.layout import LINE, SLOT, PeerLayout, Route

COMPILER = shutil.which("g++")
#: A block is a host thread with one emulated thread. A GPU's launches run one after the other.
HEAD = r"""
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#define RM_PEER_HOST
#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static thread_local
#define __launch_bounds__(n)
#define __grid_constant__
struct uint4 { unsigned x, y, z, w; };
struct dim { unsigned x; };
static thread_local dim blockIdx;
static const dim threadIdx = {0}, blockDim = {1};
static void __syncthreads() {}
static void rm_after() {}
static unsigned rm_peer_read(const unsigned *from) { return __atomic_load_n(from, __ATOMIC_RELAXED); }
static unsigned rm_peer_get(const unsigned *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
static void rm_peer_set(unsigned *to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
static bool rm_peer_last(unsigned *arrived, unsigned blocks) {
  if (blocks == 1u) return true;
  if (__atomic_fetch_add(arrived, 1u, __ATOMIC_ACQ_REL) != blocks - 1u) return false;
  __atomic_store_n(arrived, 0u, __ATOMIC_RELEASE);
  return true;
}
static bool rm_peer_first(unsigned *failed) { return __atomic_exchange_n(failed, 1u, __ATOMIC_ACQ_REL) == 0u; }
static unsigned long long rm_peer_now() {
  std::this_thread::yield();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
"""
#: Two GPUs exchange fresh payloads in ``RUNS`` runs. The receiver compares each payload after its wait, with short delays before
#: and after. Device 1 has only ``STOP`` runs if that is less.
MAIN = r"""
static unsigned long long state = SEED;
static unsigned drawn(unsigned n) { state = state * 6364136223846793005ull + 1442695040888963407ull; return (state >> 33) % n; }
alignas(256) static unsigned char memory[2][BYTES], source[2][PAYLOAD + 16];
static rm_failure failure[2];
static void launch(const rm_entry &e, int device, const rm_entry *next = nullptr) {
  rm_entries table = {};
  table.entry[0] = e;
  unsigned blocks = e.blocks;
  if (next) { table.entry[1] = *next; table.entry[1].first = blocks; blocks += next->blocks; }
  std::vector<std::thread> all;
  for (unsigned b = 0; b < blocks; ++b)
    all.emplace_back([&, b] { blockIdx.x = b; rm_exchange(table, &failure[device], LIMIT); });
  for (auto &t : all) t.join();
}
static unsigned char value(int device, int run, int i) { return (unsigned char)(device * 101 + run * 31 + i * 7 + 1); }
static void fix(rm_entry &e) {  // numbers of a byte in the memory of GPU 0, or behind it of GPU 1
  auto place = [](unsigned long long at) { return (unsigned long long)(at < BYTES ? memory[0] + at : memory[1] + at - BYTES); };
  e.flag = place(e.flag); e.count = place(e.count); e.to = place(e.to); e.credit = e.kind == 0 ? place(e.credit) : 0;
}
static std::atomic<int> wrong;
static void nap(unsigned us) { if (us) std::this_thread::sleep_for(std::chrono::microseconds(us)); }
static void gpu(int device, unsigned (*naps)[3]) {
  for (int run = 0; run < RUNS && !(device && run >= STOP); ++run) {
    for (int i = 0; i < PAYLOAD; ++i) source[device][i] = value(device, run, i);
    nap(naps[run][0]);
    rm_entry put = writes[device][run % DEPTH]; fix(put); put.from = (unsigned long long)source[device];
    rm_entry wait = waits[device]; fix(wait);
    launch(put, device, run % 2 ? &wait : nullptr);  // a write and the wait behind it: of one launch, or of two
    if (run % 2 == 0) launch(wait, device);
    if (failure[device].failed) return;
    nap(naps[run][1]);
    const unsigned char *got = memory[device] + slots[device][run % DEPTH];
    for (int i = 0; i < PAYLOAD; ++i) if (got[i] != value(1 - device, run, i)) { wrong = 1; break; }
    nap(naps[run][2]);
    rm_entry credit = credits[device]; fix(credit);
    launch(credit, device);
  }
}
int main() {
  static unsigned naps[2][RUNS][3];
  for (auto &n : naps) for (auto &r : n) for (auto &x : r) x = drawn(4) ? 0 : drawn(300);
  std::thread other([] { gpu(1, naps[1]); });
  gpu(0, naps[0]);
  other.join();
  const rm_failure f = failure[0];
  printf("wrong %d failed %u kind %u name %u wanted %u seen %u\n", (int)wrong, f.failed, f.kind, f.name, f.wanted, f.seen);
}
"""
PAYLOAD, RUNS = 1000, 300


def layout(depth: int) -> PeerLayout:
    """Return the layout of two GPUs."""
    return PeerLayout((Route("there", PAYLOAD, 0, 1), Route("back", PAYLOAD, 1, 0)), 2, depth)


def tables(plan: PeerLayout) -> str:
    """Return the entries of both GPUs as C. Addresses are bytes of the first GPU's memory, followed by the second's."""
    size, depth = plan.nbytes(0), plan.depth

    def address(device: int, name: str, kind: str) -> int:
        return device * size + plan.words[device][name, kind]

    def text(entry: PeerEntry) -> str:
        record = encode_entries([entry])[0]
        return "{" + ", ".join(str(int(record[f])) for f in (*LONG, *SHORT)) + "}"

    lines = {"writes": list[str](), "waits": list[str](), "credits": list[str](), "slots": list[str]()}
    for device, (out, back) in enumerate((("there", "back"), ("back", "there"))):
        route, number = plan.routes[device], device
        flag, count = address(route.target, out, "flag"), address(device, out, "sent")
        credit = address(device, out, "credit")
        stride = plan.stride(route)
        to = [route.target * size + plan.slots[out] + k * stride for k in range(depth)]
        puts = [spread_over(PeerEntry(PeerKind.PUT, number, flag, count, credit, depth, t, 0, PAYLOAD), 3, 100) for t in to]
        lines["writes"].append("{" + ", ".join(map(text, puts)) + "}")
        lines["waits"].append(
            text(PeerEntry(PeerKind.WAIT, 1 - number, address(device, back, "flag"), address(device, back, "got")))
        )
        given = PeerEntry(PeerKind.CREDIT, 1 - number, address(1 - device, back, "credit"), address(device, back, "given"))
        lines["credits"].append(text(given))
        lines["slots"].append("{" + ", ".join(str(plan.slots[back] + k * stride) for k in range(depth)) + "}")
    kinds = {"writes": f"rm_entry writes[2][{depth}]", "waits": "rm_entry waits[2]", "credits": "rm_entry credits[2]"}
    kinds["slots"] = f"int slots[2][{depth}]"
    return "".join(f"static const {kinds[n]} = {{{', '.join(rows)}}};\n" for n, rows in lines.items())


def on_host(
    folder: Path, planted: tuple[str, str] | None = None, stop: int = RUNS, sanitize: str = "", seed: int = 1, depth: int = 1
) -> str:
    """Return the program's output, or ThreadSanitizer's first line."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    text = device_text()
    if planted is not None:
        assert text.count(planted[0]) == 1
        text = text.replace(*planted)
    limit = 2_000_000_000 if stop == RUNS and not planted else 300_000_000
    plan = layout(depth)
    numbers = {
        "BYTES": plan.nbytes(0),
        "PAYLOAD": PAYLOAD,
        "RUNS": RUNS,
        "STOP": stop,
        "DEPTH": depth,
        "LIMIT": limit,
        "SEED": seed,
    }
    head = "".join(f"#define {n} {v}\n" for n, v in numbers.items())
    (folder / "peer.cpp").write_text(HEAD + head + text + tables(plan) + MAIN)
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-w", *([f"-fsanitize={sanitize}"] if sanitize else [])]
    subprocess.run([COMPILER, *flags, "-o", folder / "peer", folder / "peer.cpp"], check=True)
    done = subprocess.run([folder / "peer"], capture_output=True, text=True, timeout=120, check=False)
    found = [line for line in done.stderr.splitlines() if "ThreadSanitizer" in line]
    return found[0] if found else done.stdout.strip()


GOOD = "wrong 0 failed 0 kind 0 name 0 wanted 0 seen 0"


@pytest.mark.slow
@pytest.mark.parametrize("depth", (1, 3))
def test_payloads_arrive_before_their_flags_and_slots_are_free_when_written(depth: int, tmp_path: Path, seed: int) -> None:
    assert on_host(tmp_path, seed=seed, depth=depth) == GOOD


@pytest.mark.slow
def test_blocks_and_gpus_are_ordered(tmp_path: Path, seed: int) -> None:
    """Check with ThreadSanitizer that flags, credits and arrivals order the accesses."""
    assert on_host(tmp_path, seed=seed, depth=2, sanitize="thread") == GOOD


@pytest.mark.slow
def test_a_wait_in_vain_ends_and_is_told(tmp_path: Path) -> None:
    """Check device 1 ending after 5 runs of 300: device 0 has sent one more and waits for the answer."""
    assert on_host(tmp_path, stop=5, depth=2) == "wrong 0 failed 1 kind 2 name 1 wanted 6 seen 5"


COPY = "rm_peer_copy(e, block, small, held);"
#: Code and its faulty replacement: a flag before its data; a put without waiting for a credit; a flag after the first block; an
#: arrival that is never reset.
PLANTED = {
    "flag first": (COPY, "{ rm_peer_set((unsigned *)e.flag, number); " + COPY + " }"),
    "no credit": ("(waits ? 0u : e.depth)", "(waits ? 0u : e.depth + 100u)"),
    "first block": ("if (!rm_peer_last(count + 1, e.blocks)) return;", "if (block != 0u) return;"),
    "no count": ("*count = number;\n  rm_peer_set", "rm_peer_set"),
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PLANTED)
def test_planted_faults_are_found(name: str, tmp_path: Path) -> None:
    assert on_host(tmp_path, PLANTED[name], sanitize="thread") != GOOD


@pytest.mark.parametrize("target", TARGETS)
def test_the_device_code_compiles_without_spills(target: str) -> None:
    found = compile_cubin(exchange_text(), target).resources["rm_exchange"]
    assert found.spills == 0 and found.registers <= 64, found


def test_words_and_slots_of_all_transfers_lie_apart(rng: np.random.Generator) -> None:
    for _ in range(50):
        devices, depth = int(rng.integers(2, 6)), int(rng.integers(1, 4))
        ends = [rng.permutation(devices)[:2] for _ in range(int(rng.integers(1, 9)))]
        routes = tuple(Route(f"t{i}", int(rng.integers(0, 5000)), int(a), int(b)) for i, (a, b) in enumerate(ends))
        plan = PeerLayout(routes, devices, depth)
        for device in range(devices):
            taken = [(at, at + LINE) for at in plan.words[device].values()]
            for r in routes:
                if r.target == device:
                    first = plan.slots[r.name]
                    taken += [(first + k * plan.stride(r), first + k * plan.stride(r) + r.nbytes) for k in range(depth)]
                    assert first % SLOT == plan.stride(r) % SLOT == 0
            taken.sort()
            assert all(a[1] <= b[0] for a, b in pairwise(taken)) and max((e for _, e in taken), default=0) <= plan.nbytes(device)
            assert max(plan.words[device].values(), default=-LINE) + LINE <= plan.word_bytes(device)


def test_entries_are_spread_over_blocks_and_counted() -> None:
    put = PeerEntry(PeerKind.PUT, 3, 128, 256, 512, 2, 1024, 2048, 100_000)
    both = [spread_over(put, 64, 16 << 10), PeerEntry(PeerKind.WAIT, 1, 128, 256)]
    assert blocks_of(both) == 8 and [int(r["first"]) for r in encode_entries(both)[:2]] == [0, 7]
    assert spread_over(put, 4, 1024).blocks == 4 and spread_over(replace(put, nbytes=0), 4, 1024).blocks == 1
    with pytest.raises(ValueError, match="aligned"):
        encode_entries([replace(put, to=1028)])
    with pytest.raises(ValueError, match="33 entries"):
        encode_entries([put] * 33)
    with pytest.raises(BadInput, match="0 runs"):
        PeerLayout((), 2, 0)
