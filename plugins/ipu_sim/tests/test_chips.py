"""Several simulated chips: routes between them, concurrent traffic, and programs whose devices are chips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DistributedProgram, Transfer
from rammer.distributed.link import joined_constants
from rammer.distributed.partition.predict import StepTime, predict_run
from rammer.distributed.partition.search import compile_spread
from rammer.errors import BadInput, DeviceFailure
from rammer.frontend.read.reader import read_model
from rammer.ir.types import TensorType
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.small_models import dense_layers
from rammer_testing.spreads import whole_inputs

from rammer_ipu_sim.chip import Chip, configure_chip
from rammer_ipu_sim.executor import LoadedProgram
from rammer_ipu_sim.links import CARD, Traffic, find_route, link_bandwidth, make_link, make_links

SHAPE = (4, 32)


def spread_over(chips: int, layers: int) -> DistributedProgram:
    """Return a pipeline over chips of 8 tiles."""
    registry = Registry()
    backend = registry.open("ipu_sim", options={"tiles": "8", "chips": str(chips)})
    made = Compiler(backend, CompileOptions(), KernelStore(None), registry, device="ipu_sim")
    names = [f"ipu_sim:{k}" for k in range(chips)]
    return compile_spread([(n, made) for n in names], read_model(dense_layers(layers)), {"x": SHAPE}, make_links(chip(chips)))


def chip(chips: int) -> Chip:
    return configure_chip({"tiles": "8", "chips": str(chips)})


@pytest.mark.parametrize(("chips", "layers"), [(2, 6), (5, 11)])
def test_a_program_over_chips_computes_what_its_model_does(chips: int, layers: int, rng: np.random.Generator) -> None:
    spread = spread_over(chips, layers)
    loaded = LoadedProgram(spread.whole, joined_constants(spread.parts), chip(chips))
    inputs = {"x": rng.standard_normal(SHAPE).astype(np.float32)}
    found = loaded.run(whole_inputs(spread, inputs))
    want = ReferenceEvaluator(dense_layers(layers)).run(None, inputs)[0]
    np.testing.assert_allclose(found.outputs["y"], want, rtol=1e-5, atol=1e-6)
    assert found.seconds == pytest.approx(spread.predicted.latency, rel=0.15)
    played = loaded.played()
    assert max(played.busy.values()) == pytest.approx(spread.predicted.interval, rel=0.15)
    assert len(played.arrived) == len(spread.transfers) > 0
    assert loaded.report().endswith("us simulated") and f"{chips} x GC2" in loaded.report()


def test_every_chip_has_a_memory_of_its_own() -> None:
    spread = spread_over(3, 9)
    constants = joined_constants(spread.parts)
    loaded = LoadedProgram(spread.whole, constants, chip(3), stream=False)
    assert {h.buffer.home for h in loaded.homes.values()} == {0, 1, 2}
    held = [sum(b.nbytes for b in spread.whole.buffers if b.kind == "constant" and b.home == k) for k in range(3)]
    assert min(held) > 0 and sum(held) == sum(v.nbytes for v in constants.values())


def test_too_few_chips_are_refused() -> None:
    spread = spread_over(3, 6)
    with pytest.raises(DeviceFailure, match="3 devices, there are 2 chips"):
        LoadedProgram(spread.whole, joined_constants(spread.parts), chip(2))
    for text in ("0", "x", "65", "-1"):
        with pytest.raises(BadInput, match="chips"):
            Registry().open("ipu_sim", options={"chips": text})


def test_ways_lead_where_they_should() -> None:
    """Check that routes use existing links, without backtracking, up or down one side of the ladder."""
    for a in range(16):
        for b in some(set(range(16)) - {a}):
            here = a
            for at, kind in some(list(find_route(a, b))):
                assert at == here
                here = {"card": here ^ 1, "across": here ^ 1, "up": here + CARD, "down": here - CARD}[kind]
            assert here == b and len(list(find_route(a, b))) <= 1 + abs(a // CARD - b // CARD)


def test_what_shares_a_link_takes_turns() -> None:
    whole, nbytes = chip(8), 1 << 20
    alone = make_link(whole, 0, 4).seconds(nbytes)
    traffic = Traffic(whole)
    first, second = traffic.carry(0.0, 0, 4, nbytes), traffic.carry(0.0, 2, 4, nbytes)
    assert first == pytest.approx(alone) and second > first
    assert second - make_link(whole, 2, 4).seconds(nbytes) == pytest.approx(nbytes / link_bandwidth(whole, (2, "up")))
    assert traffic.carry(0.0, 1, 3, nbytes) == pytest.approx(make_link(whole, 1, 3).seconds(nbytes))
    assert (
        make_link(whole, 0, 1).bandwidth == pytest.approx(58.4e9, rel=0.01)
        and make_link(whole, 0, 2).bandwidth < make_link(whole, 0, 1).bandwidth
    )


def test_runs_in_flight_follow_each_other_as_fast_as_the_busiest_chip() -> None:
    spread = spread_over(4, 12)
    loaded = LoadedProgram(spread.whole, joined_constants(spread.parts), chip(4))
    one, many = loaded.played(), loaded.played(runs=6)
    assert (many.whole - one.whole) / 5 == pytest.approx(max(one.busy.values()), rel=0.15)
    assert {k: v * 6 for k, v in one.busy.items()} == pytest.approx(many.busy)


def test_predictions_know_what_links_share() -> None:
    """Check seven chips that send to one at the same time, over a ladder with shared links."""
    nbytes, whole = 1 << 16, chip(8)
    transfers = tuple(Transfer(f"t{k}", f"t{k}", TensorType("float32", (nbytes // 4,)), k, 0) for k in range(1, 8))
    devices = [[StepTime(0.0, tuple(t.name for t in transfers), ())], *([StepTime(0.0, (), (t.name,))] for t in transfers)]
    known = {(k.source, k.target): k for k in make_links(whole)}
    traffic = Traffic(whole)
    want = max(traffic.carry(0.0, t.source, 0, nbytes) for t in transfers)
    direct = {way: replace(link, through=()) for way, link in known.items()}
    assert predict_run(devices, transfers, known).latency == pytest.approx(want)
    assert predict_run(devices, transfers, direct).latency < 0.7 * want
