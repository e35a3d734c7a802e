"""Cache of compiled programs on disk. Programs are stored by input shapes and ranges. Parts of a model that are compiled during a
run (loop bodies, iterations, operators that wait for values) are stored by content."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rammer.cache.cache_keys import unit_key
from rammer.cache.cached_constants import ConstantCache
from rammer.cache.disk_cache import Cache
from rammer.compile_options import CompileOptions
from rammer.compiled.artifact import Artifact, SeparateConstants, write_artifact
from rammer.compiled.artifact_reader import check_device, load_artifact
from rammer.compiled.segments import Compiled
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, print_warning
from rammer.ir.constants.digest import digest_array
from rammer.runtime.model_source import Head, ModelSource
from rammer.runtime.shape_buckets import BOUND, SPANS, STEPS, ShapeKey

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model


@dataclass(frozen=True)
class ProgramCache:
    """The cached programs of ``source`` for ``backend``, opened as ``device``, in the cache folder ``root``. If it is None,
    nothing is cached."""

    source: ModelSource
    backend: Backend
    device: str
    options: CompileOptions
    device_options: Mapping[str, str] = field(default_factory=dict)
    registry: Registry | None = None
    root: Path | None = None

    @property
    def entries(self) -> Cache:
        """The entries: artifacts by their keys."""
        return Cache("programs", "3", self.root)

    def artifact(self, compiled: Compiled, key: str = "") -> Artifact:
        """Return ``compiled`` with the data that a later process needs to run it. It contains its key in the cache, so that a
        renamed file is detected."""
        return Artifact(compiled, self.device, self.backend.fingerprint, self.options.record(), self.device_options, key)

    def key(self, what: ShapeKey | str) -> str | None:
        """Return the key of a program, by its shapes or by ``part_key``. Return None if caching is off or the model has no
        digest (a model in memory)."""
        if self.root is None or not self.source.digest:
            return None
        return self.entries.key(
            self.source.digest,
            repr(what),
            unit_key(self.backend),
            self.device,
            repr(sorted(self.device_options.items())),
            *self.options.key(),
            self.registry.extension_key() if self.registry else "",
        )

    def has(self, key: str | None) -> bool:
        """Return True if an earlier process has cached the program."""
        return key is not None and self.entries.path(key).is_file()

    def keep(self, key: str | None, compiled: Compiled) -> None:
        """Write a program to the cache, unless a part of it waits for values of a run. Print a warning if writing fails. Raise
        BadInput if the model's files have changed since they were opened."""
        if key is not None and compiled.rest is None:
            made, separate = self.artifact(compiled, key), SeparateConstants(self._constant_cache(), self.source.files)
            try:
                check = self.source.check
                return self.entries.write(key, lambda file: write_artifact(file, made, separate=separate, verify=check))
            except OSError as problem:
                self.entries.report(problem)
        self.source.check()

    def found(self, key: str | None, fits: Callable[[Compiled], bool]) -> Compiled | None:
        """Return a cached program, or None if its file is missing or invalid (with a warning)."""
        path = self.entries.find(key) if key is not None else None
        if path is None:
            return None
        self.source.check(thoroughly=False)
        try:
            cached = load_artifact(path, self.registry.operators if self.registry else dict, self._constant_cache())
            bare = Compiled(cached.compiled.graph, ())
            if replace(cached, compiled=bare) != self.artifact(bare, path.name) or not fits(cached.compiled):
                raise BadInput(f"{path} was cached for other inputs or options")
            check_device(path, cached.compiled, self.backend)
            return cached.compiled
        except BadInput as problem:
            print_warning(f"{problem.what}; compiling again")
            return None

    def _constant_cache(self) -> ConstantCache:
        """Return the cache of large constants of the cached programs."""
        assert self.root is not None
        source = self.source
        home = source.path.parent if source.path is not None else None
        return ConstantCache(self.root, home, source.opened)


def describe_unit(backend: Backend) -> str:
    """Return the description of a unit that a compiled file records. A file for another unit runs, with a warning."""
    return f"{backend.hardware.name}, {backend.vdevice.veus} vEUs"


def part_key(model: Model) -> str:
    """Return a content hash of the operators, ports and constants of a model part with static shapes."""
    found = hashlib.sha256(model.proto.SerializeToString(deterministic=True))
    constants = sorted((n, digest_array(a)) for n, a in model.known.items())
    found.update(repr((model.name, model.inputs, model.outputs, constants)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def fits_shapes(compiled: Compiled, head: Head, key: ShapeKey) -> bool:
    """Return True if a program has the model's ports and the shapes in ``key``."""
    lengths = compiled.ranged.lengths if compiled.ranged is not None else {}
    more = dict(key)
    kept = {*dict(more.get(BOUND, ())).values()}  # these have the shapes of their outputs
    spans = dict(more.get(SPANS, ()))
    have = {v.external or v.name: v.port for v in compiled.graph.inputs if v.name not in lengths.values()}
    if compiled.ranged is not None and compiled.ranged.steps != dict(more.get(STEPS, ())):
        return False
    if (compiled.ranged.spans if compiled.ranged is not None else {}) != spans or {n: t.dtype for n, t in have.items()} != {
        p.name: p.dtype for p in head.inputs
    }:
        return False
    return _output_names(compiled) == head.output_names and all(have[n].shape == s for n, s in key if n in have and n not in kept)


def fits_part(compiled: Compiled, model: Model) -> bool:
    """Return True if a program has the ports of a model part."""
    have = {(v.external or v.name, v.port.dtype, v.port.shape) for v in compiled.graph.inputs}
    wanted = {(p.name, p.dtype, p.shape) for p in model.inputs}
    return compiled.ranged is None and have == wanted and _output_names(compiled) == model.outputs


def _output_names(compiled: Compiled) -> tuple[str, ...]:
    return tuple(v.external or v.name for v in compiled.graph.outputs)
