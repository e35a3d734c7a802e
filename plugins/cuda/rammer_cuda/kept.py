"""Kernels of a program, kept in the cache folder: writing their texts again takes longer than all else of a warm start.

A kernel that reads packed constants is written again, since how to pack them cannot be kept; those are quickly written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rammer.codegen.generators import generator_hash
from rammer.codegen.task import Argument
from rammer.device.manifest import Binding
from rammer.ir.names import checked
from rammer.ir.program import RProgram

from rammer_cuda.kernels.task import TaskKernel
from rammer_cuda.remember import Remembered
from rammer_cuda.source import Writer

#: Beyond any number of threads, bytes of shared memory and blocks of a cluster.
LARGEST = 1 << 24
#: What is kept of a kernel by name: strings, and whole numbers.
TEXTS, SIZES = ("entry", "device", "body"), ("threads", "shared", "dynamic", "blocks", "resident")


def kept_kernels(program: RProgram, binding: Binding, writer: Writer) -> dict[str, TaskKernel]:
    """The kernels of a program by operator, remembered for the next process. Best effort."""
    return remembered(program, binding, "kernels").get(
        lambda record: _restored(record, program, binding, writer), lambda: writer.all(program.operators, binding), _record
    )


def remembered(program: RProgram, binding: Binding, what: str) -> Remembered:
    """A place for what follows from a program, its constants' names and the text of the generators."""
    return Remembered(program, what, generator_hash("rammer_cuda"), " ".join(sorted(binding.constants)))


def _record(kernels: Mapping[str, TaskKernel]) -> dict[str, Any]:
    """Distinct kernels, and by operator the number of its kernel and its tensors."""
    numbers: dict[tuple[object, ...], int] = {}
    distinct, users = list[dict[str, Any]](), dict[str, tuple[int, list[str]]]()
    for name, k in kernels.items():
        packings = tuple(a.packing and a.packing.key for a in k.arguments)
        number = numbers.setdefault((k.entry, *packings), len(numbers))
        if number == len(distinct):
            form = {"written": [a.written for a in k.arguments], **{n: getattr(k, n) for n in (*TEXTS, "parameters", *SIZES)}}
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
        if not {*tensors} <= {*o.inputs, *o.outputs} or written != [a.written for a in kernels[number].arguments]:
            raise ValueError(f"not the kernel of {o.name}")
        arguments = zip(kernels[number].arguments, tensors, strict=True)
        result[o.name] = replace(kernels[number], arguments=tuple([Argument(t, a.written, a.packing) for a, t in arguments]))
    return result


def _kernel(k: Mapping[str, Any], program: RProgram, binding: Binding, writer: Writer) -> TaskKernel:
    if "like" in k:
        return writer.written(program.operator[k["like"]], binding)
    arguments = tuple(Argument("", bool(w)) for w in k["written"])
    sizes, texts = {n: k[n] for n in SIZES}, {n: k[n] for n in TEXTS}
    whole = all(type(n) is int and 0 <= n < LARGEST for n in sizes.values())
    if not whole or not all(isinstance(t, str) for t in (*texts.values(), *k["parameters"])):
        raise ValueError(f"not a kernel: {k['entry']}")
    checked("a kernel", k["entry"])
    return TaskKernel(**texts, parameters=tuple(k["parameters"]), arguments=arguments, **sizes)
