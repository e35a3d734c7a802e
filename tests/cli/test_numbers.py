"""Oversized and invalid numbers in every option and in the head of a compiled file: bad input with short messages."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from command import Command

from rammer.cli.main import cli
from rammer.compiled.artifact import is_text, seal_of
from rammer_testing.nonempty import some

HUGE = ("9" * 20, "9" * 5000, "-" + "9" * 20, "\u00b2", "\u0663" * 20, "1e400", "nan", "10" * 3000 + "x")
#: Texts around a huge number, for options that accept words.
WORDS: dict[str, tuple[str, ...]] = {
    "--option": ("tiles={}", "sram={}", "chips={}", "{}=1"),
    "--shape": ("x:1x{}x8x8", "x:{}", "x={}..9", "x=1..{}", "y=x+{}", "y={}*x"),
    "--range": ("x:0..{}", "x:{}..{}"),
    "--policy": ("ios{{r={}}}", "{}", "wavefront{{{}=1}}"),
    "--device": ("ipu_sim:{}", "{}"),
    "--devices": ("ipu_sim:{}", "{}"),
}
RUNS: dict[str, tuple[str, ...]] = {"onnx-tests": ("--device", "ipu_sim", "-k", "^test_abs$")}


def options() -> Iterator[tuple[str, click.Option]]:
    ctx = click.Context(cli)
    for name in some(cli.list_commands(ctx)):
        command = cli.get_command(ctx, name)
        assert command is not None
        yield from ((name, p) for p in command.params if isinstance(p, click.Option) and not p.is_flag)


#: Options with numbers, each with a command that has it.
OPTIONS = {
    o.opts[0]: (name, isinstance(o.type, click.types.IntRange | click.FloatRange))
    for name, o in reversed([*options()])
    if isinstance(o.type, click.types.IntRange | click.FloatRange) or o.opts[0] in WORDS
}


def test_every_number_has_bounds() -> None:
    """Check that no option has the type int or float: these accept infinities, NaN and unbounded loop counts."""
    for name, option in some(options()):
        kind = option.type
        assert not isinstance(kind, click.types.IntParamType | click.types.FloatParamType) or isinstance(
            kind, click.IntRange | click.FloatRange
        ), (name, option.opts)
        assert not isinstance(kind, click.IntRange) or (kind.min is not None and kind.max is not None), (name, option.opts)


@pytest.mark.slow
@pytest.mark.parametrize("option", OPTIONS)
def test_huge_numbers_are_bad_input(rammer: Command, model: Path, option: str) -> None:
    name, number = OPTIONS[option]
    words = RUNS.get(name, (model, "--device", "ipu_sim", "--option", "tiles=4"))
    for form in some(WORDS.get(option, ("{}",))):
        for huge in HUGE:
            done = rammer(name, *words, option, form.format(huge, huge))
            assert done.code in ((2,) if number or option == "--option" else (0, 2) if option == "--range" else (2, 3)), (
                form,
                huge[:30],
                done,
            )
            assert "Traceback" not in done.err and len(done.err) < 5000 and len(done.out) < 5000, (form, huge[:30], len(done.err))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["options", "format", "constants", "inputs", "segments", "fingerprint"])
def test_huge_numbers_in_a_head_are_bad_input(rammer: Command, model: Path, tmp_path: Path, key: str) -> None:
    good, bad = tmp_path / "good.rammer", tmp_path / "bad.rammer"
    assert rammer("compile", model, "--device", "ipu_sim", "--option", "tiles=4", "-o", good).code == 0
    with zipfile.ZipFile(good) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    for huge in HUGE:
        head = json.loads(members["head.json"])
        changes = [{"tiles": huge}, {"sram": huge}, {"chips": huge}] if key == "options" else [huge, HUGE_NUMBER]
        for change in changes:
            head[key] = change
            text = json.dumps(head).replace(str(HUGE_NUMBER), huge if huge.isdigit() and huge.isascii() else "1" + "0" * 30)
            parts = {**members, "head.json": text.encode()}
            with zipfile.ZipFile(bad, "w") as archive:
                for member, data in parts.items():
                    archive.writestr(member, data)
                archive.comment = seal_of({n: d for n, d in parts.items() if is_text(n)})
            done = rammer("run", bad)
            # Any text is the fingerprint of another version of the plugin, which runs the same program.
            assert done.code == (0 if key == "fingerprint" and isinstance(change, str) else 2), (change, done)
            assert "Traceback" not in done.err and len(done.err) + len(done.out) < 6000


HUGE_NUMBER = 123456789012


@pytest.mark.slow
@pytest.mark.parametrize("name", ["RAMMER_DEBUG", "RAMMER_HOST_SECONDS", "OMPI_COMM_WORLD_SIZE"])
def test_huge_numbers_in_the_environment(rammer: Command, model: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for huge in some(HUGE):
        monkeypatch.setenv(name, huge)
        done = rammer("run", model, "--device", "ipu_sim", "--option", "tiles=4")
        assert done.code in (0, 2) and "Traceback" not in done.err and len(done.err) < 5000, (huge[:30], done)
