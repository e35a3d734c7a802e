"""The command group ``rammer``. Commands load on use: ``rammer devices`` imports no ONNX, a warm ``run`` no compiler."""

from __future__ import annotations

import importlib

import click

import rammer

#: Command -> module under ``rammer.cli`` that defines its ``command``.
COMMANDS = {
    "devices": "devices",
    "run": "run",
    "compare": "compare",
    "inspect": "inspect",
    "report": "report",
    "bench": "bench",
    "compile": "compile",
    "onnx-tests": "onnx_tests",
    "cache": "cache",
    "plugins": "plugins",
}


class LazyGroup(click.Group):
    """A click group that imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which people meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import and return a command."""
        if name not in COMMANDS:
            return None
        command = importlib.import_module(f"rammer.cli.{COMMANDS[name]}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(rammer.__version__, prog_name="rammer")
def cli() -> None:
    """Compile ONNX models into static tables of tasks and run them on any device with a plugin. Example: rammer run model.onnx
    --device rocm"""
