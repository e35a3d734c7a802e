"""Generated identifiers, and foreign strings in lines of text."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rammer.ir.compute import Axis, Compute
from rammer.ir.expr import Const, Ref
from rammer.ir.names import LONGEST, Names, is_identifier, make_identifier, quote_text, shorten_name, unquote_text
from rammer.ir.operator import ROperator
from rammer.ir.program import Port, RProgram
from rammer.schedule.wavefront import Wavefront
from rammer_testing.programs import random_net

WORDS = (
    "",
    "int",
    "for",
    "nan",
    "a b",
    "a-b",
    "a_b",
    "a_b_2",
    "9",
    "\u00e9",
    "rm_max",
    "  # x",
    '"x"',
    " x",
    "x\nrow v0: x[0:1:1]",
    "p on 3 vEUs, predicted 1 s",
    "x\u2028y",
    "\ud800",
)
ODD = st.one_of(st.text(), st.sampled_from(WORDS))


@given(st.lists(ODD, max_size=30))
def test_identifiers_are_unique_and_always_the_same(names: list[str]) -> None:
    made = [[make_identifier(n, taken) for n in names] for taken in (Names(), Names(), set[str]())]
    assert made[0] == made[1] == made[2] and len(set(made[0])) == len(names)
    assert all(is_identifier(n) and len(n) <= LONGEST + 4 for n in made[0])
    for name, got in zip(names, made[0], strict=True):
        if got == name:
            assert make_identifier(name) == name  # a valid name is unchanged


def test_many_things_of_one_name_are_named_soon() -> None:
    taken = Names()
    assert len({make_identifier("x y", taken) for _ in range(50_000)}) == 50_000


def test_long_names_stay_apart() -> None:
    one, other = (make_identifier("a" * 500 + end) for end in "xy")
    assert one != other and len(one) == len(other) == LONGEST
    assert len(shorten_name("a" * 500)) < 210 and shorten_name("a" * 500 + "x" + "b" * 40) != shorten_name(
        "a" * 500 + "y" + "b" * 40
    )


@given(ODD)
def test_quoted_strings_are_one_line_and_read_back(text: str) -> None:
    line = quote_text(text)
    assert line.isprintable() and line == line.strip() and unquote_text(line) == text
    line.encode()


@pytest.mark.parametrize("text", ["", " x", "a\nb", '"a"b', '"plain"', "3\u2028", '"a', "[1]\x00"])
def test_what_was_not_quoted_so_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        unquote_text(text)


@given(ODD, ODD, ODD, st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_program_with_foreign_strings_reads_back(policy: str, origin: str, external: str, seed: int) -> None:
    program = random_net(Random(seed), 4).program(Wavefront(), 2)
    operators = tuple(replace(o, computes=tuple(replace(c, origin=origin) for c in o.computes)) for o in program.operators)
    port = Port(external, program.inputs[0].tensor)
    changed = replace(program, policy=policy, operators=operators, inputs=(port, *program.inputs[1:]))
    text = str(changed)
    assert RProgram.parse(text) == changed and len(text.splitlines()) == len(str(program).splitlines())


@pytest.mark.parametrize("name", ["", "a b", "a;", "a\n", "é", "0a", "a" * 2000])
def test_nothing_is_made_under_another_name(name: str) -> None:
    axis = Axis("i", 2)
    good = Compute("y", "float32", (axis,), Const(1.0))
    for make in (
        lambda: Axis(name, 2),
        lambda: Compute(name, "float32", (axis,), Const(1.0)),
        lambda: ROperator(name, (good,), (), ("y",)),
        lambda: ROperator("y", (good,), (), ("y",), (2,), "f", ((name, 1),)),
        lambda: Compute("y", "float32", (axis,), Ref(name)),
    ):
        with pytest.raises(ValueError, match=r".*"):
            make()
