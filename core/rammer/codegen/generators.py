"""What kernel text depends on besides the program: the code that writes it."""

from __future__ import annotations

from importlib import import_module

from rammer.device.code import code_hash


def generator_hash(plugin: str) -> str:
    """Content hash of everything that writes kernel text: the package ``plugin`` and the core's emitter."""
    for package in (plugin, "rammer.codegen"):
        import_module(package)
    return code_hash(plugin, "rammer.codegen")
