"""What was worked out or measured for a program, cached for the next process. Best effort.

Writing the texts of a program's kernels again takes longer than all else of a warm start. A kernel that reads packed constants
is written again, since how to pack them cannot be cached; those are quickly written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from rammer.codegen.generators import generator_hash
from rammer.codegen.task import Argument
from rammer.compiled.debug import DECISIONS, debug
from rammer.compiled.files import cache_text, cached_text
from rammer.device.manifest import Binding
from rammer.ir.data import loads
from rammer.ir.names import checked
from rammer.ir.program import RProgram
from rammer.profile.folder import cache_folder
from rammer.version import __version__

from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.source import Writer

Value = TypeVar("Value")
#: Beyond any number of threads, bytes of shared memory and blocks of a cluster.
LARGEST = 1 << 24
#: What is cached of a kernel by name: every field that is a string, a whole number or a flag.
TEXTS, SIZES, FLAGS = (tuple(f.name for f in fields(TaskKernel) if f.type == kind) for kind in ("str", "int", "bool"))
PLAIN = (*TEXTS, *SIZES, *FLAGS)


class Cached:
    """One JSON value about ``program``: ``what`` it is, and the ``versions`` of everything else that it depends on besides
    rammer's own. Its file begins with a checksum: a wrong wait would be worse than none."""

    def __init__(self, program: RProgram, what: str, *versions: str) -> None:
        version = hashlib.sha256("\0".join((__version__, *versions)).encode()).hexdigest()[:16]
        self.path: Path = cache_folder() / "binaries" / "cuda" / f"{program.digest}-{version}.{what}.json"

    def read(self) -> Any:
        """The value, None where there is none, or not as it was written."""
        text = cached_text(self.path)
        try:
            return loads(text) if text is not None else None
        except ValueError:
            return None

    def get(self, restored: Callable[[Any], Value], made: Callable[[], Value], record: Callable[[Value], Any]) -> Value:
        """What an earlier process cached, where ``restored`` can make use of it; else what is ``made`` now, and cached."""
        found = self.read()
        if found is not None:
            try:
                return restored(found)
            except (LookupError, TypeError, ValueError, AttributeError) as problem:
                said = f"{self.path} does not hold ({problem!r}) and is made again"
                debug(DECISIONS, lambda: said)
        value = made()
        self.write(record(value))
        return value

    def write(self, value: Any) -> None:
        """Cache ``value``, whole or not at all."""
        cache_text(self.path, json.dumps(value))


def cached_kernels(program: RProgram, binding: Binding, writer: Writer) -> dict[str, TaskKernel]:
    """The kernels of a program by operator, cached for the next process. Best effort."""
    return cached(program, binding, "kernels").get(
        lambda record: _restored(record, program, binding, writer), lambda: writer.all(program.operators, binding), _record
    )


def cached(program: RProgram, binding: Binding, what: str) -> Cached:
    """A place for what follows from a program, its constants' names and the text of the generators."""
    return Cached(program, what, generator_hash("rammer_cuda"), " ".join(sorted(binding.constants)))


def _record(kernels: Mapping[str, TaskKernel]) -> dict[str, Any]:
    """Distinct kernels, and by operator the number of its kernel and its tensors."""
    numbers: dict[tuple[object, ...], int] = {}
    distinct, users = list[dict[str, Any]](), dict[str, tuple[int, list[str]]]()
    for name, k in kernels.items():
        packings = tuple(a.packing and a.packing.key for a in k.arguments)
        number = numbers.setdefault((k.entry, *packings), len(numbers))
        if number == len(distinct):
            form = {"written": [a.written for a in k.arguments], **{n: getattr(k, n) for n in (*PLAIN, "parameters")}}
            distinct.append({"like": name} if any(packings) else form)
        users[name] = number, [a.tensor for a in k.arguments]
    return {"kernels": distinct, "operators": users}


def _restored(record: Any, program: RProgram, binding: Binding, writer: Writer) -> dict[str, TaskKernel]:
    """The inverse. ValueError and the like where a kernel is none of these operators'."""
    kernels = [_kernel(k, program, binding, writer) for k in record["kernels"]]
    result: dict[str, TaskKernel] = {}
    for o in program.operators:
        number, tensors = record["operators"][o.name]
        written = [t in o.outputs for t in tensors]
        if not {*tensors} <= {*o.inputs, *o.lengths, *o.outputs} or written != [a.written for a in kernels[number].arguments]:
            raise ValueError(f"not the kernel of {o.name}")
        arguments = zip(kernels[number].arguments, tensors, strict=True)
        result[o.name] = replace(kernels[number], arguments=tuple([Argument(t, a.written, a.packing) for a, t in arguments]))
    return result


def _kernel(k: Mapping[str, Any], program: RProgram, binding: Binding, writer: Writer) -> TaskKernel:
    if "like" in k:
        return writer.written(program.operator[k["like"]], binding)
    arguments = tuple(Argument("", bool(w)) for w in k["written"])
    plain = {n: k[n] for n in PLAIN}
    whole = all(type(plain[n]) is int and 0 <= plain[n] < LARGEST for n in SIZES) and all(type(plain[n]) is bool for n in FLAGS)
    if not whole or not all(isinstance(t, str) for t in (*(plain[n] for n in TEXTS), *k["parameters"])):
        raise ValueError(f"not a kernel: {k['entry']}")
    checked("a kernel", k["entry"])
    return TaskKernel(parameters=tuple(k["parameters"]), arguments=arguments, **plain)
