"""The kinds of files to change, and the use of each changed file: one class per kind."""

from __future__ import annotations

import random
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from onnx import ModelProto, numpy_helper, parser

from rammer_testing.cache_files import entries, store
from rammer_testing.graphs.generate import graph
from rammer_testing.mutants import change
from rammer_testing.sandbox import Machinery, caged
from rammer_testing.small_models import MODELS

Words = list[str]
#: Files next to a mutant: inputs and outputs of its run. Then the folder in which valid files are created.
INPUTS, OUTPUTS, SEED = "in.npz", "out.npz", "seed"


@dataclass(frozen=True)
class Seed:
    """A valid file: its bytes, its model, the remaining cache files, and the outputs of a run."""

    data: bytes
    model: bytes = b""
    cache: tuple[tuple[str, bytes], ...] = ()
    outputs: bytes = b""


@dataclass(frozen=True)
class Way:
    """A way to change a file, with its ``share`` of the mutants. A ``free`` change yields a file that a user could have intended:
    it may compute anything, but safely. Any other mutant that runs must compute the results of the valid file."""

    name: str
    change: Callable[[random.Random, bytes], bytes]
    share: int = 1
    free: bool = False


class Kind(ABC):
    """A kind of file. ``ways`` change its bytes; ``place`` writes them into a folder and returns the command to run."""

    name: ClassVar[str]
    #: True if a damaged file must be discarded (exit code 0 and the right outputs) rather than refused.
    forgiving: ClassVar[bool] = False
    #: True if references judge the outputs of a run, rather than the outputs of the valid file.
    voiced: ClassVar[bool] = False
    ways: ClassVar[Sequence[Way]]

    def __init__(self, device: Sequence[str]) -> None:
        self.device = list(device)

    @abstractmethod
    def seeds(self, folder: Path, rng: random.Random) -> list[Seed]:
        """Create and return valid files in ``folder``."""

    @abstractmethod
    def place(self, folder: Path, seed: Seed, data: bytes, rng: random.Random) -> Words:
        """Return the words of a command that uses ``data``."""

    def made(self, folder: Path, words: Sequence[object], model: bytes, compiled: bytes = b"") -> bytes:
        """Return the outputs of a valid run in ``folder/seed``, which holds the model, the compiled file and the cache."""
        place = folder / SEED
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "m.onnx").write_bytes(model)
        if compiled:
            (place / "m.rammer").write_bytes(compiled)
        end = caged(words, place, self.device)
        if end.code or end.fault:
            raise Machinery(f"a valid file fails: {end.fault or f'exit code {end.code}'}", hint=end.err.strip())
        return (place / OUTPUTS).read_bytes() if (place / OUTPUTS).exists() else b""


class Models(Kind):
    """ONNX files: the small models and random graphs of all operators."""

    name = "model"
    voiced = True
    ways = (Way("bytes", change.bytes_changed), Way("fields", change.proto_changed, 4))

    def seeds(self, folder: Path, rng: random.Random) -> list[Seed]:
        number = rng.randrange(1 << 20)
        drawn = [case.model() for i in range(60) if (case := graph(number, i)) is not None]
        return [Seed(m.SerializeToString()) for m in (*_small(rng), *drawn)]

    def place(self, folder: Path, seed: Seed, data: bytes, rng: random.Random) -> Words:
        path = folder / "m.onnx"
        path.write_bytes(data)
        if rng.random() < 0.1:
            return ["inspect", str(path), *self.device, "--stage", rng.choice(("program", "source"))]
        return ["run", str(path), *self.device, "--save-inputs", str(folder / INPUTS), "--save-outputs", str(folder / OUTPUTS)]


class CompiledFiles(Kind):
    """Files written by ``rammer compile -o``: some with machine code, which an untrusted run ignores, some with two variants, and
    one with its weights in the model's file."""

    name = "compiled"
    ways: ClassVar[Sequence[Way]] = (
        Way("bytes", change.bytes_changed),
        Way("members", change.zip_changed),
        Way("members, new digest", change.sealed_changed, 3, free=True),
    )
    #: Options of the compilation, of which each valid file has one.
    compiled: ClassVar[Sequence[Words]] = ([], ["--target", "here"], ["--target", "here", "--target", "here"])

    def seeds(self, folder: Path, rng: random.Random) -> list[Seed]:
        seeds = [self._seed(folder, m.SerializeToString(), rng.choice(self.compiled)) for m in _small(rng)]
        return [*seeds, self._seed(folder, _large(rng).SerializeToString(), ["--weights", "external"])]

    def _seed(self, folder: Path, model: bytes, options: Words) -> Seed:
        place = folder / SEED
        self.made(folder, ["compile", place / "m.onnx", *self.device, *options, "-o", place / "m.rammer"], model)
        data = (place / "m.rammer").read_bytes()
        outputs = self.made(folder, self.place(place, Seed(data, model), data, random.Random(0)), model, data)
        return Seed(data, model, outputs=outputs)

    def place(self, folder: Path, seed: Seed, data: bytes, rng: random.Random) -> Words:
        path = folder / "m.rammer"
        path.write_bytes(data)
        (folder / "m.onnx").write_bytes(seed.model)
        return ["run", str(path), "--save-outputs", str(folder / OUTPUTS)]


class SignedFiles(CompiledFiles):
    """Compiled files with machine code and a signature. With the key, every changed file must be refused."""

    name = "signed"
    ways = (
        Way("bytes", change.bytes_changed),
        Way("members", change.zip_changed),
        Way("members, new digest", change.sealed_changed),
    )

    def _seed(self, folder: Path, model: bytes, options: Words) -> Seed:
        folder.mkdir(parents=True, exist_ok=True)
        private, _ = make_keys()
        (folder / "key.pem").write_bytes(private)
        return super()._seed(folder, model, [*options, "--sign", str(folder / "key.pem")])

    def place(self, folder: Path, seed: Seed, data: bytes, rng: random.Random) -> Words:
        _, public = make_keys()
        (folder.parent / "key.pub").write_bytes(public)  # a seed's own folder is emptied before the run
        return [*super().place(folder, seed, data, rng), "--trust-key", str(folder.parent / "key.pub")]


def make_keys() -> tuple[bytes, bytes]:
    """Return a private and a public key in PEM form: the same in every process, so that a failure can be repeated."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    form, key = serialization.Encoding.PEM, Ed25519PrivateKey.from_private_bytes(b"rammer mutants".ljust(32))
    private = key.private_bytes(form, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, key.public_key().public_bytes(form, serialization.PublicFormat.SubjectPublicKeyInfo)


class Kept(Kind):
    """Programs in the program cache."""

    name = "kept"
    forgiving = True
    ways: ClassVar[Sequence[Way]] = (
        Way("bytes", change.bytes_changed),
        Way("members", change.zip_changed),
        Way("members, new digest", change.sealed_changed, 2, free=True),
    )
    entry: ClassVar[str] = "programs"
    tune: ClassVar[Words] = []

    def seeds(self, folder: Path, rng: random.Random) -> list[Seed]:
        return [self._seed(folder, m.SerializeToString()) for m in _small(rng)]

    def _seed(self, folder: Path, model: bytes) -> Seed:
        words = ["run", folder / SEED / "m.onnx", *self.device, *self.tune, "--save-outputs", folder / SEED / OUTPUTS]
        outputs, cache = self.made(folder, words, model), folder / SEED / "cache"
        own = entries(cache, self.entry)[0]
        others = [p for p in cache.rglob("*") if p.is_file() and p != own]
        named = [(str(p.relative_to(cache)), p.read_bytes()) for p in (own, *others)]
        return Seed(own.read_bytes(), model, tuple(named), outputs)

    def place(self, folder: Path, seed: Seed, data: bytes, rng: random.Random) -> Words:
        (folder / "m.onnx").write_bytes(seed.model)
        for number, (name, content) in enumerate(seed.cache):
            path = folder / "cache" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if number else data)
            if not number and data.startswith(SEALED):
                store(path, data.removeprefix(SEALED).decode("utf-8", "replace"))
        return ["run", str(folder / "m.onnx"), *self.device, *self.tune, "--save-outputs", str(folder / OUTPUTS)]


#: Marks a changed content of a cache entry that gets a valid checksum.
SEALED = b"sealed\n"


def _content_changed(rng: random.Random, data: bytes) -> bytes:
    """Return a changed JSON content of a cache entry, to be stored with a valid checksum."""
    return SEALED + change.json_changed(rng, data.partition(b"\n")[2].decode()).encode("utf-8", "surrogatepass")


class Stores(Kept):
    """Measurements of tuned kernels."""

    name = "store"
    # An entry selects the best of the device's own kernels: the numbers must not depend on it.
    ways = (Way("bytes", change.bytes_changed), Way("content", _content_changed, 3))
    entry = "tuned"
    tune: ClassVar[Words] = ["--tune", "quick"]


class Heads(Kept):
    """Cached descriptions of models' ports."""

    name = "head"
    ways = (Way("bytes", change.bytes_changed), Way("text", lambda rng, data: change.text_changed(rng, data.decode()).encode()))
    entry = "heads"


KINDS: dict[str, type[Kind]] = {k.name: k for k in (Models, CompiledFiles, SignedFiles, Stores, Kept, Heads)}


def same_outputs(folder: Path, seed: Seed) -> bool:
    """Return True if the run in ``folder`` wrote the outputs of the unchanged file, except for another kernel's rounding."""
    path = folder / "want.npz"
    path.write_bytes(seed.outputs)
    with np.load(path) as want, np.load(folder / OUTPUTS) as have:
        return set(want.files) == set(have.files) and all(
            np.allclose(have[n], want[n], rtol=1e-4, atol=1e-5, equal_nan=True) for n in want.files
        )


def _small(rng: random.Random) -> list[ModelProto]:
    """Return the small models of static shapes, with random weights."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    return [m.build(numbers) for m in MODELS.values() if m.shapes == ({},)]


def _large(rng: random.Random) -> ModelProto:
    """Return a model with a weight that is large enough to stay in the model's file."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    made = parser.parse_model(
        """<ir_version: 9, opset_import: ["": 21]> large (float[2,160] x) => (float[2,160] y) { c = MatMul(x, w) y = Relu(c) }"""
    )
    made.graph.initializer.append(numpy_helper.from_array(numbers.standard_normal((160, 160)).astype(np.float32), "w"))
    return made
