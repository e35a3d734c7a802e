"""Cache of computed or measured values of a program, or its kernels, for later processes. Best effort.

Writing the texts of a program's kernels again costs more than all else of a warm start. A kernel that reads packed constants is
written again, since a packing cannot be cached; that is fast."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar, cast

from rammer.cache.cache_keys import key_of
from rammer.cache.disk_cache import Cache
from rammer.codegen.task_parameters import Argument
from rammer.codegen.writer import KernelWriter, Named, generator_hash
from rammer.device.manifest import Binding
from rammer.ir.names import check_identifier
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.ir.untrusted_json import load_json
from rammer.version import __version__

__all__ = ["CachedValue", "KernelForm", "of_generators"]

Value = TypeVar("Value")
Code = TypeVar("Code", bound=Named)
#: Greater than any number of threads, bytes of shared memory and blocks of a cluster.
LARGEST = 1 << 24


class CachedValue:
    """The JSON value ``what`` about ``program`` on a device, an entry of kind ``DEVICE-WHAT``. ``versions`` are those of all
    dependencies other than rammer."""

    def __init__(self, device: str, program: RProgram, what: str, *versions: str) -> None:
        self.cache = Cache(f"{device}-{what}", key_of(__version__, *versions))
        self.key = self.cache.key(program.digest)

    def read(self) -> Any:
        """Return the value, or None if it is missing or damaged."""
        return self.cache.get(self.key, load_json)

    def get(self, restored: Callable[[Any], Value], made: Callable[[], Value], record: Callable[[Value], Any]) -> Value:
        """Return the value of an earlier process if ``restored`` accepts it, else ``made`` now and cached."""
        found = self.cache.get(self.key, lambda data: (restored(load_json(data)),))
        if found is not None:
            return found[0]
        value = made()
        self.write(record(value))
        return value

    def write(self, value: Any) -> None:
        """Cache ``value``, whole or not at all. Best effort."""
        self.cache.put(self.key, json.dumps(value).encode())


def of_generators(package: str, binding: Binding) -> tuple[str, str]:
    """Return the versions of kernels' texts: of their generators in ``package``, and the constants' names."""
    return generator_hash(package), " ".join(sorted(binding.constants))


class KernelForm(Generic[Code]):
    """The JSON form of kernels. It has every field that is a string, an integer or a flag. It also has the tuple of strings
    ``words``, and the arguments without packing. ``plain`` returns True for a kernel that can be written so."""

    def __init__(self, kind: type[Code], words: str, plain: Callable[[Code], bool] = lambda kernel: True) -> None:
        self.kind, self.words, self.plain = kind, words, plain
        self.texts, self.sizes, self.flags = (
            tuple(f.name for f in fields(kind) if f.type == name) for name in ("str", "int", "bool")
        )

    def cached(
        self, cache: CachedValue, operators: Sequence[ROperator], binding: Binding, writer: KernelWriter[Code]
    ) -> dict[str, Code]:
        """Return the kernels of these operators by name. They are the only value of ``cache``."""
        return cache.get(
            lambda record: self._from_record(record, operators, binding, writer),
            lambda: writer.all(operators, binding),
            self._record,
        )

    def _record(self, kernels: Mapping[str, Code]) -> dict[str, Any]:
        """Return the distinct kernels and, by operator, the number of its kernel and its tensors."""
        numbers: dict[tuple[object, ...], int] = {}
        distinct, users = list[dict[str, Any]](), dict[str, tuple[int, list[str]]]()
        for name, k in kernels.items():
            packings = tuple(a.packing and a.packing.key for a in k.arguments)
            values = {n: getattr(k, n) for n in (*self.texts, *self.sizes, *self.flags, self.words)}
            number = numbers.setdefault((values["entry"], *packings), len(numbers))
            if number == len(distinct):
                form = {"written": [a.written for a in k.arguments], **values}
                distinct.append({"like": name} if any(packings) or not self.plain(k) else form)
            users[name] = number, [a.tensor for a in k.arguments]
        return {"kernels": distinct, "operators": users}

    def _from_record(
        self, record: Any, operators: Sequence[ROperator], binding: Binding, writer: KernelWriter[Code]
    ) -> dict[str, Code]:
        """Read the result of ``_record``. Raises ValueError or a similar error if a kernel does not fit its operator."""
        by_name = {o.name: o for o in operators}
        kernels = [self._restore_kernel(k, by_name, binding, writer) for k in record["kernels"]]
        result: dict[str, Code] = {}
        for o in operators:
            number, tensors = record["operators"][o.name]
            written = [t in o.outputs for t in tensors]
            if not {*tensors} <= {*o.inputs, *o.lengths, *o.outputs} or written != [a.written for a in kernels[number].arguments]:
                raise ValueError(f"not the kernel of {o.name}")
            arguments = zip(kernels[number].arguments, tensors, strict=True)
            made = tuple([Argument(t, a.written, a.packing) for a, t in arguments])
            result[o.name] = replace(kernels[number], arguments=made)
        return result

    def _restore_kernel(
        self, k: Mapping[str, Any], operators: Mapping[str, ROperator], binding: Binding, writer: KernelWriter[Code]
    ) -> Code:
        if "like" in k:
            return writer.written(operators[k["like"]], binding)
        arguments = tuple(Argument("", bool(w)) for w in k["written"])
        sizes, flags = [k[n] for n in self.sizes], [k[n] for n in self.flags]
        whole = all(type(n) is int and 0 <= n < LARGEST for n in sizes) and all(type(n) is bool for n in flags)
        if not whole or not all(isinstance(t, str) for t in (*(k[n] for n in self.texts), *k[self.words])):
            raise ValueError(f"not a kernel: {k['entry']}")
        check_identifier("a kernel", k["entry"])
        plain = {n: k[n] for n in (*self.texts, *self.sizes, *self.flags)}
        made: Code = cast(Any, self.kind)(arguments=arguments, **{self.words: tuple(k[self.words])}, **plain)
        return made
