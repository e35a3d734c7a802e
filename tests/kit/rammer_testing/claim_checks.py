"""Conformance of a device's claims: its figures, the kernels that it offers for any operator, and their resources."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any, TypeAlias

import numpy as np

from rammer.compile_options import PRECISIONS
from rammer.device.manifest import Binding
from rammer.errors import DeviceFailure
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.compute import Compute
from rammer.ir.operator import ROperator
from rammer.ir.program import Task, dense
from rammer.ir.types import TensorType
from rammer_testing.long_checks import operator_of, program_of_operators
from rammer_testing.place_checks import operand_shapes
from rammer_testing.samples import place
from rammer_testing.subject import ConformanceError, Subject

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

#: Candidates examined per operator, and examined candidates of the exhaustive list.
LOOKED, OFFERED = 4, 8
#: Predicted seconds of the operators whose prices are checked, number of repeated measurements, and allowed ratios of measured
#: time to price (least and greatest).
SPAN, RETRIES, NEAR, FAR = 5e-5, 5, (1 / 4, 4.0), (1 / 30, 30.0)
#: Bytes that a task stores in its unit's memory if the capacity is unspecified.
KEPT = 1 << 20
#: Operators of every kind with odd extents, and the element types of operands that are not float32.
ODD: tuple[tuple[str, dict[str, str]], ...] = (
    ("y: f32[] = max[k:9] x[k]", {}),
    ("y: f32[i:1] = x[i]", {}),
    ("y: f32[i:0] = x[i]", {}),
    ("y: f32[i:3, j:0] = x[i, j]", {}),
    ("y: f32[i:251] = exp(x[i])", {}),
    ("y: f32[i:1048583] = x[i] * 2.0", {}),
    ("y: f32[a:2, b:3, c:1, d:5, e:2, f:3, g:7] = x[a, b, c, d, e, f, g] + 1.0", {}),
    ("y: f32[i:7, j:11] = x[j, i]", {}),
    ("y: f32[i:5, j:7] = x[j] - 1.0", {}),
    ("y: f32[i:3] = sum[k:0] x[i, k]", {}),
    ("y: f32[i:3] = sum[k:1] x[i, k]", {}),
    ("y: f32[i:1] = sum[k:100003] x[i, k]", {}),
    ("y: f32[i:513] = prod[k:3] x[k, i]", {}),
    ("y: f32[i:2] = min[k:5, l:7, m:3] x[k, i, l, m]", {}),
    ("y: i64[i:6] = max[k:31] x[i, k]", {"x": "int64"}),
    ("y: b1[i:33] = lt(x[i], w[i])", {}),
    ("y: f64[i:33] = sum[k:5] x[i, k]", {"x": "float64"}),
    ("y: f32[i:1, j:1] = sum[k:1] x[i, k] * w[k, j]", {}),
    ("y: f32[i:1, j:1000] = sum[k:64] x[i, k] * w[k, j]", {}),
    ("y: f32[i:1000, j:1] = sum[k:64] x[i, k] * w[k, j]", {}),
    ("y: f32[i:17, j:33] = sum[k:1021] x[i, k] * w[j, k]", {}),
    ("y: f32[i:17, j:33] = sum[k:0] x[i, k] * w[j, k]", {}),
    ("y: f32[i:17, j:17] = sum[k:9] x[i, k] * x[j, k]", {}),
    ("y: f32[i:9] = sum[k:9] x[k] * w[k]", {}),
    ("y: f32[b:3, c:2, i:5, j:7] = sum[k:13] x[b, c, i, k] * w[b, c, k, j]", {}),
    ("y: f32[i:5, j:7] = sum[k:3, l:5] x[i, k, l] * w[l, k, j]", {}),
    ("y: f16[i:31, j:9] = sum[k:15] x[i, k] * w[k, j]", {"x": "float16", "w": "float16"}),
    ("y: f32[i:31, j:9] = sum[k:15] x[i, k] * w[k, j]", {"x": "float16"}),
    ("y: i32[i:5, j:9] = sum[k:15] cast(int32, x[i, k]) * cast(int32, w[k, j])", {"x": "int8", "w": "uint8"}),
    ("y: u8[i:5, j:9] = max(x[i, j], w[j, i])", {"x": "uint8", "w": "uint8"}),
    ("y: f32[n:1, c:3, h:5, q:6] = max[k:3, l:2] x[n, c, 2 * h + k, q + l]", {}),
    ("y: f32[n:2, o:5, h:6] = sum[c:3, k:3] x[n, c, h + k] * w[o, c, k]", {}),
    ("y: f32[n:1, c:9, h:6, q:4] = sum[k:3, l:3] x[n, c, h + k, q + l] * w[c, k, l]", {}),
    ("y: f32[i:5, j:7] = x[w[i], j]", {"w": "int64"}),
    ("y: f32[i:4, j:9] = where(lt(x[i, j], 0.0), 0.0, x[i, j] * cast(float32, i))", {}),
)


# --- figures ----------------------------------------------------------------------------------------


def check_virtual_device(device: Subject) -> None:
    """Check that the figures of the virtual device are plausible and its memory layers have valid scopes, largest first."""
    v = device.backend.vdevice  # which has refused unknown scopes, and scopes in another order
    for layer in v.layers:
        good = layer.capacity >= 0 and 0 < layer.bandwidth < math.inf and layer.transaction >= 1
        device.expect(good, f"layer {layer}: a capacity below 0, no bandwidth or no transaction")
    for one, two in pairwise(m for m in v.layers if m.capacity):
        sharers = {"device": v.veus, "veu": 1}
        count = sharers.get(one.scope, one.sharers) // max(sharers.get(two.scope, two.sharers), 1)
        each = two.capacity * (count if v.staged and one.scope != "host" else 1)
        device.expect(each <= one.capacity or not v.staged, f"layer {two.name} has {each} bytes, {one.name} {one.capacity}")
    whole = {n: getattr(v, n) for n in ("veus", "threads", "vector")}
    device.expect(all(isinstance(x, int) and x >= 1 for x in whole.values()), f"counts below 1: {whole}")
    device.expect(0 < v.flops < math.inf, f"a unit computes {v.flops} FLOP/s")
    seconds = {n: getattr(v, n) for n in ("launch", "dispatch", "start")}
    device.expect(all(0 <= x < 1 for x in seconds.values()), f"seconds that cannot be: {seconds}")
    device.expect(v.resident >= 0, f"{v.resident} rows may spin at once")
    unknown = sorted(set(v.precisions) - set(PRECISIONS))
    device.expect(not unknown and "float32" in v.precisions, f"precisions {v.precisions}; there are {', '.join(PRECISIONS)}")


# --- candidates and kernels -------------------------------------------------------------------------


def check_odd_operators(device: Subject) -> None:
    """Check that any operator has candidates or none, and that its kernels are generated or declined without other errors.
    Families and their configurations must be among those that the device declares."""
    for line, kinds in ODD:
        for operator, binding in _bound(line, kinds):
            _look(device, f"{line}, strides {[list(s.strides) for s in binding.storages.values()]}", operator, binding)
    for operator in (_kept(64, 33), _kept(3, 5000)):
        binding = _dense(operator, {"x": "float32"})
        _look(device, str(operator.computes[0]), operator, binding)
        _fits(device, operator, binding)
    if device.backend.families is None:
        device.skip("declared families: it declares none")


def _bound(line: str, kinds: dict[str, str]) -> Iterator[tuple[ROperator, Binding]]:
    """Yield an untiled operator with dense, constant, reversed and row-padded tensors."""
    compute = Compute.parse(line)
    operator = ROperator("y", (compute,), (), ("y",))
    plain = _dense(operator, kinds)
    yield operator, plain
    dense_shapes = {n: t.shape for n, t in plain.types.items()}
    if all(0 not in s for s in dense_shapes.values()):
        yield operator, Binding(plain.types, plain.storages, frozenset(operator.inputs[1:]))
        for sign, wider in ((-1, 0), (1, 3)):
            storages = {
                n: place(n, s, tuple(sign * x for x in dense(n, n, (*s[:-1], s[-1] + wider) if s else ()).strides), 1)
                for n, s in dense_shapes.items()
            }
            yield operator, Binding(plain.types, storages)


def _dense(operator: ROperator, kinds: dict[str, str]) -> Binding:
    types = {c.name: c.type for c in operator.computes}
    for compute in operator.computes:
        for name, shape in operand_shapes(compute).items():
            types.setdefault(name, TensorType(kinds.get(name, "float32"), shape))
    return Binding(types, {n: dense(n, n, types[n].shape) for n in (*operator.inputs, *operator.outputs)})


def _look(device: Subject, what: str, operator: ROperator, binding: Binding) -> None:
    """Request candidates and kernels in the way of the compiler and of the search."""
    backend = device.backend
    try:
        found = list(islice(backend.candidates(operator, binding), LOOKED))
        found += islice(backend.all_candidates(operator, binding), OFFERED)
    except Exception as problem:
        raise ConformanceError(f"{what}: candidates raise {type(problem).__name__}: {problem}") from problem
    for one in found:
        _declared(device, what, one)
        try:
            kernel = backend.kernel(one, binding)
            needs = kernel.resources
        except DeviceFailure:
            continue
        except Exception as problem:
            raise ConformanceError(f"{what}: the kernel of {one.head()} raises {type(problem).__name__}: {problem}") from problem
        good = one.task_count == 0 or all(0 < t < math.inf for t in (kernel.alone, kernel.crowded))
        device.expect(good, f"{what}: {one.head()} takes {kernel.alone} s, with all units busy {kernel.crowded} s")
        capacity = backend.vdevice.layer("veu").capacity
        fits = not capacity or backend.vdevice.spills or needs.local_bytes <= capacity
        device.expect(fits, f"{what}: {one.head()} needs {needs.local_bytes} bytes of a unit that has {capacity}")


def _declared(device: Subject, what: str, one: ROperator) -> None:
    """Check that the device declares the family and the values of its configuration."""
    families = device.backend.families
    if families is None:
        return
    device.expect(one.family in families, f"{what}: family {one.family!r} is offered, but {sorted(families)} are declared")
    configs = families[one.family]
    wrong = [f"{k}={v}" for k, v in one.config if k not in configs or v not in configs[k]]
    device.expect(not wrong, f"{what}: {one.head()} has {', '.join(wrong)}, which its family does not declare")


# --- prices -----------------------------------------------------------------------------------------


def check_prices(device: Subject) -> None:
    """Check predicted against profiled seconds of a kernel: close for a product, the same order for a map and a reduction."""
    v = device.backend.vdevice
    size = max(16, min(2048, round((v.flops * v.veus * SPAN / 2) ** (1 / 3))))
    length = max(1 << 12, min(1 << 22, int(v.layer("device").bandwidth * SPAN / 8)))
    for line, (low, high) in (
        (f"y: f32[i:{size}, j:{size}] = sum[k:{size}] x[i, k] * w[k, j]", NEAR),
        (f"y: f32[i:{length}] = x[i] * 2.0 + 1.0", FAR),
        (f"y: f32[i:{size}] = sum[k:{length // size}] x[i, k]", FAR),
    ):
        operator = ROperator("y", (Compute.parse(line),), (), ("y",))
        binding = _dense(operator, {})
        kernel = device.backend.kernel(next(iter(device.backend.candidates(operator, binding))), binding)
        found = list[float]()
        for _ in range(RETRIES):
            found.append(device.backend.profiler.task_time(kernel, binding)[0])
            if low * kernel.alone <= min(found) <= high * kernel.alone:
                break
        what = f"a task of {line} is priced at {kernel.alone:.2e} s, but takes {min(found):.2e} s by the profiler"
        device.expect(low * kernel.alone <= min(found), what)
        device.expect_time(min(found) <= high * kernel.alone, what)


# --- memory of a unit -------------------------------------------------------------------------------


def _kept(rows: int, columns: int) -> ROperator:
    """Return exponentials of rows, stored in the unit's memory, and their sums."""
    lines = (f"t: f32[i:{rows}, k:{columns}] = exp(x[i, k])", f"y: f32[i:{rows}] = sum[k:{columns}] t[i, k]")
    return operator_of(*lines, tile=())


def _fits(device: Subject, operator: ROperator, binding: Binding) -> None:
    """Check that tiles of the generic kernel fit into the unit's memory."""
    v = device.backend.vdevice
    capacity = v.layer("veu").capacity
    for one in islice(device.backend.candidates(operator, binding), LOOKED):
        if not one.family and capacity and not v.spills:
            need = task_cost(one, binding.types, v).footprint
            device.expect(need <= capacity, f"{one.head()} keeps {need} bytes in a unit that has {capacity}")


def check_large_tiles(device: Subject) -> None:
    """Check that a task larger than its unit's memory raises DeviceFailure or computes the right result."""
    capacity = device.backend.vdevice.layer("veu").capacity or KEPT
    columns = 1024
    for rows in (max(1, capacity // 4096), 2 * capacity // 4096 + 1):
        lines = (
            f"t: f32[i:{rows}, k:{columns}] = x[i, k] * 2.0",
            f"y: f32[i:{rows}, k:{columns}] = t[i, k] + t[i, {columns - 1} - k]",
        )
        operator = operator_of(*lines, tile=(rows, columns))
        ports = [("x", "input", (rows, columns)), ("y", "output", (rows, columns))]
        program = program_of_operators("large_tile", [operator], ports, (), [[Task("y", 0)]])  # type: ignore[arg-type]
        x = device.rng.integers(-99, 100, (rows, columns)).astype(np.float32)
        try:
            loaded = device.backend.load(program, {})
            have = loaded.run({"x": x}).outputs["y"]
            loaded.close()
        except DeviceFailure:
            continue
        good = np.array_equal(have, 2 * (x + x[:, ::-1]))
        device.expect(good, f"a task that keeps {rows * columns * 4} bytes in a unit that has {capacity} gives wrong values")
