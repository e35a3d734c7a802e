"""The command group ``rammer``: one file a command."""

from __future__ import annotations

import click

import rammer
from rammer.cli import lazy


@click.group(cls=lazy.LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(rammer.__version__, prog_name="rammer")
def cli() -> None:
    """Compile ONNX models into static tables of tasks and run them on any device with a plugin.

    Example: rammer run model.onnx --device rocm
    """
