"""References for operator results: rammer's expressions, ONNX Runtime and onnx.reference."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from rammer import compile
from rammer.errors import RammerError
from rammer.frontend.bind.binder import bind
from rammer.frontend.host.host_node import HostNode
from rammer.frontend.lower.graph_lowering import lower_node
from rammer.frontend.lower.lowering_registry import CannotLower
from rammer.frontend.read.reader import read_model
from rammer.frontend.spec_rulings.rulings import Voice, find_decision
from rammer.ir.evaluate import evaluate_compute
from rammer.ir.graph import Graph
from rammer_testing.operators.case import Array, OperatorCase


@dataclass(frozen=True)
class Said:
    """Results, or the reason for their absence. ``broken`` marks an error that users must never see (a traceback)."""

    values: tuple[Array, ...] | None
    why: str = ""
    broken: bool = False
    #: Operators that ran on the host.
    host: tuple[str, ...] = ()


@dataclass(frozen=True)
class VoicesVerdict:
    """The verdict of the references.

    ``kind`` is one of:

    - ok.
    - wrong: all references disagree.
    - runtime or reference: only that one agrees.
    - alone: no other reference has results.
    - refused: another reference has results.
    - broken: a traceback."""

    kind: str
    text: str
    case: OperatorCase


def ours(case: OperatorCase, precise: bool = False) -> Said:
    """Return rammer's results: lowered expressions in NumPy, and host operators where no lowering exists."""
    try:
        graph = bind(read_model(case.model()), {name: a.shape for name, a in case.feeds.items()})
        return _executed(graph, case.feeds, precise)
    except RammerError as error:
        return Said(None, str(error))
    except Exception as error:
        return Said(None, f"{type(error).__name__}: {error}", broken=True)


def _executed(graph: Graph, feeds: Mapping[str, Array], precise: bool) -> Said:
    values: dict[str, Array] = {**graph.constants, **{v.name: feeds[v.external or v.name] for v in graph.inputs}}
    taken, host = set(graph.types), list[str]()
    for node in graph.nodes:
        try:
            lowered = lower_node(graph, node, taken)
        except CannotLower:
            host.append(node.op)
            operator = HostNode.of(graph, node)
            values |= operator.run({n: values[n] for n in operator.inputs})
            continue
        values |= lowered.constants
        for compute in lowered.computes:
            values[compute.name] = evaluate_compute(compute, values, precise)
    results = tuple(np.asarray(values[v.name]) for v in graph.outputs)
    for value, result in zip(graph.outputs, results, strict=True):
        if result.shape != value.type.shape:
            return Said(None, f"{value.name} is declared {value.type} and has the shape {result.shape}", broken=True)
    return Said(results, host=tuple(host))


def on_device(case: OperatorCase, device: str) -> Said:
    """Return the results of the compiled model on a device."""
    try:
        executable = compile(case.model(), device=device)
        with np.errstate(all="ignore"):
            results = executable.run(case.feeds)
        return Said(tuple(results[name] for name in case.results))
    except RammerError as error:
        return Said(None, str(error))
    except Exception as error:
        return Said(None, f"{type(error).__name__}: {error}", broken=True)


def judge_device(case: OperatorCase, device: str) -> VoicesVerdict:
    """Compare the device with rammer's expressions in NumPy, which other references judge."""
    want, have = ours(case), on_device(case, device)
    if have.broken:
        return VoicesVerdict("broken", have.why, case)
    if want.values is None or have.values is None:
        agree = (want.values is None) == (have.values is None)
        return VoicesVerdict("ok" if agree else "refused", have.why or want.why, case)
    text = difference(have.values, want.values)
    return VoicesVerdict("wrong" if text else "ok", text, case)


def reference(case: OperatorCase) -> Said:
    """Return the results of onnx.reference."""
    from onnx.reference import ReferenceEvaluator

    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = ReferenceEvaluator(case.model()).run(None, case.feeds)
        return Said(tuple(np.asarray(v) for v in values))
    except Exception as error:
        return Said(None, f"{type(error).__name__}: {error}")


def onnxruntime(case: OperatorCase) -> Said:
    """Return ONNX Runtime's results on the CPU."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        model = _typed(case)
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return Said(tuple(np.asarray(v) for v in session.run(None, case.feeds)))
    except Exception as error:
        return Said(None, f"{type(error).__name__}: {error}")


def _typed(case: OperatorCase) -> onnx.ModelProto:
    """Return the model with the element types of its outputs, which ONNX Runtime requires."""
    model = case.model()
    if case.domain:
        for port, kind in zip(model.graph.output, case.kinds, strict=True):
            port.type.tensor_type.elem_type = kind
        return model
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except Exception:  # any C++ exception: ONNX Runtime infers absent types itself
        return model
    for mine, typed in zip(model.graph.output, inferred.graph.output, strict=True):
        mine.type.tensor_type.elem_type = typed.type.tensor_type.elem_type
    return model


def difference(have: Sequence[Array], want: Sequence[Array]) -> str:
    """Return the difference of results beyond rounding, or "" if they agree. NaN equals only NaN."""
    if len(have) != len(want):
        return f"{len(have)} results, not {len(want)}"
    for i, (a, b) in enumerate(zip(have, want, strict=True)):
        text = _differ(np.asarray(a), np.asarray(b))
        if text:
            return f"result {i}: {text}"
    return ""


def _differ(a: Array, b: Array) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)}, not {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"type {a.dtype}, not {b.dtype}"
    if a.dtype.kind != "f":
        wrong = a != b
    else:
        with np.errstate(all="ignore"):
            x, y = a.astype(np.float64), b.astype(np.float64)
            loose = 1e-2 if a.dtype == np.float16 else 1e-4
            near = np.abs(x - y) <= loose * np.abs(y) + _absolute(a.dtype, y)
        wrong = ~(near & np.isfinite(x) & np.isfinite(y)) & ~(x == y) & ~(np.isnan(x) & np.isnan(y))
    if not wrong.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{a[place]!s}, not {b[place]!s} at {list(place)} ({int(wrong.sum())} of {a.size})"


def _absolute(dtype: np.dtype[Any], want: Array) -> float:
    """Return the absolute tolerance for sums that cancel: a small fraction of the largest result, bounded above."""
    finite = np.abs(want[np.isfinite(want)])
    largest = float(finite.max()) if finite.size else 0.0
    unit = 1e-3 if dtype == np.float16 else 1e-6
    return unit * min(largest, 100.0)


def judge(case: OperatorCase) -> VoicesVerdict:
    """Compare rammer's results with the references."""
    mine = ours(case)
    if mine.broken:
        return VoicesVerdict("broken", mine.why, case)
    one, two = _trusted(case, "onnxruntime", onnxruntime), _trusted(case, "reference", reference)
    if mine.values is None:
        others = [v for v in (one, two) if v.values is not None]
        return VoicesVerdict("refused" if others else "ok", mine.why, case)
    if one.values is None and two.values is None:
        return VoicesVerdict("alone", f"{one.why} | {two.why}", case)
    by_runtime = None if one.values is None else difference(mine.values, one.values)
    by_reference = None if two.values is None else difference(mine.values, two.values)
    if not by_runtime and not by_reference:
        return VoicesVerdict("ok", "", case)
    host = f" [host {', '.join(mine.host)}]" if mine.host else ""
    text = f"runtime: {_shown(by_runtime, one)}; reference: {_shown(by_reference, two)}{host}"
    if by_runtime == "":
        return VoicesVerdict("runtime", text, case)
    return VoicesVerdict("reference" if by_reference == "" else "wrong", text, case)


def _trusted(case: OperatorCase, voice: Voice, said: Callable[[OperatorCase], Said]) -> Said:
    """Return the results of a reference, unless a decision marks it as wrong here."""
    decision = find_decision(voice, case.use)
    if decision is not None:
        return Said(None, f"decided: {decision.when}")
    return said(case)


def _shown(text: str | None, said: Said) -> str:
    return f"none ({said.why[:90]})" if text is None else text or "agrees"
