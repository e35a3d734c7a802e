"""Coverage of ONNX Runtime's CPU operators: each runs here with its types, or is an exception with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onnx import defs
from onnxruntime.capi import onnxruntime_pybind11_state as state

from rammer.frontend.bind.evaluator import JUDGED
from rammer.frontend.host.operators import OPERATORS, key_of
from rammer.frontend.lower.contrib import FUNCTIONS
from rammer.frontend.lower.lowering_registry import REGISTRY
from rammer.frontend.read import schemas
from rammer.frontend.read.function_bodies import has_function
from rammer.frontend.read.model_rewrites import EVERYWHERE, WITHDRAWN
from rammer_testing.nonempty import some

MICROSOFT, LAYOUTS = schemas.MICROSOFT, "com.microsoft.nchwc"
#: Domain and operator -> reason for an exception; "" means the whole domain.
EXCEPTIONS = {
    (LAYOUTS, ""): "layouts inside of ONNX Runtime, which no exporter writes: save optimised models at level ORT_ENABLE_EXTENDED",
    ("", "MemcpyFromHost"): "a copy that ONNX Runtime inserts between its own providers",
    ("", "MemcpyToHost"): "a copy that ONNX Runtime inserts between its own providers",
    **dict.fromkeys(
        ((MICROSOFT, op) for op in ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")),
        "a whole search for words around a decoder's graph, with its cache as state: run the decoder, and search outside of it",
    ),
    ("", "RegexFullMatch"): "a pattern may take forever",
    ("", "MaxRoiPool"): "neither a lowering nor onnx.reference has it",
    (MICROSOFT, "SparseToDenseMatMul"): "its first operand is a sparse tensor, which no device holds",
    (
        MICROSOFT,
        "MatMulFpQ4",
    ): "its weights are a blob in the order of ONNX Runtime's own kernels, which follows from the processor",
    (MICROSOFT, "AttnLSTM"): "an LSTM around Bahdanau attention, which no exporter writes any more",
}
#: ONNX's operators that ``onnx.reference`` runs on the host.
HOSTED = {
    "ConcatFromSequence", "Multinomial", "OptionalGetElement", "OptionalHasElement", "RandomNormal", "RandomNormalLike",
    "RandomUniform", "RandomUniformLike", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase", "SequenceInsert",
    "SequenceLength", "SplitToSequence", "StringConcat", "StringNormalizer", "StringSplit", "TfIdfVectorizer",
}  # fmt: skip
#: (operator, operand) -> element types that kernels support and bodies do not, and the reason.
_WORDS = frozenset({"tensor(string)"})
TYPES = {
    ("UnfoldTensor", "input"): (_WORDS, "ONNX Runtime's kernel is registered for strings, and fails on them"),
}


def kernels() -> Iterator[Any]:
    """Yield the kernels of the CPU provider."""
    for kernel in state.get_all_opkernel_def():
        if kernel.provider == "CPUExecutionProvider":
            yield kernel


def runs(domain: str, op: str) -> bool:
    """Return True if the operator is lowered, a function, or computed on the host."""
    if (domain, op) in FUNCTIONS or (domain, op) in REGISTRY or key_of(domain, op) in OPERATORS:
        return True
    if domain:
        return False
    return (
        op in (*EVERYWHERE, *WITHDRAWN) or op in JUDGED or (defs.has(op) and (has_function(defs.get_schema(op)) or op in HOSTED))
    )


def test_every_kernel_has_a_counterpart() -> None:
    found = {(k.domain, k.op_name) for k in kernels()}
    assert len(found) > 250 and len({op for domain, op in found if domain == MICROSOFT}) > 70
    missing = {(d, op) for d, op in found if not runs(d, op)} - {(d, op) for d, op in found if excepted(d, op)}
    assert not missing, sorted(missing)


def excepted(domain: str, op: str) -> bool:
    """Return True if the operator has a reason not to run."""
    return (domain, op) in EXCEPTIONS or (domain, "") in EXCEPTIONS


def test_exceptions_are_kernels_that_do_not_run() -> None:
    found = {(k.domain, k.op_name) for k in kernels()}
    for domain, op in EXCEPTIONS:
        assert any(d == domain and op in ("", o) and not runs(d, o) for d, o in found), (domain, op)


def test_operands_take_the_types_of_kernels() -> None:
    theirs = {s.name: s for s in state.get_all_operator_schema() if s.domain == MICROSOFT}
    checked = 0
    for kernel in some(kernels()):
        if kernel.domain != MICROSOFT or excepted(MICROSOFT, kernel.op_name):
            continue
        mine = schemas.get_schema(kernel.op_name, 1, MICROSOFT)
        accepted = {c.type_param_str: set(c.allowed_type_strs) for c in mine.type_constraints}
        for formal, own in zip(theirs[kernel.op_name].inputs, mine.inputs, strict=True):
            types = set(kernel.type_constraints.get(formal.typeStr, ()))
            allowed = accepted.get(own.type_str, {own.type_str}) | TYPES.get((kernel.op_name, formal.name), (frozenset(), ""))[0]
            assert types <= allowed, (kernel.op_name, formal.name, types - allowed)
            checked += bool(types)
    assert checked > 150
