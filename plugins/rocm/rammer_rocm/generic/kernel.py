"""The generic family: the core's C emitter in the OpenCL dialect, for every operator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rammer.codegen import Argument, Choice, Unsuited, affine_address
from rammer.codegen.c_target import CTarget
from rammer.codegen.emit import emit_operator
from rammer.device.manifest import FUSED_FORMS, Binding
from rammer.fusion.tile_search import ranked_tiles
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.compute import Compute
from rammer.ir.device import VDevice
from rammer.ir.expr import axes_of
from rammer.ir.operator import ROperator
from rammer.ir.program import dense

from rammer_rocm.dialect import dialect_of
from rammer_rocm.generic.cost import PlainTasks, is_plain, task_seconds
from rammer_rocm.kernels.task import Family, TaskFunction
from rammer_rocm.panel.choose import GENERIC_RATE

#: Number of tiles offered to the tuner, after those of other families.
GENERIC_TILES = 4
#: The share of the nominal peak that generic kernels of one product reach on a CPU if they read vectors: 43 and 52 of 170 GFLOP/s
#: (steps of LSTMs of 4 and 8 rows, two Zen 5 cores). Otherwise GENERIC_RATE.
VECTOR_RATE = 0.25
#: The share of the peak that generic kernels of one product reach on a GPU: 40 us for 46 products of 45 MFLOP in the mean, with
#: maps before them (DenseNet-121 on an H200, by the difference of whole runs).
GPU_PRODUCT_RATE = 0.02
#: The share that kernels of products in a chain reach on a GPU: 53 us for attention of 6 heads of 50 x 50 x 64 on an H200.
GPU_CHAIN_RATE = 0.002


def write_generic_task(operator: ROperator, binding: Binding, dialect: CTarget, threads: int = 1) -> TaskFunction:
    """Return the task function of ``operator`` for ``threads`` work-items. Raises DeviceFailure if OpenCL C lacks an element
    type."""
    function = emit_operator(operator, binding, dialect, within=True)
    arguments = tuple(Argument(name, written) for name, written in function.arguments)
    types = tuple(dialect.types[binding.types[name].dtype] for name, _ in function.arguments)
    return TaskFunction(function.name, function.text, arguments, types, function.scratch, stops=function.stops, threads=threads)


def generic_choices(operator: ROperator, binding: Binding, device: VDevice) -> Iterator[Choice]:
    """Yield every tile that the core tries and whose footprint fits, best predicted first."""
    ranked = ranked_tiles(operator, binding.types, _at_its_rate(operator, binding, device), storages=binding.storages)
    choices = [Choice(seconds, operator.tiled(tile)) for seconds, tile, _ in ranked]
    if device.threads > 1 or not is_plain(operator):
        return iter(choices)
    tasks = PlainTasks(operator, binding, device)
    priced = (Choice(-(-o.task_count // device.veus) * tasks.seconds(o) + device.launch, o) for _, o in choices)
    return iter(sorted(priced, key=lambda choice: choice.seconds))


def generic_seconds(operator: ROperator, binding: Binding, device: VDevice) -> float:
    """Return the predicted seconds of all tasks of a tiled operator, without its launch."""
    if device.threads == 1 and is_plain(operator):
        return -(-operator.task_count // device.veus) * task_seconds(operator, binding, device)
    cost = task_cost(operator, binding.types, _at_its_rate(operator, binding, device), binding.storages)
    return cost.total(operator.task_count, device) - device.launch


def generic_times(operator: ROperator, binding: Binding, device: VDevice) -> tuple[float, float]:
    """Return the predicted seconds of one task on an idle and on a full device."""
    if device.threads == 1 and is_plain(operator):
        return (task_seconds(operator, binding, device),) * 2
    cost = task_cost(operator, binding.types, _at_its_rate(operator, binding, device), binding.storages)
    return cost.alone, cost.crowded


def _at_its_rate(operator: ROperator, binding: Binding, device: VDevice) -> VDevice:
    """Return the device as the generic kernel uses it: its products reach a small fraction of the peak."""
    sums = [c for c in operator.computes if c.kind != "map"]
    if all(c.kind != "contraction" for c in sums):
        return device
    if device.threads > 1:
        rate = GPU_CHAIN_RATE if operator.has_chain(("contraction",)) else GPU_PRODUCT_RATE
    else:
        rate = GENERIC_RATE if len(sums) > 1 or not _reads_vectors(operator.main, binding) else VECTOR_RATE
    return replace(device, flops=device.flops * rate, map_flops=device.map_flops or device.flops)


def _reads_vectors(main: Compute, binding: Binding) -> bool:
    """Return True if neighbouring results of a contraction read neighbouring elements, or constants: their
    storage can be turned to that order (``rammer.plan.constant_layout``)."""
    inner = next((a.name for a in reversed(main.axes) if a.extent > 1), "")
    for load in (x for x in main.loads if inner in axes_of(x) and x.tensor not in binding.constants):
        storage = binding.storages.get(load.tensor) or dense(load.tensor, "", binding.types[load.tensor].shape)
        try:
            steps, _ = affine_address(load, storage.strides)
        except Unsuited:
            return False
        if steps.get(inner) != 1:
            return False
    return True


def make_generic_family(device: VDevice) -> Family:
    """Return the unnamed family, with the core's tile search and cost model of bytes and operations."""
    return Family(
        "",
        {},
        generic_choices,
        generic_seconds,
        lambda operator, binding: write_generic_task(operator, binding, dialect_of(device), device.threads),
        max_candidates=GENERIC_TILES,
        is_fallback=True,
        times=generic_times,
        fused_forms=FUSED_FORMS,
    )
