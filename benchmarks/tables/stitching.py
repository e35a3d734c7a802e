"""Number of kernels per model: rammer's, XLA's and torch.compile's."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import onnx
from measuring import Settings, Subject, Way, each, measured
from result import Result

from rammer.errors import DeviceFailure, RammerError
from rammer_bench.graph import Array
from rammer_bench.prepare import gpu_name, torch_module
from rammer_bench.to_jax import load_jax, to_jax
from rammer_bench.to_torch import load_torch

#: FusionStitching's models (AStitch, table 2), and one with more reductions.
MODELS: Final = ("bert_base", "transformer", "dien", "crnn", "quartznet")
#: Instructions of XLA that run nothing.
_FREE: Final = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"),
        *("add-dependency", "opt-barrier", "copy-done", "async-done", "async-update", "domain"),
    )
)
#: Pattern of one instruction: its operator and the rest of the line.
_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.-]+ = .*? ([a-z][\w-]*)\((.*)$")
#: Instructions whose computations run as separate kernels (a fusion's is one kernel), and the pattern of their references.
_ENTERED: Final = ("while", "call", "conditional", "async-start")
_CALLED: Final = re.compile(
    r"(?:calls|to_apply|body|true_computation|false_computation|branch_computations)=(\{[^}]*\}|%?[\w.-]+)"
)
_HEAVY: Final = ("dot", "convolution", "ragged-dot")
#: Library calls without matrix products; all others count as products.
_LIGHT_CALL: Final = re.compile(r'custom_call_target="[^"]*(?:sort|topk|sharding|allocate|slice|transpose|fft|rng|norm)', re.I)
#: Kernels on a GPU by name. Inductor names kernels after the fused operators, including convolutions; only its templates
#: multiply.
_OWN: Final = re.compile(r"^triton_(?!tem|mm|bmm)")
_MULTIPLIES: Final = re.compile(
    r"gemm|gemv|conv(?!ert)|cutlass|xmma|nvjet|splitk|fmha|attention|flash_|dot_kernel|wgrad|dgrad|winograd|triton_(?:tem|mm|bmm)",
    re.I,
)
_MOVES: Final = re.compile(r"nchwtonhwc|nhwctonchw|transpose|im2col", re.I)
HEADERS: Final = ("model", "runner", "kernels", "memory-bound", "rammer's memory-bound / this")


@dataclass(frozen=True)
class Kernels:
    """Number of kernels in one run, and number of those without matrix products."""

    kernels: int
    memory_bound: int


def computations(text: str) -> dict[str, list[tuple[str, str]]]:
    """Return (operator, rest of the line) of every instruction of a compiled HLO module, by computation; the entry is ""."""
    found: dict[str, list[tuple[str, str]]] = {}
    name = None
    for line in text.splitlines():
        head = re.match(r"^(ENTRY\s+)?%?([\w.-]+)\s.*\{\s*$", line)
        if head and "=" not in line.partition("(")[0]:
            name = "" if head[1] else head[2]
            found[name] = []
        elif name is not None and (match := _INSTRUCTION.match(line)):
            found[name].append((match[1], match[2]))
    return found


def called(rest: str) -> list[str]:
    """Return the computations that an instruction refers to."""
    return [name.strip().lstrip("%") for found in _CALLED.findall(rest) for name in found.strip("{}").split(",")]


def launched(names: Iterable[str]) -> Kernels:
    """Count a GPU's kernels by name; kernels without a product's or convolution's name count as memory-bound."""
    heavy = [bool(_MULTIPLIES.search(n)) and not _OWN.search(n) and not _MOVES.search(n) for n in names]
    return Kernels(len(heavy), heavy.count(False))


def traced(torch: Any, call: Callable[[], object]) -> list[str]:
    """Return the names of the kernels that one call launches, by torch's profiler. Raises DeviceFailure without kernels."""
    call()  # compiles and chooses algorithms
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    names = [str(e["name"]) for e in events if e.get("cat") == "kernel"]
    if not names:
        raise DeviceFailure("torch's profiler saw no kernel", hint="it needs CUPTI, and no other profiler beside it")
    return names


def xla_kernels(text: str) -> Kernels:
    """Count the kernels of a compiled HLO module, each loop body once."""
    parts = computations(text)

    def heavy(operator: str, rest: str) -> bool:
        if operator == "custom-call":
            return not _LIGHT_CALL.search(rest)
        return operator in _HEAVY or (operator == "fusion" and any(heavy(*i) for c in called(rest) for i in parts.get(c, ())))

    def counted(name: str) -> tuple[int, int]:
        kernels = light = 0
        for operator, rest in parts.get(name, ()):
            if operator in _ENTERED:
                for name_of_part in called(rest):
                    more = counted(name_of_part)
                    kernels, light = kernels + more[0], light + more[1]
            elif operator not in _FREE:
                kernels, light = kernels + 1, light + (not heavy(operator, rest))
        return kernels, light

    return Kernels(*counted(""))


def xla(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Kernels:
    """Count the kernels of ``jax.jit`` of the whole model."""
    jax = load_jax()
    function, weights = to_jax(model)
    feeds = [jax.numpy.asarray(inputs[n]) for n in inputs]
    compiled = jax.jit(lambda w, *x: function(w, dict(zip(inputs, x, strict=True)))).lower(weights, *feeds).compile()
    return xla_kernels(compiled.as_text())


def inductor(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Kernels:
    """Count the kernels of ``torch.compile``: launches of one call on a GPU, elsewhere calls in the generated code."""
    torch = load_torch()
    utils: Any = importlib.import_module("torch._inductor.utils")
    module, feeds = torch_module(model, inputs, "cuda" if gpu_name() else "cpu", "float32")
    importlib.import_module("torch._dynamo").reset()
    if gpu_name():
        compiled = torch.compile(module)
        with torch.no_grad():
            return launched(traced(torch, lambda: compiled(*feeds)))
    with torch.no_grad():
        _, codes = utils.run_and_get_code(torch.compile(module), *feeds)
    body = "\n".join(code.rpartition("def call(")[2] for code in codes)
    light = len(re.findall(r"\b(?:triton|cpp_fused)\w*(?:\.run)?\(", body))
    return Kernels(light + len(re.findall(r"\b(?:extern_kernels|aten|torch\.ops\.\w+)\.\w+", body)), light)


def _peer(name: str, count: Any, model: Subject, settings: Settings) -> Kernels | str:
    settings.say(f"  {name}")
    try:
        found: Kernels = count(onnx.load(str(model.path)), model.feeds)
        return found
    except RammerError as problem:
        return problem.what.splitlines()[0]
    except Exception as problem:  # a peer's failure is a result
        return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"


def kernel_counts(settings: Settings) -> Result:
    """Count kernels of rammer with and without batching, of XLA and of torch.compile."""
    rows: list[list[str]] = []
    for model in each(settings):
        found = measured(model.path, model.feeds, [Way("rammer"), Way("rammer, apart", {"batching": "off"})], settings)
        ours = found[0].memory_bound
        counts: dict[str, Kernels | str] = {m.way.name: m.failure or Kernels(m.operators, m.memory_bound) for m in found}
        counts |= {"XLA": _peer("XLA", xla, model, settings), "torch.compile": _peer("torch.compile", inductor, model, settings)}
        for name, count in counts.items():
            if isinstance(count, str):
                rows.append([model.entry.key, name, "-", "-", count])
            else:
                share = f"{ours / count.memory_bound:.2f}" if count.memory_bound and ours else "-"
                rows.append([model.entry.key, name, str(count.kernels), str(count.memory_bound), share])
    notes = [
        "rammer: operators of the program, which are its kernels; XLA: instructions of the module that run, bodies of loops "
        "once; torch.compile: kernels that torch's profiler saw, on a CPU calls in the code that it writes. Memory-bound: "
        "without a matrix product or a convolution. A chain of products in one kernel of rammer's is no memory-bound one."
    ]
    return Result(f"Kernels of a model, {settings.device}", HEADERS, rows, notes)
