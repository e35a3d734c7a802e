"""How many kernels a model is: rammer's, XLA's and torch.compile's."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import onnx
from measuring import Settings, Subject, Way, each, measured
from result import Result

from rammer.errors import RammerError
from rammer.peers.graph import Array
from rammer.peers.prepare import gpu_name, torch_module
from rammer.peers.to_jax import load_jax, to_jax
from rammer.peers.to_torch import load_torch

#: FusionStitching's models (AStitch, table 2), and one with more reductions.
MODELS: Final = ("bert_base", "transformer", "dien", "crnn", "quartznet")
#: Instructions of XLA that run nothing.
_FREE: Final = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id"))
#: One instruction: its operator, and what follows it.
_INSTRUCTION: Final = re.compile(r"^\s*(?:ROOT\s+)?%?[\w.-]+ = .*? ([a-z][\w-]*)\((.*)$")
_CALLED: Final = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_HEAVY: Final = ("dot", "convolution", "custom-call")
HEADERS: Final = ("model", "runner", "kernels", "memory-bound", "rammer's memory-bound / this")


@dataclass(frozen=True)
class Kernels:
    """How many kernels one run has, and how many of these multiply no matrices."""

    kernels: int
    memory_bound: int


def computations(text: str) -> dict[str, list[tuple[str, str]]]:
    """(operator, rest of the line) of every instruction of a compiled HLO module, by computation; the entry is ""."""
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


def xla_kernels(text: str) -> Kernels:
    """Kernels of a compiled HLO module, each body of a loop counted once."""
    parts = computations(text)

    def heavy(operator: str, rest: str) -> bool:
        if operator in _HEAVY:
            return True
        return operator == "fusion" and any(heavy(*i) for c in _CALLED.findall(rest) for i in parts.get(c, ()))

    def counted(name: str) -> tuple[int, int]:
        kernels = light = 0
        for operator, rest in parts.get(name, ()):
            if operator in ("while", "call", "conditional"):
                for called in _CALLED.findall(rest):
                    more = counted(called)
                    kernels, light = kernels + more[0], light + more[1]
            elif operator not in _FREE:
                kernels, light = kernels + 1, light + (not heavy(operator, rest))
        return kernels, light

    return Kernels(*counted(""))


def xla(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Kernels:
    """Of ``jax.jit`` of the whole model."""
    jax = load_jax()
    function, weights = to_jax(model)
    feeds = [jax.numpy.asarray(inputs[n]) for n in inputs]
    compiled = jax.jit(lambda w, *x: function(w, dict(zip(inputs, x, strict=True)))).lower(weights, *feeds).compile()
    return xla_kernels(compiled.as_text())


def inductor(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> Kernels:
    """Of ``torch.compile``: calls in the code that it writes."""
    torch = load_torch()
    utils: Any = importlib.import_module("torch._inductor.utils")
    module, feeds = torch_module(model, inputs, "cuda" if gpu_name() else "cpu", "float32")
    importlib.import_module("torch._dynamo").reset()
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
    except Exception as problem:  # a peer's own failure is a result
        return f"{type(problem).__name__}: {str(problem).partition(chr(10))[0]}"


def kernel_counts(settings: Settings) -> Result:
    """rammer with and without batching beside the two."""
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
        "once; torch.compile: calls in the code that it writes. Memory-bound: without a matrix product or a convolution. A chain "
        "of products in one kernel of rammer's is no memory-bound one."
    ]
    return Result(f"Kernels of a model, {settings.device}", HEADERS, rows, notes)
