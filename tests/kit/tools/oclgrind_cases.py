"""Random cases on rocm's GPU path, run by ``oclgrind.py``.

A case is a line. It is an operator with a candidate, in the format of ``rammer_testing.families``, or a whole model with random
tiles. A model's line has its name after ``kit:``, precision and layout, and the seed of its weights, inputs and tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import separate

from rammer.compile_options import CompileOptions
from rammer.device.manifest import Binding
from rammer.errors import RammerError
from rammer.fusion.tile_search import candidates
from rammer.ir.operator import ROperator
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.cases import NetCase, Sampler, pick_of, picked
from rammer_testing.conformance import Subject, reference, relative_error
from rammer_testing.coverage import features
from rammer_testing.search import Search
from rammer_testing.single import check, subjects, trial_of
from rammer_testing.small_models import MODELS, SmallModel

from rammer_rocm.backend import OpenClBackend

#: Allowed error, by precision.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2}
PRECISIONS = tuple(TOLERANCES)
#: Maximum products of an operator, and the fraction of cases that are operators.
WORK, SINGLE = 12_000, 0.6
#: Tiles to draw from, and the fraction of them with a random extent.
TILES, CUT = 24, 0.6
#: Patterns missing from the kit's models: maps before a product, attention, long sums, transposed operands, dilated windows.
MORE = (
    SmallModel(
        "prologue",
        """(float[7,48] x, float[48] w_s, float[48] w_b, float[48,21] w_m) => (float[7,21] y) {
        n = LayerNormalization<axis=-1>(x, w_s, w_b)
        e = Erf(n)
        y = MatMul(e, w_m)
    }""",
    ),
    SmallModel(
        "attention",
        """(float[2,9,6] q, float[2,11,6] k, float[2,11,6] v) => (float[2,9,6] y) {
        t = Transpose<perm=[0,2,1]>(k)
        s = MatMul(q, t)
        p = Softmax<axis=-1>(s)
        y = MatMul(p, v)
    }""",
    ),
    SmallModel(
        "deep",
        """(float[3,900] x, float[900,5] w_m) => (float[3,5] y) {
        y = MatMul(x, w_m)
    }""",
    ),
    SmallModel(
        "layers",
        """(float[5,19] x, float[19,23] w_a, float[23,7] w_b) => (float[5,7] y) {
        a = MatMul(x, w_a)
        r = Relu(a)
        y = MatMul(r, w_b)
    }""",
    ),
    SmallModel(
        "dilated",
        """(float[1,4,11,9] x, float[6,2,3,2] w_k) => (float[1,6,6,9] y) {
        y = Conv<group=2, dilations=[2,1], strides=[1,1], pads=[0,1,-1,0]>(x, w_k)
    }""".replace("-1,0]", "0,0]").replace("float[1,6,6,9] y", "float[1,6,7,9] y"),
    ),
)
ALL = {**MODELS, **{m.name: m for m in MORE}}


class Runner:
    """The runner of cases on the OpenCL unit that ``oclgrind.py`` selected. Single operators run only with ``poisoned``: they are
    checked by remaining NaNs in memory, which Oclgrind treats as values."""

    def __init__(self, poisoned: bool) -> None:
        separate.install()
        options = {"executor": "waves"}
        self.device, self.poisoned = Subject("rocm", options=options), poisoned
        self.search = Search("rocm", options, 1)
        self.covered: Counter[str] = Counter()
        self.random = Random(0)
        self.expect_gpu()
        OpenClBackend.candidates = lambda _, operator, binding: self.tiles(operator, binding)  # type: ignore[method-assign]

    def expect_gpu(self) -> None:
        """Raise an error unless kernels are those of a GPU."""
        backend: Any = self.device.backend
        if backend.vdevice.threads == 1 or backend.single or "Oclgrind" not in backend.hardware.name:
            raise RuntimeError(f"{backend.hardware.name} is not a simulated GPU")

    def draw(self, random: Random) -> str:
        """Return a random case as a line."""
        while self.poisoned and random.random() < SINGLE:
            case = Sampler(random, WORK, PRECISIONS).next()
            number, subject = random.choice(list(enumerate(subjects(case, self.search.backend))))
            for tiled in self.search.candidates(subject, random):
                return str(replace(case, operator=number, pick=pick_of(tiled)))
        precision = random.choice(("float32", "float32", "float16"))
        layout = random.choice(("keep", "keep", "nhwc"))
        return f"kit:{random.choice(list(ALL))} @{precision} layout={layout} seed={random.randrange(1, 10**6)}"

    def tiles(self, operator: ROperator, binding: Binding) -> Sequence[ROperator]:
        """Return one of the likely tiles, often with another extent along some axes."""
        likely = candidates(operator, binding, self.device.backend.vdevice, TILES)
        if not likely:
            return []
        chosen = self.random.choice(likely)
        tile = [t if self.random.random() > CUT else self.random.randint(1, t) for t in chosen.tile]
        self.covered["operators"] += 1
        self.covered["partial"] += any(a.extent % t for a, t in zip(operator.anchor.axes, tile, strict=True))
        return [replace(chosen, tile=tuple(tile))]

    def run(self, case: str) -> str:
        """Return a description of wrong values of a case, or ""."""
        try:
            return self.model(case) if case.startswith("kit:") else self.single(NetCase.parse(case))
        except RammerError as problem:
            return f"{type(problem).__name__}: {problem}"

    def single(self, case: NetCase) -> str:
        """Run one operator with one candidate."""
        for subject in subjects(case, self.search.backend):
            tiled = picked(subject.operator, case.pick)
            if self.search.possible(tiled, subject):
                self.covered.update(["operators", f"@{case.precision}", *features(tiled, subject)])
                return check(self.search.backend, tiled, trial_of(subject, case.seed, case.late))
        return ""

    def model(self, case: str) -> str:
        """Run a model twice on new inputs of every shape."""
        name, *words = case.removeprefix("kit:").split()
        found = dict(w.split("=") for w in words if "=" in w)
        precision = next((w[1:] for w in words if w.startswith("@")), "float32")
        seed, model = int(found.get("seed", 1)), ALL[name]
        self.random, rng = Random(seed), np.random.default_rng(seed)
        options = CompileOptions(precision=precision, layout=found.get("layout", "keep"))
        source = open_source(model.build(rng))
        exe = Executable(source, self.device.backend, "rocm", options, self.device.registry, store=KernelStore(None))
        self.covered[f"@{precision}"] += 1
        try:
            for shape in model.shapes:
                for _ in range(2):
                    inputs = model.inputs(rng, shape)
                    special = exe.prepare(exe.checked(inputs))
                    have, _ = special.run(inputs)
                    self.covered["launches"] += special.kernels
                    for port, want in reference(special.compiled, inputs).items():
                        error = relative_error(have[port], want.astype(have[port].dtype))
                        if not error <= TOLERANCES[precision]:
                            return f"output {port!r} has relative L2 error {error:.1e}"
        finally:
            exe.close()
        return ""
