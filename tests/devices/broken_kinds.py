"""Planted mistakes by kind, found only by the kit: each device is the toy with one mistake."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import broken_backends
import broken_claims as claims
import broken_stores as stores

from rammer.device.manifest import Binding
from rammer.ir.operator import ROperator


def _prime(operator: ROperator, binding: Binding) -> bool:
    return any(a.extent == 251 for a in operator.anchor.axes)


def _bytes(operator: ROperator, binding: Binding) -> bool:
    return any(binding.types[n].dtype in ("int8", "uint8") for n in operator.inputs)


def _backwards(operator: ROperator, binding: Binding) -> bool:
    return any(s < 0 for n in operator.inputs for s in binding.storages[n].strides)


def _deep(operator: ROperator, binding: Binding) -> bool:
    return len(operator.anchor.axes) > 5


def _scalar(operator: ROperator, binding: Binding) -> bool:
    return not operator.anchor.axes


KINDS: Mapping[str, Mapping[str, type[Any]]] = {
    "float16 stores": {
        "cut": stores.TRUNCATES,
        "rounded down": stores.FLOORS,
        "rounded up": stores.CEILS,
        "ties up": stores.TIES_UP,
        "ties down": stores.TIES_DOWN,
        "ties away from zero": stores.TIES_AWAY,
        "ties to zero": stores.TIES_TO_ZERO,
        "ties to odd": stores.TIES_TO_ODD,
        "sums cut": stores.TruncatesSums,
        "tails cut": stores.TruncatesTails,
        "no infinity": stores.Saturates,
    },
    "subnormal numbers": {
        "flushed when stored": stores.FlushesStores,
        "flushed when loaded": stores.FlushesLoads,
        "flushed in sums": stores.FlushesSums,
        "float16 flushed": stores.FlushesHalves,
    },
    "strides": {
        "no sign": stores.NegativeAsPositive,
        "no sign, from the lowest": stores.NegativeFromLowest,
        "no sign of the last axis": stores.NegativeInner,
        "no sign of results": stores.NegativeResults,
        "no sign in runs": stores.ReversedRuns,
        "repeated rows": stores.RepeatedAsDense,
        "wider rows": stores.RowsAsDense,
        "transposed": stores.TurnedAsDense,
    },
    "an operand taken for dense": {
        "the second of a product": stores.dense_operand("contraction", 1),
        "the first of a product": stores.dense_operand("contraction", 0),
        "of a reduction": stores.dense_operand("reduction", 0),
        "the second of a map": stores.dense_operand("map", 1),
    },
    "lanes": {
        "the last of four": stores.LAST_LANE,
        "the first of eight": stores.FIRST_LANE,
        "the tail": stores.TAIL_OF_MAXIMUM,
        "the last of a minimum": stores.LAST_OF_MINIMUM,
        "the middle of a long row": stores.MIDDLE_OF_LONG,
        "the last of 32": stores.WARP_LANE,
        "one of a sum": stores.LANE_OF_SUM,
        "the tail of a product": stores.LANE_OF_PRODUCT,
        "one of a map": stores.ElementLane,
    },
    "narrow elements": {
        "the first of two": stores.FirstOfPair,
        "an odd end": stores.OddEnd,
        "swapped": stores.Swapped,
        "two bytes, an odd end": stores.ShortOdd,
        "stored by twos": stores.PairStores,
        "from even places": stores.NarrowAtEven,
        "products by fours": stores.DropsByteTail,
    },
    "bound arrays": {
        "strided, copied once": claims.COPIES_STRIDED,
        "backwards, copied once": claims.COPIES_BACKWARDS,
        "transposed, copied once": claims.COPIES_TRANSPOSED,
        "unaligned, copied once": claims.COPIES_UNALIGNED,
    },
    "two bindings of one shape": {
        "the first serves both": claims.OneBinding,
        "the last is read": claims.LastBinding,
        "the last result": claims.OneResult,
        "kernels by shape": claims.KernelByShape,
    },
    "large tables": {
        "thresholds of 8 bits": claims.ShortThresholds,
        "thresholds up to 127": claims.SignedThresholds,
        "counters of 8 bits": claims.ShortCounters,
        "rows of 512": claims.cut_rows(512),
        "rows of 1,024": claims.cut_rows(1024),
        "tasks of 8 bits": claims.ShortIndices,
        "operators of 8 bits": claims.ShortOperators,
        "256 waves": claims.FewWaves,
    },
    "shared memory": {
        "scratch": claims.SharedScratch,
        "results": claims.SharedStaging,
        "arenas of one size": claims.SharedArena,
    },
    "memory of a unit": {
        "tiles that do not fit": claims.LargeTiles,
        "kernels that do not fit": claims.LargeNeeds,
        "what does not fit is lost": claims.CutsTiles,
    },
    "figures": {
        "a scope that is none": claims.UNKNOWN_SCOPE,
        "another scope that is none": claims.WARP_SCOPE,
        "scopes in no order": claims.SCOPES_REVERSED,
        "no bandwidth": claims.NO_BANDWIDTH,
        "a precision that is none": claims.figures(precisions=("float32", "float8")),
        "a launch of minutes": claims.figures(launch=100.0),
    },
    "families": {
        "a value not declared": claims.familiar("fast", u=8),
        "a key not declared": claims.familiar("fast", w=1),
        "a family not declared": claims.familiar("slow", u=1),
        "raises of a prime": claims.raises(_prime, ValueError("no divisor")),
        "raises of bytes": claims.raises(_bytes, KeyError("int8")),
        "raises of strides": claims.raises(_backwards, AssertionError("stride"), in_kernel=True),
        "raises of axes": claims.raises(_deep, IndexError("axis")),
        "raises of a scalar": claims.raises(_scalar, ZeroDivisionError("no axis")),
    },
    "prices": {
        "6 times": claims.priced(6.0),
        "a 6th": claims.priced(1 / 6),
        "30 times": claims.priced(30.0),
        "a 30th": claims.priced(1 / 30),
        "1,000 times": claims.priced(1e3),
        "a 1,000th": claims.priced(1e-3),
        "1,000 times, of maps": claims.priced(1e3, ("map",)),
        "a 1,000th, of reductions": claims.priced(1e-3, ("reduction",)),
        "tasks 6 times": broken_backends.off(6),
        "tasks a 6th": broken_backends.off(1 / 6),
        "programs 6 times": broken_backends.off(1, 6),
    },
    "clocks": {
        "the first run's": claims.FirstClock,
        "the first bound run's": claims.FirstBoundClock,
        "processor time": claims.clocked(time.process_time),
        "the caller's processor time": claims.clocked(time.thread_time),
        "the profiler's processor time": claims.ProfilesProcessor,
        "twice": claims.clocked(time.perf_counter, 2.0),
        "a 10th": claims.clocked(time.perf_counter, 0.1),
    },
    "spans": {
        "on unit 0": claims.ON_ONE_UNIT,
        "overlapping": claims.OVERLAP,
        "all at once": claims.AT_ONCE,
        "empty": claims.EMPTY,
        "in microseconds": claims.IN_MICROSECONDS,
        "backwards": claims.BACK_IN_TIME,
    },
}
#: All planted mistakes, by kind and name.
PLANTED: Mapping[str, type[Any]] = {f"{kind}: {name}": broken for kind, of in KINDS.items() for name, broken in of.items()}
#: Checks of the kit that must find the mistakes of a kind.
CHECKS_OF: Mapping[str, tuple[str, ...]] = {
    "float16 stores": ("half precision",),
    "subnormal numbers": ("subnormal numbers",),
    "strides": ("places", "callers' arrays"),
    "an operand taken for dense": ("places",),
    "lanes": ("lanes", "special values", "types"),
    "narrow elements": ("types", "places"),
    "bound arrays": ("callers' arrays",),
    "two bindings of one shape": ("two bound calls", "places"),
    "large tables": ("long tables",),
    "shared memory": ("side by side", "two programs"),
    "memory of a unit": ("odd operators", "large tiles"),
    "figures": ("virtual device",),
    "families": ("odd operators",),
    "prices": ("prices", "clocks"),
    "clocks": ("clocks",),
    "spans": ("trace",),
}
