"""Coverage of the operator table: versions, element types, ranks, static operands, special values, attributes of each operator.

``operator_table.txt`` lists the facts that two separate tables once drew, for graphs and for single operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rammer_testing.operators.oracles  # noqa: F401  (importing it registers the schemas of all domains)
from rammer_testing.graphs.generate import OPSETS
from rammer_testing.operators import DESCRIBED, drawn
from rammer_testing.operators.case import OperatorCase
from rammer_testing.operators.draw import Draw, Reject, schema_of

#: Most cases that are drawn until all facts of an operator are found; the rarest fact occurs in 2% of the cases.
MOST = 1000
LINES = (Path(__file__).parent / "operator_table.txt").read_text().splitlines()
#: The facts of each operator.
TABLE = {
    op: {f"{name} {fact}" for part in parts for name, *facts in (part.split(),) for fact in facts}
    for op, *parts in (line.split(" | ") for line in LINES)
}


def facts(case: OperatorCase) -> Iterator[str]:
    """Yield the facts of a case, each with its operand or attribute. Variadic operands count as the last formal one."""
    formal = [i.name for i in case.schema.inputs]
    yield f"version {case.schema.since_version}"
    yield "outputs " + "".join("-" if i in case.absent else "y" for i in range(case.outputs)).rstrip("-")
    yield from (f"{name} absent" for name, _ in zip(formal, case.operands, strict=False) if _ is None)
    yield from (f"{name} absent" for name in formal[len(case.operands) :])
    for i, array in enumerate(case.operands):
        if array is not None:
            name = formal[min(i, len(formal) - 1)]
            yield f"{name} {'static' if i in case.static else 'fed'}"
            yield from (f"{name} {fact}" for fact in (str(array.dtype), f"rank{array.ndim}", *_values(array)))
    yield from (f"{key} {fact}" for key, value in case.attributes.items() for fact in _attribute(key, value))


def _values(array: np.ndarray[Any, Any]) -> Iterator[str]:
    if not array.size:
        yield "empty"
    elif array.dtype.kind == "f":
        known = {"nan": np.isnan(array), "inf": np.isinf(array), "huge": np.isfinite(array) & (np.abs(array) > 1e4)}
        yield from (kind for kind, where in known.items() if where.any())
    elif array.dtype.kind in "iu":
        known = {"negative": array < 0, "edge": array == np.iinfo(array.dtype).max}
        yield from (kind for kind, where in known.items() if where.any())


def _attribute(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple):
        yield "list" if value else "empty-list"
        for element in value[:16]:
            yield from _attribute(key, element)
    elif isinstance(value, str | bytes):
        text = value.decode() if isinstance(value, bytes) else value
        yield "".join(s for s in ("...", "->", ",") if s in text) or "plain" if key == "equation" else text
    elif isinstance(value, int | np.integer):
        near = -3 <= value <= 3 or "type" in key or key == "to"
        yield str(int(value)) if near else "many" if value > 0 else "very-negative"
    elif isinstance(value, float):
        signs = {"nan": value != value, "0": not value, "negative": value < 0, "above-1": value > 1}
        yield next((text for text, is_so in signs.items() if is_so), "up-to-1")
    elif value is not None:
        yield "tensor"


def in_graph(op: str, seed: int, number: int) -> Iterator[OperatorCase]:
    """Yield a use of an operator as a graph draws it, if one can be drawn."""
    rng = np.random.default_rng([seed, number])
    opsets = [o for o in OPSETS if schema_of(op, o) is not None]
    d = Draw(rng, int(rng.choice(opsets)), empty=float(rng.choice([0, 0.04, 0.25])), level=bool(rng.random() < 0.5))
    with suppress(Reject):
        d.pick(("float32",), (1, 4))
        DESCRIBED[op].draw(d, op)
        if d.nodes[-1].op == op:
            yield d.use()


def test_the_table_has_every_operator() -> None:
    assert set(TABLE) <= set(DESCRIBED)


@pytest.mark.sampled(60)
@pytest.mark.parametrize("op", sorted(TABLE))
def test_every_fact_is_drawn(op: str, seed: int) -> None:
    missing = set(TABLE[op])
    for number in range(MOST):
        missing.difference_update(facts(drawn(op, seed, number)))
        if missing and number % 4 == 3 and DESCRIBED[op].weight:
            missing.difference_update(*map(facts, in_graph(op, seed, number)))
        if not missing:
            return
    pytest.fail(f"never drawn in {MOST} cases: {', '.join(sorted(missing))}")
