"""Generator of ``models/*.onnx``, ``corpus.json`` and ``tried.md``: tiny models of current architectures by third-party
exporters.

``python tests/corpus/make.py [NAME ...]`` generates the models whose names begin with one of these, or all. It needs the packages
that README.md in this folder lists. Weights are random, with fixed seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import corpus_forms
import corpus_layers
import corpus_learn
import corpus_sight
import corpus_text
import corpus_vision
import numpy as np
import onnx
import onnxruntime
import torch
from corpus_inputs import Entry
from corpus_recipe import Made, Torch, entry_of, exported, stripped

HERE = Path(__file__).parent
#: Recipes of torch models; each gives a file for each exporter.
TORCH: dict[str, Callable[[], Torch]] = {
    **corpus_text.RECIPES,
    **corpus_sight.RECIPES,
    **corpus_vision.RECIPES,
    **corpus_layers.RECIPES,
}
#: Recipes of other models, and of variants of the models above: their argument is the models by name.
OTHERS: dict[str, Callable[[dict[str, Made]], Made]] = {**corpus_learn.RECIPES, **corpus_forms.RECIPES}
#: The older exporter writes up to five times as many bytes: only the newer one's file of these models is kept.
NEWER = (
    *("albert", "beit", "convnext_v2", "deit", "detr", "dinov2", "gemma3", "mistral", "mobilevit", "qwen3", "rt_detr", "sam"),
    *("segformer", "siglip", "swin_tv", "xcit", "yolos"),
)
PACKAGES = "torch torchvision transformers timm onnx onnxscript onnxruntime onnxconverter-common scikit-learn skl2onnx lightgbm xgboost onnxmltools tensorflow tf2onnx"  # noqa: E501
#: Forbidden content of files: names of folders and of source files.
PATHS = re.compile(rb"/(?:root|home|work|tmp|usr|opt|venv)[/\w.-]*|site-packages|\w+\.py\b")
#: Largest size of a tiny model's file.
LARGEST = 600_000


def wanted(names: list[str]) -> Iterator[tuple[str, Callable[[dict[str, Made]], Made]]]:
    """Yield every requested file by name, with its recipe."""

    def chosen(name: str) -> bool:
        return not names or any(name.startswith(n) for n in names)

    for name, recipe in TORCH.items():
        for exporter in ("script", "dynamo"):
            if chosen(full := f"{name}_{exporter}") and (exporter == "dynamo" or name not in NEWER):
                yield full, lambda made, recipe=recipe, exporter=exporter: by_torch(recipe, exporter)
    for name, other in OTHERS.items():
        if chosen(name):
            yield name, other


class Unwanted(Exception):
    """The exception of a recipe that excludes this exporter."""


def by_torch(recipe: Callable[[], Torch], exporter: str) -> Made:
    """Return a torch model by one exporter."""
    torch.manual_seed(0)
    model = recipe()
    if exporter not in model.exporters:
        raise Unwanted
    torch.manual_seed(1)
    return Made(exported(model, exporter), entry_of(model))


def checked(name: str, made: Made) -> Made:
    """Check that ONNX Runtime runs a file at all its sizes. The outputs must be finite and follow the inputs. The file must not
    name a folder."""
    stripped(made.proto)
    data = made.proto.SerializeToString()
    if found := {m.group().decode() for m in PATHS.finditer(data) if len(m.group()) > 5}:
        raise ValueError(f"names {sorted(found)[:3]}")
    if len(data) > LARGEST:
        raise ValueError(f"has {len(data)} bytes")
    session = onnxruntime.InferenceSession(data, quiet(), providers=["CPUExecutionProvider"])
    entry, rng = Entry(name, made.entry), np.random.default_rng(zlib.crc32(name.encode()))
    for sizes in entry.sizes:
        first, second = (session.run(None, entry.inputs(rng, sizes)) for _ in range(2))
        for port, a in zip(session.get_outputs(), first, strict=True):
            if isinstance(a, np.ndarray) and a.dtype.kind == "f" and not np.isfinite(a).all():
                raise ValueError(f"{port.name} is not finite")
        if all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)):
            raise ValueError("outputs do not follow the inputs")
    return made


def saved(name: str, made: Made) -> None:
    """Write the file, and one with external weights if the entry requires it."""
    path = HERE / "models" / f"{name}.onnx"
    if not made.entry.get("external"):
        onnx.save(made.proto, path)
        return
    path.with_suffix(".data").unlink(missing_ok=True)
    copy = onnx.ModelProto.FromString(made.proto.SerializeToString())
    onnx.save(copy, path, save_as_external_data=True, location=f"{name}.data", size_threshold=256)


def quiet() -> onnxruntime.SessionOptions:
    """Return session options that print errors only."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return options


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = dict[str, str]()
    for name in PACKAGES.split():
        try:
            found[name] = version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return found


def said(problem: BaseException) -> str:
    """Return one line about a failure, without folders."""
    while problem.__cause__ is not None and type(problem).__name__ in ("TorchExportError", "ConversionError"):
        problem = problem.__cause__
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [""]
    line = next((n for n in lines if "Error" in n or "not support" in n), lines[0])
    text = PATHS.sub(b"", f"{type(problem).__name__}: {line}".encode()).decode(errors="replace")
    return re.sub(r"\x1b\[[0-9;]*m|[|`<>*_]", " ", text)[:200].strip()


def written(made: dict[str, Made], failed: dict[str, str]) -> None:
    """Update ``corpus.json`` and ``tried.md`` with the results of this run."""
    path = HERE / "corpus.json"
    old = json.loads(path.read_text()) if path.exists() else {"models": {}, "failed": {}}
    models = {n: e for n, e in old["models"].items() if n not in failed} | {n: m.entry for n, m in made.items()}
    known = {name for name, _ in wanted([])}
    models = {n: e for n, e in sorted(models.items()) if n in known}
    fails = {n: w for n, w in sorted({**old["failed"], **failed}.items()) if n in known and n not in models}
    rows = ",\n".join(f"    {json.dumps(n)}: {json.dumps(e)}" for n, e in models.items())
    whys = ",\n".join(f"    {json.dumps(n)}: {json.dumps(w)}" for n, w in fails.items())
    held = json.dumps(old.get("versions", {}) | versions())
    path.write_text(f'{{\n  "versions": {held},\n  "models": {{\n{rows}\n  }},\n  "failed": {{\n{whys}\n  }}\n}}\n')
    for file in (HERE / "models").iterdir():
        if file.stem not in models:
            file.unlink()
    table = "".join(f"| {n} | {w} |\n" for n, w in fails.items())
    (HERE / "tried.md").write_text(
        "# Tried, and not in the corpus\n\nPrinted by `make.py`: what the exporter, ONNX Runtime or the check said.\n\n"
        f"| model | what was said |\n|---|---|\n{table}"
    )


def main() -> int:
    """Generate the models named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    given = parser.parse_args()
    (HERE / "models").mkdir(exist_ok=True)
    made, failed = dict[str, Made](), dict[str, str]()
    for name, make in wanted(given.names):
        start = time.monotonic()
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                made[name] = checked(name, make(made))
            saved(name, made[name])
            print(f"{name}: {made[name].proto.ByteSize()} bytes, {time.monotonic() - start:.0f} s", flush=True)
        except Unwanted:
            continue
        except Exception as problem:
            failed[name] = said(problem)
            print(f"{name} FAILED: {failed[name]}", file=sys.stderr, flush=True)
    written(made, failed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
