"""Sources of ONNX models. A model is read, and ONNX imported, on first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rammer.cache.file_digests import content_digest
from rammer.compile_options import CompileOptions
from rammer.compiled.artifact import is_artifact
from rammer.device.custom_operators import CustomOperators
from rammer.errors import BadInput
from rammer.ir.constants.digest import digest_array
from rammer.ir.constants.mapped_files import Mapped
from rammer.ir.names import shorten_name
from rammer.jit.model_specialiser import ModelSpecialiser
from rammer.runtime.compiled_file import compiled_source
from rammer.runtime.model_source import ModelSource

if TYPE_CHECKING:
    import onnx

    from rammer.frontend.read.reader import Model

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


def open_source(
    source: str | Path | bytes | onnx.ModelProto,
    plugins: Callable[[], CustomOperators] = dict,
    weights: Mapping[str, Array] | None = None,
) -> ModelSource:
    """Return a source for a path, bytes or ModelProto, without parsing it. ``plugins`` returns the operators that plugins declare
    (``Registry.operators``) and is called when the model is read. ``weights`` are values of initialisers of a ModelProto
    that have none (``rammer.frontend.read.reader.read_model``); they are not copied. With them, even if there are none, compiled
    programs are cached by content. The source of a compiled file has ports and no model."""

    path, opened = Path(source) if isinstance(source, str | Path) else None, dict[str, Mapped]()
    if path is not None and is_artifact(path):
        return compiled_source(path, plugins, ModelSpecialiser)
    folder = path.parent if path is not None else Path()

    def read() -> Model:
        from rammer.frontend.read.reader import read_model

        return read_model(source, plugins(), {folder / name: file for name, file in opened.items()}, noted, weights or {})

    def noted(file: Mapped) -> None:
        content_digest(file)
        opened[file.path.relative_to(folder).as_posix()] = file

    digest = content_digest(source) if isinstance(source, bytes) else ""
    if weights is not None:
        digest = _digest_parts(source, weights)
    if path is not None:
        with suppress(OSError, ValueError):  # reading reports the error
            opened[path.name] = Mapped.of(path)
            digest = content_digest(opened[path.name])
    return ModelSource(read, ModelSpecialiser, digest, path, opened=opened)


def _digest_parts(model: bytes | str | Path | onnx.ModelProto, weights: Mapping[str, Array]) -> str:
    """Return a hash of a ModelProto and of its values beside it."""
    assert not isinstance(model, bytes | str | Path)
    parts = [f"{name} {digest_array(array)}" for name, array in sorted(weights.items())]
    return content_digest("\n".join(parts).encode() + model.SerializeToString(deterministic=True))


def check_kept(options: CompileOptions, source: ModelSource) -> None:
    """Raise BadInput if a pattern of float32 operators is unmatched, or if the precision is not float16."""
    if not options.keep_float32:
        return
    if options.precision != "float16":
        raise BadInput("no operator becomes float16", "--keep-float32", "give --precision float16, or leave out --keep-float32")
    from rammer.frontend.read.model_checks import all_graphs

    names = {text for graph in all_graphs(source.model.proto) for node in graph.node for text in (node.name, node.op_type)}
    for pattern in options.keep_float32:
        if not any(fnmatchcase(name, pattern) for name in names):
            what = f"no operator's name or type matches {shorten_name(pattern)!r}"
            raise BadInput(what, "--keep-float32", "rammer inspect --stage graph shows names after #, and types before (")
