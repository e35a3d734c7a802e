"""A GPU's part of a distributed model: queued operations, their order and memory, with host-emulated GPUs."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from rammer.compile_options import CompileOptions
from rammer.compiler.compiler import Compiler
from rammer.device.loader import Registry
from rammer.distributed.distributed_program import DistributedProgram
from rammer.distributed.partition.ranged_model import OpenShapes
from rammer.distributed.partition.search import compile_open, compile_spread
from rammer.distributed.transport import Runs
from rammer.distributed.transport.counters import Counters
from rammer.distributed.transport.measure_links import ROUNDS, WARM, measured_links
from rammer.distributed.transport.memory_layout import Exposed
from rammer.distributed.transport.protocol import Endpoint, Site
from rammer.distributed.transport.transport_registry import choose_transport
from rammer.errors import DeviceFailure, DeviceUnavailable
from rammer.frontend.read.reader import read_model
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.nonempty import some
from rammer_testing.small_models import dense_layers

from .fake_gpus import HostBackend, HostEnd, HostMemory, host_cupy, host_place
from rammer_cuda.peer import exchange, fabric, symmetric
from rammer_cuda.peer import part as module
from rammer_cuda.peer.fabric import PeerEndpoint, check_apart, connects, decode_offer, encode_offer
from rammer_cuda.peer.layout import PeerLayout, Route
from rammer_cuda.peer.memory import Offer

SHAPE = (4, 32)


def spread_over(devices: int, layers: int) -> tuple[DistributedProgram, Any]:
    registry = Registry()
    backend = registry.open("ipu_sim", options={"tiles": "8"})
    made = Compiler(backend, CompileOptions(), KernelStore(None), registry, device="ipu_sim")
    return compile_spread(
        [(f"cuda:{k}", made) for k in range(devices)], read_model(dense_layers(layers, first=True)), {"x": SHAPE}
    ), backend


def parts_of(
    spread: DistributedProgram, backend: Any, depth: int, limit: float, monkeypatch: pytest.MonkeyPatch
) -> list[module.CudaPart]:
    cupy = host_cupy()
    monkeypatch.setattr(module, "import_cupy", lambda: cupy)
    monkeypatch.setattr(module, "place_arrays", host_place)
    routes = tuple(Route(t.name, t.nbytes, t.source, t.target) for t in spread.transfers)
    layout = PeerLayout(routes, len(spread.parts), depth)
    memory = [HostMemory(layout.nbytes(d)) for d in range(len(spread.parts))]
    monkeypatch.setattr(module, "HELD", memory, raising=False)  # has the lifetime of the test
    ends = [HostEnd(d, d, layout, [m.address for m in memory], limit) for d in range(len(memory))]
    return [module.CudaPart(spread, d, HostBackend(backend), end, Counters()) for d, end in enumerate(ends)]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "depth"), [(2, 1), (2, 3), (3, 2)])
def test_runs_in_flight_give_what_one_device_gives(
    devices: int, depth: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    spread, backend = spread_over(devices, 7)
    parts = parts_of(spread, backend, depth, 20.0, monkeypatch)
    given = [{"x": rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(9)]
    found: dict[int, dict[str, np.ndarray]] = {}

    def deliver(run: int, outputs: dict[str, np.ndarray]) -> None:
        found[run] = outputs

    for first, count in ((0, 4), (4, 5)):
        runs = Runs(first, count, lambda run: given[run], deliver)
        threads = [threading.Thread(target=part.go, args=(runs,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(found) == list(range(9))
    model = ReferenceEvaluator(dense_layers(7, first=True))
    for run, outputs in found.items():
        for name, want in zip(("y", "h0"), model.run(None, given[run]), strict=True):
            np.testing.assert_allclose(outputs[name], want, rtol=1e-5, atol=1e-6)
    sent = [sum(t.source == d for t in spread.transfers) for d in range(devices)]
    assert [p.counters.payload_writes for p in parts] == [9 * n for n in sent]
    assert [p.counters.allocations + p.counters.serialisations + p.counters.copies for p in parts] == [0] * devices
    for part in parts:
        part.close()


@pytest.mark.parametrize("meets", [True, False])
def test_a_write_goes_with_the_next_wait(
    meets: bool, rng: np.random.Generator, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check layers that alternate between two devices: each exchange is one launch per device, or two if
    they cannot be merged."""
    count = 5 + seed % 4
    registry = Registry()
    backend = registry.open("ipu_sim", options={"tiles": "8"})
    made = Compiler(backend, CompileOptions(), KernelStore(None), registry, device="ipu_sim")
    place = "\n".join(f"{op}{k} {k % 2}" for k in range(count) for op in "mh")
    devices = [(f"cuda:{k}", made) for k in range(2)]
    spread = compile_spread(devices, read_model(dense_layers(count, first=True)), {"x": SHAPE}, (), "latency", place)
    monkeypatch.setattr(HostEnd, "meets", meets)
    parts = parts_of(spread, backend, 1, 20.0, monkeypatch)
    given = rng.standard_normal(SHAPE).astype(np.float32)
    found: dict[int, dict[str, np.ndarray]] = {}
    runs = Runs(0, 3, lambda run: {"x": given}, found.__setitem__)
    threads = [threading.Thread(target=part.go, args=(runs,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, want in zip(("y", "h0"), ReferenceEvaluator(dense_layers(count, first=True)).run(None, {"x": given}), strict=True):
        np.testing.assert_allclose(found[2][name], want, rtol=1e-5, atol=1e-6)
    for part in some(parts):
        steps = part.steps
        before = [bool(s.arrivals) for s in steps] + [False]
        after = [False] + [bool(s.departures or s.frees) for s in steps]
        sides = [(a + b) if not meets else a or b for a, b in zip(before, after, strict=True)]
        asked = sum(sides) + 2 * bool(part.results)
        assert len(steps) > 1 and part.end.launches == 3 * asked, (steps, part.end.launches)  # type: ignore[attr-defined]
        part.close()


def recurrent(count: int) -> onnx.ModelProto:
    """Return a model that adds the last layer's result to the next run's input. Each layer adds its state of the last run."""
    rng = np.random.default_rng(count)
    lines = ["h = Add(x, s)"]
    for k in range(count):
        lines += [f"m{k} = MatMul({f'a{k - 1}' if k else 'h'}, w{k})", f"n{k} = Tanh(m{k})", f"a{k} = Add(n{k}, o{k})"]
        lines += [f"b{k} = Mul(n{k}, half)"]
    size = ",".join(map(str, SHAPE))
    given = ", ".join(f"float[{size}] {n}" for n in ("x", "s", *(f"o{k}" for k in range(count))))
    made = ", ".join(f"float[{size}] {n}" for n in ("y", "t", *(f"b{k}" for k in range(count))))
    text = f'<ir_version: 8, opset_import: ["" : 17]>\nrecurrent ({given}) => ({made}) <float half = {{0.5}}> {{\n'
    text += "\n".join([*lines, f"y = Neg(a{count - 1})", f"t = Tanh(a{count - 1})"])
    model = onnx.parser.parse_model(text + "\n}")
    weights = {f"w{k}": rng.standard_normal((32, 32)).astype(np.float32) / 16 for k in range(count)}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(v, n) for n, v in weights.items())
    return model


def recurrent_over(devices: int, layers: int) -> tuple[DistributedProgram, Any]:
    """Return a program where one state crosses, from the last device to the first, and the others stay local."""
    registry, model = Registry(), recurrent(layers)
    backend = registry.open("ipu_sim", options={"tiles": "8"})
    made = Compiler(backend, CompileOptions(), KernelStore(None), registry, device="ipu_sim")
    at = OpenShapes({i.name: SHAPE for i in model.graph.input}, states=kept_of(layers))
    return compile_open([(f"cuda:{k}", made) for k in range(devices)], read_model(model), at), backend


def kept_of(layers: int) -> dict[str, str]:
    return {"t": "s"} | {f"b{k}": f"o{k}" for k in range(layers)}


def looped(layers: int, given: list[dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Return the results of consecutive reference runs."""
    kept, found = kept_of(layers), list[np.ndarray]()
    evaluator, held = ReferenceEvaluator(recurrent(layers)), {i: np.zeros(SHAPE, np.float32) for i in kept.values()}
    for inputs in given:
        made = dict(zip(("y", *kept), evaluator.run(None, held | inputs), strict=True))
        held = {kept[n]: a for n, a in made.items() if n in kept}
        found.append(made["y"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "depth"), [(2, 1), (2, 3), (3, 2)])
def test_states_stay_on_gpus(devices: int, depth: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 5
    spread, backend = recurrent_over(devices, layers)
    assert {s.input for s in spread.states if s.transfers} == {"s"}
    monkeypatch.setattr(exchange, "import_cupy", host_cupy)
    parts = parts_of(spread, backend, depth, 20.0, monkeypatch)
    given = [{"x": rng.standard_normal(SHAPE).astype(np.float32)} for _ in range(7)]
    given[4] |= {"s": rng.standard_normal(SHAPE).astype(np.float32)}
    found: dict[int, dict[str, np.ndarray]] = {}
    for first, count in ((0, 3), (3, 4)):
        runs = Runs(first, count, lambda run: given[run], found.__setitem__)
        threads = [threading.Thread(target=part.go, args=(runs,)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for run, want in some(list(enumerate(looped(layers, given)))):
        np.testing.assert_allclose(found[run]["y"], want, rtol=1e-4, atol=1e-5)
    assert sum(p.counters.copies for p in parts) == 7 * (layers + 1)
    for part in parts:
        part.close()


def test_what_the_host_asks_of_an_endpoint(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the endpoint as link measurements use it: round trips by host threads, and returned slots."""
    cupy = host_cupy()
    monkeypatch.setattr(fabric, "import_cupy", lambda: cupy)
    layout = PeerLayout((Route("there", 40, 0, 1), Route("back", 40, 1, 0)), 2, 2)
    memory = [HostMemory(layout.nbytes(d)) for d in range(2)]
    ends = [HostEnd(d, d, layout, [m.address for m in memory], 10.0) for d in range(2)]
    here, there = (PeerEndpoint(end, None, 10.0) for end in ends)  # type: ignore[arg-type]
    sent = [rng.integers(0, 256, 40).astype(np.uint8) for _ in range(7)]

    def echo() -> None:
        for run in range(7):
            there.wait("there", run)
            there.put("back", run, there.slot("there", run))
            there.release("there", run)

    thread = threading.Thread(target=echo)
    thread.start()
    for run, values in some(list(enumerate(sent))):
        assert here.free("there", run) or run >= 2
        here.put("there", run, values)
        here.wait("back", run)
        assert here.arrived("back", run) and not here.arrived("back", run + 1)
        np.testing.assert_array_equal(here.slot("back", run), values)
        here.release("back", run)
    thread.join(20)
    assert here.counters.payload_writes == there.counters.payload_writes == 7 and here.counters.nbytes == 280
    assert here.counters.flag_writes == there.counters.flag_writes == 14


def test_links_are_measured_as_runs_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that link measurements use only work queued on the GPUs, without copies to or from the host."""
    cupy, ends = host_cupy(), dict[int, PeerEndpoint]()
    monkeypatch.setattr(fabric, "import_cupy", lambda: cupy)

    class Fakes:
        mine = (0, 1, 2)

        def meet(self, words: Mapping[int, str], seconds: float) -> list[str]:
            return [words[d] for d in self.mine]

        def expose(self, exposed: Exposed) -> Mapping[int, Endpoint]:
            layout = PeerLayout(tuple(Route(t.name, t.nbytes, t.source, t.target) for t in exposed.transfers), 3, exposed.depth)
            self.memory = [HostMemory(layout.nbytes(d)) for d in self.mine]
            places = [m.address for m in self.memory]
            ends.update({d: PeerEndpoint(HostEnd(d, d, layout, places, 20.0), None, 20.0) for d in self.mine})  # type: ignore[arg-type]
            return dict(ends)

    links = measured_links(Fakes(), ("cuda:0", "cuda:1", "cuda:2"), 20.0, "fakes")  # type: ignore[arg-type]
    assert {(k.source, k.target) for k in links} == {(a, b) for a in range(3) for b in range(3) if a != b}
    assert all(0 < k.latency < 20 and k.bandwidth > 0 for k in some(links))
    for end in some(ends.values()):
        assert end.counters.host_copies == 0
        assert end.counters.payload_writes == end.counters.flag_writes // 2 == 2 * sum(n + WARM for n in ROUNDS.values())


def test_a_device_that_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spread, backend = spread_over(2, 4)
    parts = parts_of(spread, backend, 2, 0.2, monkeypatch)
    with pytest.raises(DeviceFailure, match=r"device 1 waited 0\.2 s for device 0 to send"):
        parts[1].go(Runs(0, 1, lambda run: {}, lambda run, outputs: None))
    with pytest.raises(DeviceFailure, match=r"device 0 waited 0\.2 s for device 1 to send"):
        parts[0].go(Runs(0, 1, lambda run: {"x": np.zeros(SHAPE, np.float32)}, lambda run, outputs: None))


def test_gpus_that_cannot_be_joined_are_told_why() -> None:
    gpu = Site("cuda:0", "gpu", 0)
    assert "twice" in (connects(gpu, Site("cuda:0", "gpu", 0)) or "")
    assert "rocm is not a GPU of cuda" in (connects(gpu, Site("rocm", "cpu", 0)) or "")
    assert connects(gpu, Site("cuda:1", "gpu", 1)) is None
    assert "several hosts" in (connects(gpu, Site("cuda:1", "gpu", 1, multi_host=True)) or "")
    assert connects(gpu, Site("cuda:1", "gpu", 0))  # without a driver, or with its permission


@pytest.mark.skipif(find_spec("nvshmem") is not None, reason="nvshmem4py is there")
def test_what_nvshmem_lacks_is_said() -> None:
    sites = [Site(f"cuda:{n}", "gpu", n, multi_host=True) for n in range(2)]
    with pytest.raises(DeviceUnavailable, match=r"nvshmem: needs nvshmem4py, which was not found: pip install"):
        choose_transport(Registry(), sites, "nvshmem")
    assert choose_transport(Registry(), sites).name == "messages"
    assert "one process" in (symmetric.connects(replace(sites[0], process=1), sites[1]) or "")
    assert "not a GPU of cuda" in (symmetric.connects(Site("rocm", "cpu"), sites[1]) or "")
    assert symmetric.connects(*sites) is None


def test_copies_of_what_departs_lie_apart(rng: np.random.Generator) -> None:
    """Check disjoint words and slots of any routes on every GPU."""
    count, depth = int(rng.integers(2, 5)), int(rng.integers(1, 4))
    pairs = [(int(a), int(b)) for a, b in rng.integers(0, count, (9, 2)) if a != b]
    routes = tuple(Route(f"r{k}", int(rng.integers(0, 2000)), *pair) for k, pair in enumerate(pairs))
    layout = PeerLayout(routes, count, depth)
    for number in some(range(count)):
        places = symmetric.StagedLayout(layout, number)
        own = {r.name: r for r in routes}
        blocks = [(start, start + symmetric.WORD) for start in places.words.values()]
        blocks += [
            (start + k * layout.stride(own[n]), start + k * layout.stride(own[n]) + own[n].nbytes)
            for n, start in places.slots.items()
            for k in range(depth)
        ]
        assert {r.name for r in routes if r.source == number} == set(places.slots)
        assert all(start % 16 == 0 for start, _ in blocks)
        blocks.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(blocks)) and (not blocks or blocks[-1][1] <= places.nbytes)


def test_offers_are_told_as_text() -> None:
    offer = Offer(17, 1 << 40, bytes(range(64)), "0000:3b:00.0")
    assert decode_offer(encode_offer(offer)) == offer
    for text in ("", "{}", "[1]", '{"process": 1, "address": 2, "handle": "zz", "bus": ""}'):
        with pytest.raises(DeviceFailure, match="sent an invalid memory offer"):
            decode_offer(text)


def test_one_gpu_is_not_two_devices() -> None:
    offers = [Offer(process, 0, b"", "0000:3b:00.0") for process in (1, 2)]
    with pytest.raises(DeviceUnavailable, match=r"devices 0 \(cuda\) and 1 \(cuda\) are one GPU"):
        check_apart(["cuda", "cuda"], offers)
    check_apart(["cuda:0", "cuda:1"], [offers[0], replace(offers[1], bus="0000:5e:00.0")])


def test_a_plugin_brings_the_transport() -> None:
    found: Mapping[str, Any] = {t.name: t for t in Registry().transports()}
    assert found["cuda-peer"].rank > found["nvshmem"].rank > 0 and found["nvshmem"].far > found["cuda-peer"].far
    assert PeerEndpoint.part is not Endpoint.part and PeerEndpoint.echo is not Endpoint.echo
