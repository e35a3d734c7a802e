"""Verification of Computes: valid element types, integer indices, and reads within tensors and tables. The memory safety of
kernels depends on these checks: code generators do not repeat them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rammer.errors import RammerError
from rammer.ir import expr as ex
from rammer.ir.compute import Compute
from rammer.ir.expr import Cast, Const, Expr, Interval, Load, Op, Ref, Table
from rammer.ir.types import SHORT, TensorType, is_float


class VerifyError(RammerError):
    """A violation of a rule that every device relies on: a mistake of the planner or of an edited file."""


#: Beyond this limit, an intermediate integer of an index could overflow 64 bits.
FARTHEST = 1 << 62
#: Maximum axes of a tensor or of a reduction (a limit of NumPy, which checks and simulates programs), and maximum levels of an
#: expression.
MOST_AXES, DEEPEST = 32, 200


class Bodies:
    """A checker of Computes over tensors of these ``types``. Computes that differ only in tensor names are checked once."""

    def __init__(self, types: Mapping[str, TensorType]) -> None:
        self.types = types
        self.known: set[tuple[object, ...]] = set()

    def check(self, c: Compute, operator: str) -> None:
        """Raise VerifyError with the first problem of ``c``."""
        key = (c.kin, *[self.types[t] for t in c.reads])
        if key not in self.known:
            for problem in _compute_problems(c, self.types):
                raise VerifyError(problem, f"{operator}: {c.name}")
            self.known.add(key)


def _compute_problems(c: Compute, types: Mapping[str, TensorType]) -> Iterator[str]:
    if c.dtype not in SHORT:
        yield f"unknown element type {c.dtype}"
    if max(len(c.axes), len(c.reduce)) > MOST_AXES or any(not 0 <= a.extent < FARTHEST for a in (*c.axes, *c.reduce)):
        yield f"it has more than {MOST_AXES} axes, or an axis of an invalid extent"
    if _expression_depth(c.body) > DEEPEST:
        yield f"its expression has more than {DEEPEST} levels"
        return  # all other checks recurse through the levels
    bounds: dict[str, Interval] = {a.name: (0, a.extent - 1) for a in (*c.axes, *c.reduce)}
    dtypes = {t: types[t].dtype for t in c.reads}
    for e in ex.walk(c.body):
        if isinstance(e, Const | Cast | Table) and e.dtype not in SHORT:
            yield f"unknown element type {e.dtype}"
        elif isinstance(e, Table):
            yield from _table_problems(e, bounds if c.points else None, dtypes)
        elif isinstance(e, Load):
            yield from _load_problems(e, types[e.tensor].shape, bounds if c.points else None, dtypes)


def _table_problems(e: Table, bounds: Mapping[str, Interval] | None, dtypes: Mapping[str, str]) -> Iterator[str]:
    yield from _index_problems(e.index, bounds, dtypes)
    span = ex.interval(e.index, bounds) if bounds is not None else (0, 0)
    if span is None or not 0 <= span[0] <= span[1] < len(e.values):
        yield f"a table of {len(e.values)} values is read at {e.index}"


def _load_problems(
    e: Load, shape: tuple[int, ...], bounds: Mapping[str, Interval] | None, dtypes: Mapping[str, str]
) -> Iterator[str]:
    if len(e.indices) != len(shape):
        yield f"{e} has {len(e.indices)} indices for shape {shape}"
        return
    for index, extent in zip(e.indices, shape, strict=True):
        yield from _index_problems(index, bounds, dtypes)
        if e.fill is not None or bounds is None:
            continue  # guarded, or never read
        span = ex.interval(index, bounds)
        if span is None and not ex.loads(index):
            yield f"{e}: index {index} is unbounded"  # an index that depends on data is clamped to the tensor
        if span is not None and not 0 <= span[0] <= span[1] < extent:
            yield f"{e}: index {index} covers {span[0]}..{span[1]}, the axis has {extent}"


def _index_problems(index: Expr, bounds: Mapping[str, Interval] | None, dtypes: Mapping[str, str]) -> Iterator[str]:
    """Yield problems of ``index``: non-integer values or overflow, also of subexpressions."""
    if isinstance(index, Ref):
        return
    if is_float(ex.dtype_of(index, dtypes)):
        yield f"index {index} is not an integer"
    if bounds is None:
        return
    for e in ex.walk(index):
        span = ex.interval(e, bounds) if isinstance(e, Const | Op | Table) else None
        if span is not None and max(-span[0], span[1]) >= FARTHEST:
            yield f"index {index} may overflow"


def _expression_depth(e: Expr) -> int:
    """Return the number of levels of an expression, without recursion."""
    level, depth = [e], 0
    while level and depth <= DEEPEST:
        level = [child for parent in level for child in ex.children(parent)]
        depth += 1
    return depth
