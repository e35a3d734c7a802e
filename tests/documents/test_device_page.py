"""Statements of the device page that the conformance kit cannot check from outside."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rammer.codegen.dialects import C99
from rammer.codegen.emit import emit_operator
from rammer.compile_options import CompileOptions
from rammer.compiled.segments import ProgramSegment
from rammer.compiler.compiler import Compiler
from rammer.device.manifest import Binding, Device
from rammer.frontend.read.reader import read_model
from rammer.fusion.tile_search import candidates
from rammer.fusion.tile_traffic import task_cost
from rammer.ir.device import MemoryLayer, VDevice
from rammer.ir.operator import ROperator
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.conformance import registry_of
from rammer_testing.nonempty import some
from rammer_testing.small_models import MODELS

import rammer_c
import rammer_toy

CPU = VDevice("cpu", "", 4, (MemoryLayer("ram", "device", 0, 1e10, 64), MemoryLayer("cache", "veu", 1 << 18, 1e11)), 1e10, 1e-5)


@cache
def operators() -> tuple[tuple[ROperator, Binding], ...]:
    """Return operators of the small models, with two tiles each."""
    backend = registry_of(*rammer_toy.rammer_devices()).open("toy")
    compiler, found = Compiler(backend, CompileOptions(), KernelStore(None)), list[tuple[ROperator, Binding]]()
    for model in MODELS.values():
        rng = np.random.default_rng(0)
        shapes = {n: a.shape for n, a in model.inputs(rng, model.shapes[0]).items()}
        for segment in compiler.compile_model(read_model(model.build(rng)), shapes).segments:
            if isinstance(segment, ProgramSegment):
                binding = Binding.of(segment.program, segment.constants)
                for operator in segment.program.operators:
                    plain = replace(operator, tile=(), family="", config=())
                    found += [(o, binding) for o in candidates(plain, binding, CPU, 2)]
    assert len(found) > 40
    return tuple(found)


def test_every_figure_of_a_device_is_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/device.md").read_text()
    table = page.partition("### The virtual device")[2].partition("\n### ")[0]
    missing = [f.name for f in some(fields(VDevice)) if f"`{f.name}`" not in table]
    missing += [f.name for f in fields(Device) if f"`{f.name}`" not in page]
    others = [f.name for f in some(fields(MemoryLayer)) if f"`{f.name}`" not in page and f"MemoryLayer.{f.name}" not in page]
    assert not missing and not others, (missing, others)
    for name in ("skips", "reduce_bounds", "lengths"):  # of ROperator: what a program of a range adds
        assert f"`{name}`" in page or f"ROperator.{name}" in page


def changed(operator: ROperator, binding: Binding) -> Iterator[tuple[ROperator, Binding]]:
    """Yield the same operator with every property changed that, according to the page, is not read."""
    storages = binding.storages.items()
    yield operator, replace(binding, storages={n: replace(s, offset=s.offset + 7) for n, s in storages})
    yield operator, replace(binding, storages={n: replace(s, buffer=f"other_{s.buffer}") for n, s in storages})
    yield operator, replace(binding, constants=frozenset(binding.types), reused=frozenset(binding.types))
    yield operator, replace(binding, constants=frozenset(), precision="tf32")
    yield replace(operator, family="mine", config=(("n", 3),)), binding


@pytest.mark.slow
def test_emit_reads_what_the_page_says_and_no_more() -> None:
    wide = 0
    for operator, binding in some(operators()[::3]):
        function = emit_operator(operator, binding, C99)
        for other, known in changed(operator, binding):
            assert emit_operator(other, known, C99) == function
        names = (*operator.inputs, *operator.outputs)
        assert function.arguments == tuple((n, n in operator.outputs) for n in names)
        stretched = {n: replace(s, strides=tuple(3 * k for k in s.strides)) for n, s in binding.storages.items()}
        again = emit_operator(operator, replace(binding, storages={**binding.storages, **{n: stretched[n] for n in names}}), C99)
        wide += again.name != function.name
        # Only the tensors that it reads or writes are needed.
        assert emit_operator(operator, replace(binding, storages={n: binding.storages[n] for n in names}), C99) == function
    assert wide > 10


def test_scratch_is_as_the_page_says() -> None:
    """Check that tiles start at multiples of 64 bytes within the requested bytes, which are the footprint or slightly more."""
    offsets = list[int]()
    for operator, binding in some(operators()):
        function = emit_operator(operator, binding, C99)
        found = [int(n) for n in re.findall(r"\(scratch \+ (\d+)\)", function.text)]
        assert all(n % 64 == 0 and n < function.scratch for n in found) and bool(found) == (function.scratch > 0)
        assert function.scratch <= task_cost(operator, binding.types, CPU).footprint + 64 * len(found)
        offsets += found
    assert len(offsets) > 5 and max(offsets) > 0


def test_task_cost_prices_a_whole_tile_in_the_middle() -> None:
    for operator, binding in some(operators()):
        cost = task_cost(operator, binding.types, CPU)
        share, busy = CPU.layer("device").bandwidth / CPU.veus, max(cost.flops / CPU.flops, cost.on_chip)
        assert cost.crowded == pytest.approx(CPU.dispatch + max(busy, cost.traffic / share))
        assert cost.alone == pytest.approx(CPU.dispatch + max(busy, cost.traffic / (share * min(4, CPU.veus))))
        local = cost.layers[1]
        assert cost.on_chip == pytest.approx(local.traffic / (CPU.layer("veu").bandwidth / CPU.veus), abs=1e-12)
        assert local.footprint == cost.footprint and cost.layers[0].traffic == cost.traffic
        assert cost.traffic % 64 == 0  # whole transactions
        tasks = operator.task_count
        if tasks % CPU.veus == 0:
            assert cost.total(tasks, CPU) == pytest.approx(tasks / CPU.veus * cost.crowded + CPU.launch)
        # The operator's size is not included: the last tile may be smaller and is priced like the others.
        depth = math.prod(r.extent for r in operator.anchor.reduce)
        assert cost.flops >= math.prod(operator.tile) * depth * max(1, operator.anchor.flops_per_point)


@pytest.mark.parametrize("policy", ["sequential", "wavefront"])
def test_the_order_of_candidates_decides(policy: str) -> None:
    """Check that the first candidate wins if nothing is measured and all prices are equal, in any order of the others."""

    class Ordered(rammer_toy.ToyBackend):
        backwards = False

        def candidates(self, operator: ROperator, binding: Binding) -> list[ROperator]:
            found = list(super().candidates(operator, binding))
            return found[::-1] if self.backwards else found

        def kernel(self, operator: ROperator, binding: Binding):  # type: ignore[no-untyped-def]
            made = super().kernel(operator, binding)
            seconds = 1e-3 / operator.task_count  # all tasks of any tile take equally long
            return replace(made, alone=seconds, crowded=seconds)

    (device,) = rammer_toy.rammer_devices()
    backend = registry_of(replace(device, open=Ordered)).open("toy")
    taken = list[dict[str, tuple[int, ...]]]()
    for backwards in (False, True):
        Ordered.backwards = backwards
        compiler = Compiler(backend, CompileOptions(policy), KernelStore(None))
        model = read_model(MODELS["product"].build(np.random.default_rng(0)))
        (segment,) = compiler.compile_model(model, {}).segments
        assert isinstance(segment, ProgramSegment)
        binding = Binding.of(segment.program, segment.constants)
        for operator in segment.program.operators:
            first = backend.candidates(replace(operator, tile=(), family="", config=()), binding)[0]
            rounds = math.ceil(first.task_count / 2), math.ceil(operator.task_count / 2)
            assert operator.tile == first.tile or rounds[0] > rounds[1], operator.head()
        taken.append({o.name: o.tile for o in segment.program.operators})
    assert taken[0] != taken[1]


@pytest.mark.slow
def test_a_text_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one text serves the tuner, the loaded program and the same program loaded again."""
    backend = registry_of(*rammer_c.rammer_devices()).open("c")
    written, write = list[str](), rammer_c.emit_operator

    def noting(operator, binding, target):  # type: ignore[no-untyped-def]
        written.append(binding.key(operator))
        return write(operator, binding, target)

    monkeypatch.setattr(rammer_c, "emit_operator", noting)
    model = read_model(MODELS["product"].build(np.random.default_rng(0)))
    (segment,) = Compiler(backend, CompileOptions(tune="quick"), KernelStore(None)).compile_model(model, {}).segments
    assert isinstance(segment, ProgramSegment) and written
    binding = Binding.of(segment.program, segment.constants)
    for _ in range(2):
        backend.load(segment.program, segment.constants).close()
        assert all(backend.kernel(o, binding).source for o in some(segment.program.operators))
    chosen = {binding.key(o) for o in segment.program.operators}
    assert all(written.count(key) == 1 for key in some(chosen))
