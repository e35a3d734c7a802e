"""Iterations of loops: many form one program, with the results of ONNX Runtime."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import BOOL, INT64, model, tensor
from random_loops import Feeds, drawn
from test_later import agree, fed

import rammer
from rammer.errors import BadInput
from rammer.frontend.bind.bind_state import MOST_UNROLLED
from rammer.frontend.loops import control_operators
from rammer.frontend.loops import loop_chunk as made
from rammer.frontend.read.limits import HOST_SECONDS_VARIABLE
from rammer.jit import control_flow
from rammer.runtime.bound_call import BoundCall
from rammer.runtime.executable import Executable
from rammer.runtime.loaded_model import LoadedModel
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

node = helper.make_node


def opened(proto: onnx.ModelProto, warm: int = 0) -> Executable:
    """Compile for the toy, with programs of several iterations after ``warm`` single iterations."""
    exe = rammer.compile(proto, "toy")
    exe.bodies.warm = warm
    return exe


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the programs that ran, in order."""
    names, run, bound = list[str](), LoadedModel.run, BoundCall.launch
    monkeypatch.setattr(LoadedModel, "run", lambda self, *given: (names.append(self.compiled.graph.name), run(self, *given))[1])
    monkeypatch.setattr(BoundCall, "launch", lambda self: (names.append(self.graph.name), bound(self))[1])
    return names


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits that replace the clock, which the toy lacks. Every loop counts as long, and a program of 16 iterations is
    compiled soon."""
    monkeypatch.setattr(control_flow, "LONGEST", 1.0)
    monkeypatch.setattr(made, "MOST_STEPS", 16)


def counting(how: str) -> onnx.ModelProto:
    """Return a Loop whose body divides by the number of remaining iterations. An iteration past the limit divides by zero."""
    body = [node("Sub", ["limit", "i"], ["left"]), node("Div", ["hundred", "left"], ["d"]), node("Add", ["s", "d"], ["s2"])]
    body += [node("Identity", ["c"], ["go"]) if how == "same" else node("Less", ["s2", "enough"], ["go"])]
    ports = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [], INT64)]
    ends = [tensor("go", [], BOOL), tensor("s2", [], INT64), tensor("d", [], INT64)]
    loop = node("Loop", ["limit", "", "x"], ["y", "all"], body=helper.make_graph(body, "body", ports, ends))
    constants = {"hundred": np.array(100), "enough": np.array(1000)}
    return model([loop], [tensor("limit", [], INT64), tensor("x", [], INT64)], ["y", "all"], constants=constants)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("how", ["same", "data"])
def test_many_turns_ask_the_host_seldom(how: str, asked: list[str]) -> None:
    exe = opened(proto := counting(how))
    for limit in (40, 7, 1, 0, 3):
        agree(proto, exe, {"limit": np.array(limit), "x": np.array(0)})
    for start in (999, 980, 950, 900, 700):  # ends by its data, somewhere in a program
        agree(proto, exe, {"limit": np.array(40), "x": np.array(start)})
    asked.clear()
    agree(proto, exe, {"limit": np.array(200), "x": np.array(-(10**6))})
    assert 200 / 16 <= len(asked) <= 3 + 200 / 16, asked
    exe.close()


@pytest.mark.slow
@pytest.mark.usefixtures("long")
def test_steps_past_the_end_keep_the_states() -> None:
    """Check steps past the limit, which divide by zero, and steps after the end of the loop."""
    exe = opened(proto := counting("data"))
    agree(proto, exe, {"limit": np.array(20), "x": np.array(0)})
    (key,) = (k for k in exe.bodies.residents.held if isinstance(k.what, made.LoopChunk))
    turns, special = key.what, exe.bodies.residents.held[key]
    feeds = {"state0": np.array(0), "first": np.array(2), "until": np.array(7)}
    found = special.run({turns.name(n): a for n, a in feeds.items()} | {"limit": np.array(7)})[0]
    gathered = found[turns.name("gathered0")]
    assert gathered[:5].tolist() == [100 // 5, 100 // 4, 100 // 3, 100 // 2, 100]
    assert found[turns.name("after0")] == gathered[:5].sum()
    feeds |= {"state0": np.array(970), "until": np.array(2 + turns.count)}  # 970 + 10 + 11 + 12 is enough: three iterations
    found = special.run({turns.name(n): a for n, a in feeds.items()} | {"limit": np.array(12)})[0]
    assert found[turns.name("going")].tolist() == [True, True] + [False] * (turns.count - 2)
    assert found[turns.name("gathered0")].tolist()[:3] == [10, 11, 12] and found[turns.name("after0")] == 1003
    exe.close()


@pytest.mark.slow
@pytest.mark.usefixtures("long")
def test_a_long_scan_is_few_programs(asked: list[str], rng: np.random.Generator) -> None:
    body = [
        node("Add", ["s", "e"], ["a"]),
        node("MatMul", ["a", "w"], ["m"]),
        node("Tanh", ["m"], ["s2"]),
        node("Neg", ["s2"], ["o"]),
    ]
    graph = helper.make_graph(body, "body", [tensor("s", [4]), tensor("e", [4])], [tensor("s2", [4]), tensor("o", [4])])
    scan = node("Scan", ["x", "xs"], ["last", "all"], body=graph, num_scan_inputs=1)
    weights = {"w": np.asarray(rng.standard_normal((4, 4)) / 2, np.float32)}
    proto = model([scan], [tensor("x", [4]), tensor("xs", [300, 4])], ["last", "all"], constants=weights)
    exe = opened(proto)
    agree(proto, exe, {"x": fed(rng, 4), "xs": fed(rng, 300, 4)})
    asked.clear()
    agree(proto, exe, {"x": fed(rng, 4), "xs": fed(rng, 300, 4)})
    assert 300 / 16 <= len(asked) <= 3 + 300 / 16, asked
    exe.close()


def test_few_turns_are_not_compiled_together(asked: list[str]) -> None:
    """Check that short loops run one iteration at a time: a program of many iterations takes seconds to compile."""
    exe = opened(proto := counting("same"), control_flow.WARM)
    for limit in (20, 3, 40):
        agree(proto, exe, {"limit": np.array(limit), "x": np.array(0)})
    assert len(exe.bodies.residents.held) == 1
    exe.close()


def agrees(session: PeerSession, exe: Executable, feeds: Feeds) -> None:
    names = [o.name for o in session.get_outputs()]
    wanted, found = dict(zip(names, session.run(names, feeds), strict=True)), exe.run(feeds)
    for name, want in some(wanted.items()):
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        np.testing.assert_allclose(found[name], want, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.usefixtures("long")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", range(200))
def test_random_loops(number: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check programs of 2, 4 or 8 iterations, used from the second or from a later iteration on."""
    monkeypatch.setattr(made, "MOST_STEPS", int(rng.choice([2, 4, 8])))
    model = drawn(rng)
    session, exe = PeerSession(model.proto), opened(model.proto, int(rng.choice([0, 3])))
    for _ in range(4):
        agrees(session, exe, model.feeds(rng))
    exe.close()


@pytest.mark.slow
@pytest.mark.usefixtures("long")
def test_a_loop_without_a_count_is_few_programs() -> None:
    """Check that the previous trip count sets the size of the program, instead of sizes 2, 4, 8... in a row."""
    exe = opened(proto := counting("data"), 3)
    for _ in range(4):
        agree(proto, exe, {"limit": np.array(60), "x": np.array(-(10**6))})
    assert len(exe.bodies.residents.held) == 2  # of one iteration, and of all
    exe.close()


@pytest.mark.slow
@pytest.mark.usefixtures("long")
def test_threads_share_a_program_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that loops run one after another, each as a whole, because their states share one pair of arrays."""
    monkeypatch.setattr(made, "MOST_STEPS", 4)
    exe, proto = opened(counting("data")), counting("data")
    session = PeerSession(proto)
    given = [{"limit": np.array(30 + n), "x": np.array(n - 10**6)} for n in range(8)]
    agree(proto, exe, given[0])
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(exe.run, given * 4))
    for feeds, made_of_it in zip(given * 4, found, strict=True):
        for name, want in zip(("y", "all"), session.run(["y", "all"], feeds), strict=True):
            np.testing.assert_array_equal(made_of_it[name], want)
    exe.close()


@pytest.mark.slow
@pytest.mark.usefixtures("long")
def test_a_loop_without_end_is_stopped_between_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOST_SECONDS_VARIABLE, "0.3")
    monkeypatch.setattr(made, "MOST_STEPS", 4)
    body = [node("Add", ["s", "one"], ["s2"]), node("Less", ["s2", "zero"], ["go"])]
    ports = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [], INT64)]
    graph = helper.make_graph(body, "body", ports, [tensor("go", [], BOOL), tensor("s2", [], INT64)])
    loop = node("Loop", ["", "", "x"], ["y"], body=graph)
    exe = opened(model([loop], [tensor("x", [], INT64)], ["y"], constants={"one": np.array(1), "zero": np.array(0)}))
    assert exe.run({"x": np.array(-40)})["y"] == 0
    with pytest.raises(BadInput, match="has not ended after"):
        exe.run({"x": np.array(-(2**62))})
    assert exe.run({"x": np.array(-40)})["y"] == 0
    exe.close()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("compiled", [True, False])
def test_a_loop_without_end_in_another_is_told_with_the_turns_of_both(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    """Check also that the body around it is not reported as uncompilable and run again."""
    monkeypatch.setenv(HOST_SECONDS_VARIABLE, "0.3")
    inner = [node("Add", ["t", "one"], ["t2"]), node("Less", ["t2", "zero"], ["on"])]
    ports = [tensor("k", [], INT64), tensor("d", [], BOOL), tensor("t", [], INT64)]
    within = helper.make_graph(inner, "inner", ports, [tensor("on", [], BOOL), tensor("t2", [], INT64)])
    # From -2, -1 and 0 it ends soon; in the third iteration of the outer loop it starts where it never ends.
    outer = [node("Equal", ["i", "two"], ["third"]), node("Where", ["third", "far", "i"], ["from"])]
    outer += [node("Loop", ["", "", "from"], ["last"], body=within), node("Add", ["s", "last"], ["s2"])]
    outer += [node("Identity", ["c"], ["go"])]
    ports = [tensor("i", [], INT64), tensor("c", [], BOOL), tensor("s", [], INT64)]
    graph = helper.make_graph(outer, "body", ports, [tensor("go", [], BOOL), tensor("s2", [], INT64)])
    constants = {"one": np.array(1), "zero": np.array(0), "two": np.array(2), "far": np.array(-(2**62))}
    loop = node("Loop", ["limit", "", "x"], ["y"], body=graph)
    exe = opened(model([loop], [tensor("limit", [], INT64), tensor("x", [], INT64)], ["y"], constants=constants))
    if not compiled:
        monkeypatch.setattr(exe.bodies, "make", refuse)
    with pytest.raises(
        BadInput, match=r"Loop has not ended after 2 iterations and 0\.3 s on the host, in it Loop after [1-9]\d*"
    ):
        exe.run({"limit": np.array(1000), "x": np.array(1)})
    assert bool(exe.bodies.refused) is not compiled
    exe.close()


def refuse(_: object) -> LoadedModel:
    raise BadInput("no body is compiled")


@pytest.mark.slow
@pytest.mark.usefixtures("long")
@pytest.mark.parametrize("scan", [False, True])
def test_what_is_prepared_takes_none_of_a_loops_seconds(monkeypatch: pytest.MonkeyPatch, scan: bool) -> None:
    """Check with a clock that advances while bodies are converted, compiled, loaded and bound, but not in iterations."""
    now = [0.0]

    def slow(what: object, name: str) -> None:
        plain = getattr(what, name)

        def slowly(*given: object, **named: object) -> object:
            now[0] += 100.0
            return plain(*given, **named)

        monkeypatch.setattr(what, name, slowly)

    monkeypatch.setattr(control_operators, "time", SimpleNamespace(thread_time=lambda: now[0], perf_counter=lambda: now[0]))
    for what, name in ((made.LoopChunk, "model"), (control_flow, "_as_model"), (control_flow, "TurningProgram")):
        slow(what, name)
    proto = scanning() if scan else counting("same")
    exe = opened(proto)
    slow(exe.bodies, "make")
    agree(
        proto,
        exe,
        {"z": np.ones(MOST_UNROLLED + 1, np.float32), "x": np.array(0, np.float32)}
        if scan
        else {"limit": np.array(40), "x": np.array(0)},
    )
    assert now[0] >= 400.0 and len(exe.bodies.turning) == 1
    exe.close()


def scanning() -> onnx.ModelProto:
    """Return a Scan that adds, over more steps than are unrolled."""
    body = [node("Add", ["s", "v"], ["s2"]), node("Mul", ["s2", "v"], ["w"])]
    graph = helper.make_graph(body, "body", [tensor("s", []), tensor("v", [])], [tensor("s2", []), tensor("w", [])])
    scan = node("Scan", ["x", "z"], ["y", "all"], body=graph, num_scan_inputs=1)
    return model([scan], [tensor("x", []), tensor("z", ["n"])], ["y", "all"])
