"""Many lengths of one model: right results, few programs, bounded memory, one copy of the weights on disk.

An encoder runs at ``lengths`` lengths from 1 to ``most``, twice in random order. A decoder generates ``tokens`` tokens from an
empty past, first by runs and then by a bound call with in-place caches. With ``runs``, the encoder runs at random lengths from
``threads`` threads instead. Every result is compared with ONNX Runtime's. The models are BERT and GPT-2 (``zoo/ranged.py``).
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from range_peers import error_of, onnx_runtime
from ranges import resident
from zoo.ranged import RANGED, Open

import rammer
from rammer.runtime.executable import Executable
from rammer.runtime.shape_buckets import BUCKETS
from rammer_testing.cache_files import entries

Array = np.ndarray
#: Relative to the largest value of an output: float32, with sums in another order.
TOLERANCE = 2e-5
#: Bytes that a process may grow by if nothing new is compiled: allocators retain memory that threads freed.
GROWTH = 8 << 20


@dataclass(frozen=True)
class Asked:
    """A measurement: a device with its options (``KEY=VALUE``), and the sizes of its models and loops."""

    device: str
    seed: int
    options: tuple[str, ...] = ()
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    vocabulary: int = 1000
    most: int = 512
    lengths: int = 100
    tokens: int = 64
    runs: int = 0
    threads: int = 4


@dataclass
class Found:
    """The result of a measurement. It has the number of compiled programs and the largest error. ``growth`` is that of the
    process in bytes while nothing new was needed. ``disk`` is the bytes on disk for each byte of weights (0: not measured)."""

    what: str
    runs: int
    programs: int
    error: float
    growth: int
    disk: float = 0.0
    most_programs: int = BUCKETS

    @property
    def fine(self) -> bool:
        """True if all results are within their limits."""
        return self.programs <= self.most_programs and self.error <= TOLERANCE and self.growth <= GROWTH and self.disk < 1.5

    def __str__(self) -> str:
        kept = f", {self.disk:.2f} bytes on disk a byte of weights" if self.disk else ""
        verdict = "" if self.fine else "  NOT FINE"
        return (
            f"{self.what}: {self.runs} runs, {self.programs} programs, error {self.error:.1e}, "
            f"grew by {self.growth / 2**20:.1f} MiB{kept}{verdict}"
        )


@dataclass
class Judge:
    """ONNX Runtime on the same model; its inputs and results are cached by length."""

    model: Open
    proto: onnx.ModelProto
    seed: int
    known: dict[int, tuple[dict[str, Array], dict[str, Array]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.of = onnx_runtime(self.proto, 1).run

    def at(self, length: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return inputs of this length, and ONNX Runtime's results."""
        if length not in self.known:
            inputs = self.model.inputs_at(self.proto, length, np.random.default_rng(self.seed + length))
            self.known[length] = inputs, self.of(inputs)
        return self.known[length]


def many_lengths(model: Open, lengths: Sequence[int], asked: Asked) -> Found:
    """Run all lengths in random order, twice."""
    proto = model.build(asked.seed)
    judge, rng = Judge(model, proto, asked.seed), np.random.default_rng(asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        onnx.save(proto, file)
        exe = opened(file, model, asked)
        exe.cache_root = Path(folder)
        worst, before = 0.0, 0
        for again in (False, True):
            for length in rng.permutation(lengths):
                inputs, expected = judge.at(int(length))
                worst = max(worst, error_of(exe.run(inputs), expected))
            before = before if again else resident()
        growth, programs = resident() - before, len(exe.cache)
        exe.close()
        kept = sum(f.stat().st_size for f in (file, *entries(Path(folder), "constants")))
    weights = sum(len(t.raw_data) for t in proto.graph.initializer)
    return Found(f"encoder, {len(lengths)} lengths", 2 * len(lengths), programs, worst, growth, kept / max(weights, 1))


def opened(proto: onnx.ModelProto | Path, model: Open, asked: Asked) -> Executable:
    """Return the model compiled for its range."""
    options = dict(o.split("=", 1) for o in asked.options)
    return rammer.compile(proto, asked.device, shapes={model.symbol: model.span}, options=options)


def tokens(model: Open, asked: Asked) -> list[Found]:
    """Generate a sequence by runs, and one by a bound call that stores past keys and values in place."""
    proto, count = model.build(asked.seed), model.span[1] + 1
    judge, exe, kept = Judge(model, proto, asked.seed), opened(proto, model, asked), model.caches(proto)
    bound = exe.bind({"ids": np.array([[3]])}, kept)
    first = model.inputs_at(proto, 0, np.random.default_rng(asked.seed))
    worst, grown, start = [0.0, 0.0], [0, 0], list[int]()
    for way in range(2):
        state, token = {n: first[n] for n in kept.values()}, 3
        for past in range(count):
            inputs = {"ids": np.array([[token]]), **state}
            expected = judge.of(inputs)
            if way:
                bound.write({"ids": [[token]]})
                bound.run(past=past)
            got = bound.to_host() if way else exe.run(inputs)
            worst[way] = max(worst[way], error_of(got, expected))
            state = {name: expected[o] for o, name in kept.items()}
            token = int(expected["logits"].argmax())
            if past == count - 2:
                start.append(resident())
        grown[way] = resident() - start[-1]
    programs = len(exe.cache) - 1
    made = [Found(f"decoder, {count} tokens by runs", count, programs, worst[0], grown[0])]
    made.append(Found(f"decoder, {count} tokens in place", count, 1, worst[1], grown[1], most_programs=1))
    exe.close()
    return made


def from_threads(model: Open, asked: Asked) -> Found:
    """Run random lengths from several threads; memory is first measured after a tenth of the runs."""
    proto, span = model.build(asked.seed), model.span
    judge, exe, lock = Judge(model, proto, asked.seed), opened(proto, model, asked), threading.Lock()
    for length in range(span[0], span[1] + 1):
        exe.run(judge.at(length)[0])

    def work(number: int, runs: int) -> float:
        rng, worst = np.random.default_rng([asked.seed, number, runs]), 0.0
        for length in rng.integers(span[0], span[1] + 1, runs):
            with lock:
                inputs, expected = judge.at(int(length))
            worst = max(worst, error_of(exe.run(inputs), expected))
        return worst

    each, worst, before = asked.runs // asked.threads, 0.0, 0
    for runs in (max(each // 10, 1), each - max(each // 10, 1)):
        with ThreadPoolExecutor(asked.threads) as pool:
            worst = max(worst, *pool.map(work, range(asked.threads), [runs] * asked.threads))
        before = before or resident()
    made = Found(f"encoder, {asked.threads} threads", each * asked.threads, len(exe.cache), worst, resident() - before)
    exe.close()
    return made


def measured(asked: Asked) -> list[Found]:
    """Run the measurements that ``asked`` describes."""
    size = {"width": asked.hidden, "layers": asked.layers, "heads": asked.heads, "vocabulary": asked.vocabulary}
    model = RANGED["bert_base"].sized(asked.most, **size)
    if asked.runs:
        return [from_threads(model, asked)]
    rng, inner = np.random.default_rng(asked.seed), np.arange(2, asked.most)
    lengths = sorted({1, asked.most, *(int(n) for n in rng.choice(inner, min(asked.lengths - 2, len(inner)), replace=False))})
    found = [many_lengths(model, lengths, asked)]
    return found + tokens(RANGED["gpt2"].sized(asked.tokens - 1, **size), asked)
