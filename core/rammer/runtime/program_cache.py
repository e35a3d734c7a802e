"""Compiled programs on disk: of input shapes and ranges, and of the parts of a model that only its runs know (bodies, turns of
loops, what waits for values), which are found by what they hold."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rammer.cache.cached_constants import ConstantCache
from rammer.cache.whole_files import is_trusted
from rammer.compiled.artifact import Artifact, SeparateConstants, save_artifact
from rammer.compiled.artifact_reader import check_device, load_artifact
from rammer.compiled.segments import Compiled
from rammer.compiler.compile_options import CompileOptions
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, print_warning
from rammer.ir.constants.digest import digest_array
from rammer.runtime.model_source import Head, ModelSource
from rammer.runtime.shape_buckets import BOUND, SPANS, ShapeKey
from rammer.tuning.kernel_store import key_of, unit_key

if TYPE_CHECKING:
    from rammer.frontend.read.reader import Model

#: The folder beside that of programs, of constants by content.
CONSTANTS: Final = "constants"


@dataclass(frozen=True)
class ProgramCache:
    """What is kept in ``folder`` (None: nothing) of the programs of ``source``, compiled so for ``backend``, which was opened as
    ``device``."""

    source: ModelSource
    backend: Backend
    device: str
    options: CompileOptions
    device_options: Mapping[str, str] = field(default_factory=dict)
    registry: Registry | None = None
    folder: Path | None = None

    def artifact(self, compiled: Compiled, path: Path | None = None) -> Artifact:
        """``compiled`` with what a later process needs to run it; in the file ``path`` of the cache under the key that its name
        is: one that lies under another name is not what it says."""
        options, key = self.options, path.stem if path is not None else ""
        of = (self.device, options.target, self.backend.fingerprint, options.policy, self.device_options, options.precision)
        return Artifact(compiled, *of, key)

    def path(self, what: ShapeKey | str) -> Path | None:
        """The file of a program by its shapes, or of a part by ``part_key``. None where none is kept: of a model in memory, say,
        which has no digest."""
        if self.folder is None or not self.source.digest:
            return None
        options = self.options
        parts = (
            self.source.digest,
            repr(what),
            unit_key(self.backend),
            self.device,
            repr(sorted(self.device_options.items())),
            options.policy,
            options.tune,
            options.precision,
            options.layout,
            options.batching,
            repr(options.keep_float32),
            self.registry.extension_key() if self.registry else "",
        )
        return self.folder / f"{key_of(*parts)}.rammer"

    def keep(self, path: Path | None, compiled: Compiled) -> None:
        """Write a program, unless a part of it waits for values of a run. Where that fails, a warning says so. BadInput if the
        model's files do not hold what the program is kept for, or, if it is not kept, what was opened."""
        if path is not None and compiled.rest is None:
            try:
                apart = SeparateConstants(self._constant_cache(), self.source.files)
                return save_artifact(path, self.artifact(compiled, path), apart, self.source.check)
            except OSError as problem:
                print_warning(f"compiled program is not kept: {problem}")
        self.source.check()

    def found(self, path: Path | None, fits: Callable[[Compiled], bool]) -> Compiled | None:
        """The program in a file, if that is there and what it says; a warning tells of one that is not."""
        if path is None or not is_trusted(path):
            return None
        self.source.check(thoroughly=False)
        try:
            cached = load_artifact(path, self.registry.operators if self.registry else dict, self._constant_cache())
            bare = Compiled(cached.compiled.graph, ())
            if replace(cached, compiled=bare) != self.artifact(bare, path) or not fits(cached.compiled):
                raise BadInput(f"{path} was kept for something else")
            check_device(path, cached.compiled, self.backend)
            return cached.compiled
        except BadInput as problem:
            print_warning(f"{problem.what}; compiling again")
            return None

    def _constant_cache(self) -> ConstantCache:
        """Where large constants of kept programs are."""
        assert self.folder is not None
        source = self.source
        home = source.path.parent if source.path is not None else None
        return ConstantCache(self.folder.with_name(CONSTANTS), home, source.opened)


def part_key(model: Model) -> str:
    """Of a part of a model whose shapes are all known: its operators, ports and constants, by content."""
    found = hashlib.sha256(model.proto.SerializeToString(deterministic=True))
    constants = sorted((n, digest_array(a)) for n, a in model.known.items())
    found.update(repr((model.name, model.inputs, model.outputs, constants)).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def fits_shapes(compiled: Compiled, head: Head, key: ShapeKey) -> bool:
    """Whether a program has the model's ports, at the shapes that it was kept for."""
    lengths = compiled.ranged.lengths if compiled.ranged is not None else {}
    more = dict(key)
    kept = {*dict(more.get(BOUND, ())).values()}  # they have what their outputs have
    spans = dict(more.get(SPANS, ()))
    have = {v.external or v.name: v.port for v in compiled.graph.inputs if v.name not in lengths.values()}
    if (compiled.ranged.spans if compiled.ranged is not None else {}) != spans or {n: t.dtype for n, t in have.items()} != {
        p.name: p.dtype for p in head.inputs
    }:
        return False
    return _output_names(compiled) == head.outputs and all(have[n].shape == s for n, s in key if n in have and n not in kept)


def fits_part(compiled: Compiled, model: Model) -> bool:
    """Whether a program has the ports of a part of a model."""
    have = {(v.external or v.name, v.port.dtype, v.port.shape) for v in compiled.graph.inputs}
    wanted = {(p.name, p.dtype, p.shape) for p in model.inputs}
    return compiled.ranged is None and have == wanted and _output_names(compiled) == model.outputs


def _output_names(compiled: Compiled) -> tuple[str, ...]:
    return tuple(v.external or v.name for v in compiled.graph.outputs)
