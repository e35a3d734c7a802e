"""The man page: all commands and options in one page, generated from the command line."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rammer.cli.main import cli
from rammer.version import __version__

PAGE = Path(__file__).parents[2] / "core/rammer/cli/rammer.1"


def escaped(text: str) -> str:
    """Return text for roff: no line begins with a control character, and hyphens may be copied."""
    return re.sub(r"^([.'])", r"\\&\1", text.replace("\\", "\\e").replace("-", "\\-"), flags=re.MULTILINE)


def described(words: tuple[str, ...], command: click.Command) -> Iterator[str]:
    """Yield the lines of a command and of its commands."""
    context = click.Context(command, info_name=words[-1])
    usage = " ".join((*words, *command.collect_usage_pieces(context)))
    yield f".SS {escaped(' '.join(words))}\n.B {escaped(usage)}\n.PP"
    paragraphs = re.split(r"\n\s*\n", re.sub(r"^ +", "", command.help or "", flags=re.MULTILINE).strip())
    yield "\n.PP\n".join(map(escaped, paragraphs))
    for parameter in command.get_params(context):
        if (record := parameter.get_help_record(context)) is not None:
            yield f".TP\n.B {escaped(record[0])}\n{escaped(record[1])}"
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from described((*words, name), found)


def written() -> str:
    """Return the page."""
    title = f'.TH RAMMER 1 "" "rammer {__version__}" "User commands"'
    head = f"{title}\n.SH NAME\nrammer \\- {escaped((cli.help or '').partition('. ')[0])}"
    more = ".SH SEE ALSO\nThe pages in the folder docs of the repository. Environment variables begin with RAMMER_."
    return "\n".join([head, ".SH COMMANDS", *described(("rammer",), cli), more, ""])


def test_the_man_page_has_every_command_and_option() -> None:
    if os.environ.get("RAMMER_BLESS"):
        PAGE.write_text(written())
    assert PAGE.read_text() == written(), "write it: RAMMER_BLESS=1 pytest tests/documents"


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_man_page_is_valid() -> None:
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", str(PAGE)], capture_output=True, text=True, check=True)
    assert not done.stderr and "rammer cache clear" in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
