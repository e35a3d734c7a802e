"""Validation of DistributedProgram: steps and transfers must fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from rammer.distributed.distributed_program import (
    DevicePart,
    DeviceStep,
    DistributedProgram,
    Link,
    SpreadInput,
    SpreadOutput,
    Transfer,
)
from rammer.ir.program import Port, RProgram
from rammer.ir.types import TensorType
from rammer.schedule.wavefront import Wavefront
from rammer_testing.programs import TaskNet, adding

FOUR = TensorType("float32", (4,))


def program(reads: str, makes: str) -> RProgram:
    """Return a program that computes ``makes`` by an addition to ``reads``; ports have the tensors' names."""
    net = TaskNet().tensor(reads, 4).add(adding(makes, 4, [reads], 2))
    made = net.program(Wavefront(), 2)
    return replace(made, inputs=(Port(reads, reads),), outputs=(Port(makes, makes),))


def pipeline() -> DistributedProgram:
    """Return the pipeline x -> a on device 0, a -> y on device 1, y back to device 0."""
    first = DeviceStep(program("x", "a"), {}, departures=("a_to_1",))
    second = DeviceStep(program("a", "y"), {}, ("a_to_1",), ("y_to_0",), ("a_to_1",))
    return DistributedProgram(
        (DevicePart("toy", (first,)), DevicePart("toy", (second,))),
        (Transfer("a_to_1", "a", FOUR, 0, 1), Transfer("y_to_0", "y", FOUR, 1, 0)),
        program("x", "y"),
        (SpreadInput("x", "x", FOUR, (0,)),),
        (SpreadOutput("y", "y", FOUR, 1, "y_to_0"),),
    )


def with_step(spread: DistributedProgram, device: int, edit: Callable[[DeviceStep], DeviceStep]) -> DistributedProgram:
    """Return ``spread`` with the only step of ``device`` edited."""
    parts = list(spread.parts)
    parts[device] = replace(parts[device], steps=(edit(parts[device].steps[0]),))
    return replace(spread, parts=tuple(parts))


def test_what_it_says() -> None:
    spread = pipeline()
    assert spread.results(0) == ("y_to_0",) and spread.results(1) == ()
    assert spread.transfer["a_to_1"].nbytes == 16
    assert str(spread.transfers[0]) == "transfer a_to_1: a f32[4] from 0 to 1"
    assert Link(0, 1, 2e-6, 1e9).seconds(1000) == pytest.approx(3e-6)
    assert dict(spread.parts[1].steps[0].inputs) == {"a": FOUR}


def test_its_digest_is_of_everything_that_runs() -> None:
    spread = pipeline()
    assert spread.digest == pipeline().digest == replace(pipeline(), how="by hand").digest
    other = with_step(spread, 0, lambda s: replace(s, constants={"w": np.zeros(3)}))
    more = with_step(spread, 0, lambda s: replace(s, constants={"w": np.ones(3)}))
    moved = replace(spread, parts=(DevicePart("other", spread.parts[0].steps), spread.parts[1]))
    assert len({s.digest for s in (spread, other, more, moved)}) == 4


@pytest.mark.parametrize(
    ("device", "edit", "message"),
    [
        (0, lambda s: replace(s, departures=()), "each transfer must depart once"),
        (0, lambda s: replace(s, departures=("a_to_1", "a_to_1")), "each transfer must depart once"),
        (0, lambda s: replace(s, departures=("b",)), "names b, which is not a transfer"),
        (0, lambda s: replace(s, departures=("a_to_1", "y_to_0")), "does not depart here"),
        (1, lambda s: replace(s, arrivals=()), "reads a as f32.4., but it is None"),
        (1, lambda s: replace(s, arrivals=("a_to_1", "a_to_1")), "does not arrive here, or arrives twice"),
        (1, lambda s: replace(s, frees=()), "never frees"),
        (1, lambda s: replace(s, frees=("a_to_1", "a_to_1")), "which it does not hold"),
        (0, lambda s: replace(s, arrivals=("y_to_0",), frees=("y_to_0",)), "which it does not hold"),
        (0, lambda s: replace(s, arrivals=("y_to_0",)), "in a cycle"),
    ],
)
def test_steps_that_do_not_fit(device: int, edit: Callable[[DeviceStep], DeviceStep], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        with_step(pipeline(), device, edit)


def test_transfers_that_do_not_fit() -> None:
    spread = pipeline()
    a, y = spread.transfers
    for transfers, message in (
        ((a, replace(y, name="a_to_1")), "the same name"),
        ((a, replace(y, target=2)), "does not connect two"),
        ((replace(a, target=0), y), "does not connect two"),
        ((replace(a, type=TensorType("float32", (5,))), y), "does not depart here"),
        ((a, replace(y, tensor="z")), "does not depart here"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(spread, transfers=transfers)
    for output, message in (
        (replace(spread.outputs[0], device=0, transfer=""), "does not compute output 'y'"),
        (replace(spread.outputs[0], transfer=""), "each transfer must depart once"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(spread, outputs=(output,))


def test_a_circle_between_devices() -> None:
    """Check two devices whose first steps wait for the results of each other's second steps."""

    def part(one: str, two: str, sends: str, waits: str) -> DevicePart:
        first = DeviceStep(program(two, one), {}, (waits,), (), (waits,))
        return DevicePart("toy", (first, DeviceStep(program(one, sends), {}, departures=(f"{sends}_over",))))

    with pytest.raises(ValueError, match="cycle: step 0 of device 0, step 0 of device 1"):
        DistributedProgram(
            (part("p", "b", "a", "b_over"), part("q", "a", "b", "a_over")),
            (Transfer("a_over", "a", FOUR, 0, 1), Transfer("b_over", "b", FOUR, 1, 0)),
            program("x", "y"),
            (),
            (),
        )
