"""The verifier finds planted mistakes one by one, and is fast."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from task_oracle import dropped_waits, is_legal, with_task

from rammer.ir import expr as ex
from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Load, Op, Ref, make_add
from rammer.ir.operator import Connection, ROperator
from rammer.ir.program import Buffer, Counter, Port, RProgram, Storage, Task, Wait
from rammer.schedule.wavefront import Wavefront
from rammer.verify.verifier import VerifyError, verify
from rammer_testing.programs import TaskNet, adding, device, recurrent_net, stencil, summing

# --- planted mistakes, one by one -----------------------------------------------------------------


def relay() -> RProgram:
    """Return three operators in a chain on two rows; every task reads all of the operator before."""
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 1)).add(summing("b", 4, "a", 1, 4))
    return net.add(summing("y", 4, "b", 1, 4)).program(Wavefront(), 2)


def fails(program: RProgram, message: str) -> VerifyError:
    with pytest.raises(VerifyError, match=message) as error:
        verify(program)
    assert error.value.where
    return error.value


def test_the_chain_itself_is_legal() -> None:
    report = verify(relay())
    assert (report.tasks, report.waits, report.operator_pairs, report.task_reads) == (12, 4, 2, 0)
    assert str(report).startswith("verified: 12 tasks, 4 waits, 2 operator pairs ordered, 0 single reads")


@pytest.mark.parametrize("edited", list(dropped_waits(relay())))
def test_a_dropped_wait(edited: RProgram) -> None:
    error = fails(edited, r"(b|y)\[\d\] reads (a|b) before (a|b) is guaranteed to have written it")
    assert error.hint.startswith("a wait for") and error.where.startswith("v")


def test_two_swapped_tasks() -> None:
    program = relay()
    assert [t.operator for t in program.rows[0]] == ["a", "a", "b", "b", "y", "y"]
    rows = [list(r) for r in program.rows]
    rows[0][1], rows[0][2] = rows[0][2], rows[0][1]
    edited = replace(program, rows=tuple(map(tuple, rows)))
    fails(edited, "rows wait for each other in a cycle: nothing can finish counter a")


def test_swapped_tasks_without_waits() -> None:
    net = TaskNet().tensor("x", 4).add(adding("a", 4, ["x"], 4)).add(adding("y", 4, ["a"], 4))
    program = net.program(Wavefront(), 1)
    fails(replace(program, rows=(program.rows[0][::-1],)), r"y\[0\] reads a before a is guaranteed to have written it")


def test_a_shifted_arena_offset() -> None:
    program = relay()
    buffers = tuple(replace(b, offset=0) if b.kind == "arena" else b for b in program.buffers)
    assert buffers != program.buffers
    fails(replace(program, buffers=buffers), "buffer b_b takes arena bytes of b_a, but its writer b may start")


def test_a_misaligned_arena_offset() -> None:
    program = relay()
    buffers = tuple(replace(b, offset=b.offset + 4) if b.kind == "arena" else b for b in program.buffers)
    fails(replace(program, buffers=buffers), "starts at byte 4, which is not a multiple of 64")


@pytest.mark.parametrize("threshold", [0, 3, 5])
def test_a_wrong_threshold(threshold: int) -> None:
    program = relay()
    task = program.rows[1][2]
    edited = with_task(program, 1, 2, replace(task, waits=(Wait("a", threshold),)))
    fails(edited, f"waits for {threshold} of counter a, whose full count is 4")


def test_a_counter_with_fewer_tasks() -> None:
    program = relay()
    counters = tuple(Counter("a", "a", 0, 3) if c.name == "a" else c for c in program.counters)
    rows = tuple(
        tuple(replace(t, waits=tuple(replace(w, threshold=3) if w.counter == "a" else w for w in t.waits)) for t in row)
        for row in program.rows
    )
    fails(replace(program, counters=counters, rows=rows), r"b\[0\] reads a before a is guaranteed to have written it")


def test_a_dropped_task() -> None:
    fails(with_task(relay(), 1, 1), r"a\[3\] is on no row")
    fails(with_task(relay(), 0, 0), r"a\[0\] is on no row")


def test_a_duplicated_task() -> None:
    program = relay()
    task = program.rows[1][1]
    fails(with_task(program, 1, 1, task, task), r"a\[3\] occurs twice")


def test_unknown_tasks_and_counters() -> None:
    program = relay()
    fails(with_task(program, 0, 0, Task("a", 7)), r"a\[7\] is not a task of this program")
    fails(with_task(program, 0, 0, Task("z", 0)), r"z\[0\] is not a task of this program")
    fails(with_task(program, 0, 0, Task("a", 0, (Wait("z", 1),))), "waits for an unknown counter z")
    fails(replace(program, counters=(*program.counters, Counter("more", "a", 2, 5))), "counts tasks 2..5 of 4")
    fails(replace(program, counters=(*program.counters, Counter("more", "z", 0, 1))), "counts an unknown operator z")


def banded(reach: int = 1) -> RProgram:
    """Return a stencil whose tasks wait only for the bands of the producer that they read."""
    net = TaskNet().tensor("x", 8).add(adding("a", 8, ["x"], 2)).add(stencil("y", 8, "a", 2, reach))
    program = net.program(Wavefront(), 4)
    bands = [(0, 2), (1, 3), (2, 4), (0, 4)]
    counters = tuple(Counter(f"a_{i}", "a", first, last) for i, (first, last) in enumerate(bands))
    needs = [("a_0",), ("a_0", "a_1"), ("a_1", "a_2"), ("a_2",)]
    rows = tuple((Task("a", i), Task("y", i, tuple(Wait(c, 2) for c in needs[i]))) for i in range(4))
    return replace(program, counters=counters, rows=rows)


def test_bands_that_cover_the_reads_are_enough() -> None:
    report = verify(banded())
    assert report.task_reads == 4 and is_legal(banded())


def test_a_widened_read_escapes_its_bands() -> None:
    assert not is_legal(banded(reach=3))
    fails(banded(reach=3), r"y\[0\] reads a before a is guaranteed to have written it")


def test_a_shifted_load_leaves_its_tensor() -> None:
    program = relay()
    compute = replace(program.operator["y"].anchor, body=Load("b", (make_add("k", 1),)))
    changed = replace(program.operator["y"], computes=(compute,))
    fails(replace(program, operators=(*program.operators[:2], changed)), r"index k \+ 1 covers 1..4, the axis has 4")


def test_a_load_redirected_to_a_later_tensor() -> None:
    program = relay()
    compute = replace(program.operator["b"].anchor, body=Load("b2", (Ref("k"),)))
    changed = replace(program.operator["b"], computes=(compute,))
    operators = (program.operators[0], changed, program.operators[2])
    fails(replace(program, operators=operators), "b uses tensor b2, which has no storage")
    storages = (*program.storages, replace(program.storage["y"], tensor="b2"))
    fails(replace(program, operators=operators, storages=storages), "reads b2 before y is guaranteed to have written it")
    storages = (*program.storages, replace(program.storage["b"], tensor="b2"))
    fails(replace(program, operators=operators, storages=storages), "b reads b2, parts of which it writes itself")


def test_rows_that_wait_for_each_other() -> None:
    net = TaskNet().tensor("x", 2).add(adding("a", 2, ["x"], 1)).add(adding("y", 2, ["x"], 1))
    counters = (Counter("a", "a", 0, 2), Counter("y", "y", 0, 2))
    program = replace(net.program(Wavefront(), 2, outputs=["a", "y"]), counters=counters)
    row = (Task("a", 0, (Wait("y", 2),)), Task("a", 1)), (Task("y", 0, (Wait("a", 2),)), Task("y", 1))
    fails(replace(program, rows=row), "rows wait for each other in a cycle")
    alone = (Task("a", 0, (Wait("a", 2),)), Task("a", 1)), (Task("y", 0), Task("y", 1))
    fails(replace(program, rows=alone), "nothing can finish counter a")


# --- addresses --------------------------------------------------------------------------------------


def edit_storage(program: RProgram, tensor: str, **changes: object) -> RProgram:
    storages = tuple(replace(s, **changes) if s.tensor == tensor else s for s in program.storages)  # type: ignore[arg-type]
    return replace(program, storages=storages)


def test_storages_stay_inside_their_buffers() -> None:
    fails(edit_storage(relay(), "a", offset=1), "tensor a covers elements 1..5 of buffer b_a, which has 4")
    fails(edit_storage(relay(), "a", strides=(-1,)), "tensor a covers elements -3..1")
    fails(edit_storage(relay(), "a", buffer="nowhere"), "lives in an unknown buffer nowhere")


def test_nothing_is_written_twice() -> None:
    fails(edit_storage(relay(), "a", strides=(0,)), "an element of buffer b_a is written by a and again by a")
    program = relay()
    shared = edit_storage(program, "b", buffer="b_a")
    fails(shared, "an element of buffer b_a is written by a and again by b")


def test_inputs_and_constants_are_never_written() -> None:
    fails(edit_storage(relay(), "a", buffer="b_x"), "a is written into the input buffer b_x")
    program = relay()
    buffers = tuple(replace(b, kind="constant") if b.name == "b_a" else b for b in program.buffers)
    fails(replace(program, buffers=buffers), "a is written into the constant buffer b_a")


def test_outputs_are_written_whole() -> None:
    program = relay()
    more = (*program.buffers, Buffer("b_z", "float32", 8, "output"))
    storages = (*program.storages, Storage("z", "b_z", 0, (8,), (1,)))
    orphan = replace(program, buffers=more, storages=storages, outputs=(Port("z", "z"),))
    fails(orphan, "output 'z' is not fully written")
    fails(replace(program, outputs=(Port("b", "b"),)), "output 'b' lives in the arena buffer b_b")


def test_reading_what_nobody_writes() -> None:
    program = relay()
    buffers = tuple(replace(b, size=5) if b.name == "b_a" else b for b in program.buffers)
    fails(edit_storage(replace(program, buffers=buffers), "a", offset=0, shape=(5,)), "a has shape")
    compute = replace(program.operator["b"].anchor, reduce=(Axis("k", 5),), body=Load("wide", (Ref("k"),)))
    changed = (program.operators[0], replace(program.operator["b"], computes=(compute,)), program.operators[2])
    storages = (*program.storages, Storage("wide", "b_a", 0, (5,), (1,)))
    edited = replace(program, buffers=buffers, storages=storages, operators=changed)
    fails(edited, "b reads wide, parts of which are never written")


def test_types_and_tiles_must_fit() -> None:
    program = relay()
    buffers = tuple(replace(b, dtype="int32") if b.name == "b_a" else b for b in program.buffers)
    fails(replace(program, buffers=buffers), "a is float32, its buffer int32")
    fails(replace(program, operators=(replace(program.operators[0], tile=()), *program.operators[1:])), "tile")
    fails(replace(program, buffers=(*program.buffers, program.buffers[0])), "buffer b_x is defined twice")
    fails(replace(program, inputs=(Port("x", "gone"),)), "names tensor gone, which has no storage")


def test_interior_values_need_no_storage_and_reads_go_through_them() -> None:
    axes = (Axis("i", 8),)
    inner = Compute("m", "float32", axes, Op("mul", (Load("a", (Ref("i"),)), ex.Const(2.0))))
    outer = Compute("y", "float32", axes, Op("add", (Load("m", (make_add("i", -1),), 0.0), Load("m", (make_add("i", 1),), 0.0))))
    net = TaskNet().tensor("x", 8).add(adding("a", 8, ["x"], 2))
    net.add(ROperator("f", (inner, outer), (Connection("m", "y", "thread"),), ("y",), (2,)))
    program = net.program(Wavefront(), 2, outputs=["y"])
    assert "m" not in program.storage
    assert verify(program).operator_pairs == 1
    for edited in dropped_waits(program):
        fails(edited, r"f\[\d\] reads a before a is guaranteed to have written it")


# --- resources --------------------------------------------------------------------------------------


def test_local_memory_must_fit() -> None:
    program = relay()
    verify(program, device(2), local_bytes=lambda operator: 1024)
    with pytest.raises(VerifyError, match="a task of a needs 1025 bytes of local, a vEU of small has 1024"):
        verify(program, device(2), local_bytes=lambda operator: 1025)


def test_spinning_rows_must_leave_room_for_the_rest() -> None:
    program = relay()
    verify(program, device(2, resident=0))
    verify(program, device(2, resident=2), spinning=True)
    with pytest.raises(VerifyError, match="2 of 2 rows wait, but only 1 vEUs of small are guaranteed to run at once"):
        verify(program, device(2, resident=1), spinning=True)


# --- speed ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "steps", "tasks", "veus", "limit"),
    [
        (10, 10, 100, 1216, 5.0),
        (10, 100, 100, 132, 10.0),
    ],
)
def test_large_programs_verify_quickly(layers: int, steps: int, tasks: int, veus: int, limit: float) -> None:
    program = recurrent_net(layers, steps, tasks).program(Wavefront(), veus)
    start = time.process_time()
    report = verify(program)
    assert time.process_time() - start < limit
    assert report.tasks == layers * steps * tasks


def test_ports_and_tensors_without_a_buffer() -> None:
    program = relay()
    for buffer in program.buffers:
        rest = tuple(b for b in program.buffers if b is not buffer)
        fails(replace(program, buffers=rest), f"lives in an unknown buffer {buffer.name}")
