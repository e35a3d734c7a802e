"""Oracle and shrinking of the graph fuzzer: planted faults are detected, near ties are not faults, stored cases stay right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from one_process import campaign

from rammer.ir.compute import Compute
from rammer.runtime import host_memory
from rammer_testing.graphs.campaign import CampaignPlan
from rammer_testing.graphs.case import Call, GraphCase
from rammer_testing.graphs.judge import Judge, Setting
from rammer_testing.graphs.outside import HOPELESS, Outside
from rammer_testing.graphs.record import CASES, Record
from rammer_testing.peer_process import PeerCrashed, PeerProcess

TOY = Setting("toy")


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    made = Judge()
    yield made
    made.outside.close()


def _case(*nodes: Call, **inputs: Any) -> GraphCase:
    return GraphCase(17, {n: np.asarray(a) for n, a in inputs.items()}, {}, nodes, (nodes[-1].outputs[0],))


def test_a_right_graph_is_ok_and_a_second_voice_was_heard(judge: Judge) -> None:
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    verdict = judge(_case(Call("Softmax", ("x",), ("y",)), x=x), TOY)
    assert verdict.kind == "ok" and verdict.voices == ("onnxruntime",) and verdict.told == 1.0


def test_a_near_tie_is_not_compared(judge: Judge) -> None:
    x = np.array([[0.1, 0.1 + 1e-8, -1.0]], np.float64).astype(np.float32) * np.float32(3)
    nodes = (Call("Sin", ("x",), ("s",)), Call("ArgMax", ("s",), ("y",), {"axis": 1}))
    assert judge(_case(*nodes, x=x), TOY).kind == "ok"


def test_a_tie_that_rounding_made_is_seen_by_every_trajectory(judge: Judge) -> None:
    # In float64 the second is smaller; in float16 both are 1. The search for the extreme's position compares with this value. The
    # value must be one of the elements in disturbed trajectories, too, or none of them has a position.
    x = np.array([44.0, 30.0], np.float16)
    nodes = (Call("Sigmoid", ("x",), ("s",)), Call("ArgMin", ("s",), ("y",), {"axis": 0}))
    assert judge(_case(*nodes, x=x), TOY).kind == "ok"


def test_a_product_that_cancels_may_be_rounded_or_not(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    # -3 / 6 + 0.5 is 0, or the error of 1 / 6 with a fused multiply-add. A hundred times that is a fault.
    case = _case(Call("HardSwish", ("x",), ("y",)), x=np.array([-3.0, 1.0]))
    for error, kind in ((-8.4e-17, "ok"), (-1e-13, "device")):
        monkeypatch.setattr(Judge, "run", lambda *_, e=error: {"y": np.array([e, 2 / 3])})
        assert judge(case, TOY).kind == kind


@pytest.mark.slow
def test_a_planted_fault_is_found_and_shrunk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = host_memory.evaluate_compute

    def wrong(compute: Compute, tensors: Any, precise: bool = False) -> Any:
        value = right(compute, tensors, precise)
        # Leave out the last column of every sum of floats if a tile is wider than one.
        if compute.combiner == "sum" and value.dtype == np.float32 and value.ndim > 1 and value.shape[-1] > 1:
            value = value.copy()
            value[..., -1] = 0
        return value

    monkeypatch.setattr(host_memory, "evaluate_compute", wrong)
    only = ("MatMul", "Relu", "Transpose", "Add", "Concat", "Sigmoid")
    plan = CampaignPlan(TOY, seed=5, graphs=12, seconds=40, voices=False, shrink=6, only=only)
    tally = campaign(plan)
    device = [f for f in tally.faults.values() if f.verdict.kind == "device"]
    assert device and min(len(f.case.nodes) for f in device) == 1
    assert any(f.signature == "device | MatMul" for f in device), tally.text()
    Record(plan, folder=tmp_path).close(tally)
    kept, extra = GraphCase.parse((tmp_path / CASES).read_text().splitlines()[0])
    assert extra["signature"].startswith("device | ") and kept.nodes


def test_a_difference_of_another_voice_is_told_apart(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(-2, 2, 12, dtype=np.float32)
    case = _case(Call("Relu", ("x",), ("y",)), x=x)
    monkeypatch.setattr(judge, "outside", lambda *_: [x])
    assert judge(case, TOY).kind == "voice"
    monkeypatch.setattr("rammer_testing.graphs.judge.reference_outputs", lambda _: {"y": x})
    assert judge(case, TOY).kind == "lowering"


def test_coarse_functions_of_another_voice_are_no_fault_but_wrong_ones_are(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.array([-12, -3, 1, 4], np.float32)
    right = 1 / (1 + np.exp(-x.astype(np.float64)))
    case = _case(Call("Sigmoid", ("x",), ("s",)), Call("Log", ("s",), ("y",)), x=x)
    monkeypatch.setattr("rammer_testing.graphs.judge.reference_outputs", lambda _: None)
    for error, kind in ((5e-8, "ok"), (5e-5, "lowering")):
        said = np.log(right + error).astype(np.float32)
        monkeypatch.setattr(judge, "outside", lambda *_, said=said: [said])
        assert judge(case, TOY).kind == kind


def test_a_voice_that_never_answers_is_not_asked_for_ever() -> None:
    class Broken(PeerProcess):
        def ask(self, *_: object) -> None:
            self.generation += 1
            raise PeerCrashed("no process")

    asked = Outside(Broken())
    for _ in range(HOPELESS + 2):
        assert asked(b"", {}, ["y"]) is None
    assert asked.peer.generation == asked.deaths == HOPELESS


def test_nan_never_passes(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    case = _case(Call("Relu", ("x",), ("y",)), x=np.ones(3, np.float32))
    monkeypatch.setattr(Judge, "run", lambda *_: {"y": np.array([1, np.nan, 1], np.float32)})
    assert judge(case, replace(TOY)).kind == "device"


def test_models_with_one_thing_wrong_end_in_a_clear_refusal() -> None:
    tally = campaign(CampaignPlan(TOY, seed=8, graphs=60, seconds=60, voices=False, shrink=0, spoiled=True, longest=6))
    # A device that runs models refused by the checker is lenient. A traceback is a fault.
    kinds = Counter(f.verdict.kind for f in tally.faults.values())
    assert kinds["traceback"] + kinds["internal"] == 0, tally.text()
    assert sum(tally.refused.values()) > 20


@pytest.mark.parametrize("op", ["ReduceSumSquare", "ReduceSum"])
def test_integers_that_leave_their_type_are_nobodys_fault(judge: Judge, op: str) -> None:
    """Check that only results within the type are compared: ONNX Runtime saturates, rammer and NumPy wrap, ONNX does not specify
    it."""
    x = np.array([[2**31 - 1, 2**31 - 1, 40000], [3, 4, 5]], np.int32)
    case = replace(_case(Call(op, ("x",), ("y",), {"axes": [1], "keepdims": 0}), x=x), opset=11)
    verdict = judge(case, TOY)
    assert verdict.kind == "ok" and verdict.told == 0.5, verdict
