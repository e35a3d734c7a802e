"""Lookups by counted positions: in a program for a range they become rows in order, for any counter and start."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from ranged_models import RangedModel, parsed
from ranged_programs import program_of, same_at

from rammer.frontend.lower.affine_gather import placed_rows
from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Cast, Const, Load, Ref
from rammer.ir.types import TensorType
from rammer_testing.nonempty import some

MOST = 9


def counted(rng: np.random.Generator) -> RangedModel:
    """Return a model that adds rows of a table to its input.

    A sum shifts the positions. Their type, start and step are random."""
    kind = rng.choice(np.array([np.int32, np.int64]))
    step = int(rng.choice([1, 2, -1]))
    backwards = bool(rng.integers(2))  # positions below zero count from the table's end
    begin = (-MOST if backwards else 0) if step > 0 else (-1 if backwards else MOST - 1)
    begin = begin - MOST if backwards and step == 2 else begin
    moved = 0 if backwards else int(rng.integers(3))
    text = """counted (float[2, seq, 3] x) => (float[2, seq, 3] y) {
        shape = Shape<start = 1, end = 2>(x)  wide = Squeeze(shape)  far = Mul(wide, step_wide)  ends = Add(begin_wide, far)
        end = Cast<to = KIND>(ends)  counts = Range(begin, end, step)  places = Add(counts, moved)
        rows = Gather(table, places)  y = Add(x, rows)
    }""".replace("KIND", str(TensorProto.INT32 if kind == np.int32 else TensorProto.INT64))
    proto = parsed(
        text,
        step_wide=np.int64(step),
        begin_wide=np.int64(begin),
        begin=np.array(begin, kind),
        step=np.array(step, kind),
        moved=np.array(moved, kind),
        table=rng.standard_normal((2 * MOST + 2, 3)).astype(np.float32),
    )
    return RangedModel(proto, {"seq": (1, MOST)})


@pytest.mark.sampled(6)
@pytest.mark.parametrize("draw", range(24))
def test_rows_by_counted_positions_are_rows_in_order(draw: int, rng: np.random.Generator) -> None:
    model = counted(np.random.default_rng([draw, int(rng.integers(1 << 30))]))
    onnx.checker.check_model(model.proto)
    found = program_of(model)
    for length in range(1, MOST + 1):
        same_at(model, found, {"seq": length}, rng)
    loads = [ld for c in found.graph.computes for ld in ex.loads(c.body) if ld.tensor == "table"]
    assert all(not any(map(ex.has_loads, ld.indices)) for ld in some(loads))


def test_what_may_lie_outside_or_wraps_stays_a_load() -> None:
    """Check two positions: one that its type cannot represent wraps, and one past the table gives the fill value."""
    axes, at = (Axis("i", 300),), (Ref("i"),)
    counts = Compute("counts", "uint8", axes, Cast("uint8", Ref("i")))
    near = Compute("near", "int64", axes, ex.make_add("i", 1))
    types = {"counts": counts.type, "near": near.type, "table": TensorType("float32", (300,))}
    wrapped = Compute("wrapped", "float32", axes, Load("table", (Load("counts", at),)))
    beyond = Compute("beyond", "float32", axes, Load("table", (Load("near", at),), 0.0))
    types |= {c.name: c.type for c in (wrapped, beyond)}
    found = {c.name: c for c in placed_rows([counts, near, wrapped, beyond], types, {"table"}, ("wrapped", "beyond"))}
    assert found["wrapped"].body == wrapped.body
    assert found["beyond"].body == Load("table", (ex.make_add("i", 1),), 0.0)
    assert set(found) == {"counts", "wrapped", "beyond"}


def test_a_choice_that_places_decide_is_none() -> None:
    axes, at = (Axis("i", 4),), (Ref("i"),)
    counts = Compute("counts", "int64", axes, ex.make_add("i", -4))
    negative = ex.Op("lt", (Load("counts", at), Const(0, "int64")))
    index = ex.Op("where", (negative, ex.make_add(Load("counts", at), 8), Load("counts", at)))
    rows = Compute("rows", "float32", axes, Load("table", (index,), 0.0))
    types = {"counts": counts.type, "rows": rows.type, "table": TensorType("float32", (8,))}
    (found,) = placed_rows([counts, rows], types, {"table"}, ("rows",))
    assert found.body == Load("table", (ex.make_add("i", 4),))
