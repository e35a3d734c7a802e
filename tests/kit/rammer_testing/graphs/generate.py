"""Random valid graphs: drawn operators of the table, then outputs, functions and the checker's verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

import numpy as np

from rammer_testing.graphs.case import LOCAL, Array, Call, Function, GraphCase
from rammer_testing.operators import DESCRIBED
from rammer_testing.operators.draw import Draw, Reject, schema_of

#: The opsets of drawn graphs.
OPSETS: Final = range(7, 28)
#: Operators that some graphs combine more often than chance does: data movement, then reductions and windows.
MOVES: Final = (
    "Reshape",
    "Transpose",
    "Slice",
    "Pad",
    "Concat",
    "Split",
    "Squeeze",
    "Unsqueeze",
    "Expand",
    "Tile",
    "Flatten",
    "Gather",
    "GatherND",
    "DepthToSpace",
    "SpaceToDepth",
    "Identity",
    "Cast",
    "Trilu",
)
SUMS: Final = (
    "ReduceSum",
    "ReduceMax",
    "ReduceMean",
    "ReduceL2",
    "ArgMax",
    "CumSum",
    "Softmax",
    "LayerNormalization",
    "MatMul",
    "Einsum",
    "TopK",
    "Add",
    "Mul",
    "Where",
)
WINDOWS: Final = (
    "Conv",
    "MaxPool",
    "AveragePool",
    "ConvTranspose",
    "Resize",
    "BatchNormalization",
    "Relu",
    "Add",
    "LRN",
    "InstanceNormalization",
    "GlobalAveragePool",
)
STATES: Final = ("RNN", "GRU", "LSTM", "Add", "MatMul", "ReverseSequence")
INTEGERS: Final = (
    "QuantizeLinear",
    "DequantizeLinear",
    "DynamicQuantizeLinear",
    "MatMulInteger",
    "ConvInteger",
    "QLinearMatMul",
    "QLinearConv",
    "Cast",
    "Add",
    "Relu",
    "MatMul",
    "Clip",
)
#: Most nodes that are requested; operands that need bounds add some.
LONGEST: Final = 40


def graph(seed: int, index: int, opset: int = 0, only: Sequence[str] = (), longest: int = LONGEST) -> GraphCase | None:
    """Return graph ``index`` of ``seed``, or None if the checker rejects the drawn graph. ``only`` names the operators to draw
    from. ``opset`` 0 draws an opset. ``longest`` bounds the requested nodes."""
    rng = np.random.default_rng([seed, index])
    opset = opset or int(rng.choice(list(OPSETS)))
    empty = float(rng.choice([0.0, 0.0, 0.0, 0.0, 0.04, 0.25]))
    d = Draw(
        rng,
        opset,
        empty,
        largest=int(rng.choice([5, 8, 8, 17, 33])),
        prime=float(rng.choice([0, 0, 0.3])),
        level=bool(rng.random() < 0.15),
        renew=float(rng.choice([0.25, 0.25, 0.08])),
    )
    theme = tuple(only) or _theme(d)
    d.pick(("float32",), (1, 4))
    roll = rng.random()
    most = min(longest, 3 if roll < 0.35 else 12 if roll < 0.75 else LONGEST)
    for _ in range(int(rng.integers(1, most + 1))):
        _grow(d, theme if d.chance(0.8) else tuple(only))
    if not any(c.op != "Constant" for c in d.nodes):
        return None
    case = tidied(_functional(d, d.case(_outputs(d), f"g{seed}_{index}")), d.chance(0.1))
    try:
        case.typed()
    except Exception:  # the checker raises several types; its rejections are counted, not judged
        return None
    return case


def _theme(d: Draw) -> tuple[str, ...]:
    """Return the operators that most nodes of a graph come from; () for all."""
    roll = d.rng.random()
    if roll < 0.45:
        return ()
    return MOVES + (d.one([(), (), SUMS, WINDOWS, STATES, INTEGERS]) if roll < 0.9 else d.one([SUMS, WINDOWS]))


def _grow(d: Draw, only: tuple[str, ...]) -> None:
    names, shares = offered(d.opset, only)
    for _ in range(6):
        op = names[int(d.rng.choice(len(names), p=shares))]
        before = (list(d.values), dict(d.inputs), dict(d.constants), set(d.sparse), list(d.nodes))
        try:
            DESCRIBED[op].draw(d, op)
            return
        except Reject:
            d.values, d.inputs, d.constants, d.sparse, d.nodes = before


@lru_cache(256)
def offered(opset: int, only: tuple[str, ...]) -> tuple[list[str], np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Return the described operators that exist at ``opset``, with their probabilities."""
    names = [op for op, e in DESCRIBED.items() if e.weight and schema_of(op, opset) is not None and (not only or op in only)]
    if not names:
        names = ["Identity"]
    weights = np.array([DESCRIBED[op].weight for op in names])
    return names, weights / weights.sum()


def _outputs(d: Draw) -> list[str]:
    """Return all unread values, some inner values, and rarely an input or a constant."""
    made = [o for c in d.nodes if c.op != "Constant" for o in c.outputs if o]
    read = {n for c in d.nodes for n in c.inputs}
    chosen = [n for n in made if n not in read or d.chance(0.08)]
    given = [n for n in (*d.inputs, *d.constants) if d.chance(0.02)]
    constants = [c.outputs[0] for c in d.nodes if c.op == "Constant" and d.chance(0.02)]
    return [*(chosen or made[-1:]), *given, *constants]


def _functional(d: Draw, case: GraphCase) -> GraphCase:
    """Replace one node by a call of a local function in some cases; some attributes become the function's defaults."""
    able = [
        i
        for i, c in enumerate(case.nodes)
        if c.inputs
        and all(c.inputs)
        and all(c.outputs)
        and c.op != "Constant"
        and not any(isinstance(v, np.ndarray) for v in c.attributes.values())
    ]
    if not able or not d.chance(0.08):
        return case
    place = d.one(able)
    call = case.nodes[place]
    body = replace(
        call, inputs=tuple(f"in{i}" for i in range(len(call.inputs))), outputs=tuple(f"out{i}" for i in range(len(call.outputs)))
    )
    given = tuple(k for k in call.attributes if d.chance(0.5))
    passed = {k: v for k, v in call.attributes.items() if k not in given or d.chance(0.3)}
    made = Function(f"F{place}", body, given)
    node = Call(made.name, call.inputs, call.outputs, passed, LOCAL)
    return replace(case, nodes=(*case.nodes[:place], node, *case.nodes[place + 1 :]), functions=(made,))


def tidied(case: GraphCase, keep_unused: bool = False) -> GraphCase:
    """Return ``case`` without nodes, inputs and constants that its outputs do not need (unused inputs may stay)."""
    live, nodes = set(case.outputs), list[Call]()
    for call in reversed(case.nodes):
        if live.intersection(filter(None, call.outputs)):
            nodes.append(call)
            live.update(filter(None, call.inputs))
    used = {c.op for c in nodes if c.domain == LOCAL}
    return replace(
        case,
        nodes=tuple(reversed(nodes)),
        inputs={n: a for n, a in case.inputs.items() if n in live or keep_unused},
        constants={n: a for n, a in case.constants.items() if n in live},
        sparse=case.sparse & live,
        functions=tuple(f for f in case.functions if f.name in used),
    )


def merged(cases: Sequence[GraphCase]) -> GraphCase:
    """Merge independent graphs of one opset into one model, so that one program is built instead of many."""
    inputs, constants = dict[str, Array](), dict[str, Array]()
    nodes, outputs = list[Call](), list[str]()
    sparse, functions = set[str](), list[Function]()
    for number, case in enumerate(cases):
        part = renamed(case, f"g{number}_")
        inputs |= part.inputs
        constants |= part.constants
        nodes += part.nodes
        outputs += part.outputs
        sparse |= part.sparse
        functions += part.functions
    return GraphCase(
        cases[0].opset, inputs, constants, tuple(nodes), tuple(outputs), frozenset(sparse), tuple(functions), "batch"
    )


def renamed(case: GraphCase, prefix: str) -> GraphCase:
    """Return ``case`` with a prefix on all names that it defines."""

    def call(c: Call) -> Call:
        op = f"{prefix}{c.op}" if c.domain == LOCAL else c.op
        return replace(
            c, op=op, inputs=tuple(n and prefix + n for n in c.inputs), outputs=tuple(n and prefix + n for n in c.outputs)
        )

    def table(values: Mapping[str, Array]) -> dict[str, Array]:
        return {prefix + n: a for n, a in values.items()}

    return replace(
        case,
        inputs=table(case.inputs),
        constants=table(case.constants),
        nodes=tuple(map(call, case.nodes)),
        outputs=tuple(prefix + n for n in case.outputs),
        sparse=frozenset(prefix + n for n in case.sparse),
        functions=tuple(replace(f, name=prefix + f.name) for f in case.functions),
    )
