"""The oracle: a Verdict on one case on one device, compared with three reference implementations."""

from __future__ import annotations

import importlib
import re
import traceback
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from onnx import ModelProto

from rammer.compile_options import CompileOptions
from rammer.device.loader import Registry
from rammer.device.manifest import Backend
from rammer.errors import BadInput, RammerError
from rammer.frontend.read.node_protos import attribute_value
from rammer.frontend.read.reader import read_model
from rammer.frontend.spec_rulings.operator_questions import Use
from rammer.frontend.spec_rulings.rulings import Voice, find_decision
from rammer.ir.types import SHORT, TensorType
from rammer.jit.onnx_source import open_source
from rammer.runtime.executable import Executable
from rammer.runtime.shape_buckets import Lengths
from rammer.tuning.kernel_store import KernelStore
from rammer_testing.graphs.call_forms import FORMS
from rammer_testing.graphs.case import Array, GraphCase
from rammer_testing.graphs.outside import Outside
from rammer_testing.graphs.perturbed_reference import Expected, tracker
from rammer_testing.operators.draw import schema_of

Outputs: TypeAlias = "Mapping[str, Array]"
#: Outcomes that are not faults of rammer.
GOOD: Final = ("ok", "refused", "voice")


@dataclass(frozen=True)
class Setting:
    """The device and options of a run."""

    device: str
    policy: str = "wavefront"
    layout: str = "keep"
    precision: str = "float32"
    options: tuple[tuple[str, str], ...] = ()
    form: str = "run"

    def __str__(self) -> str:
        parts = [self.device, self.policy, self.layout, self.precision, *(f"{k}={v}" for k, v in self.options)]
        parts += [self.form] if self.form != "run" else []
        return " ".join(parts)


@dataclass(frozen=True)
class Verdict:
    """The verdict on one case.

    - ``ok``.
    - ``refused``: BadInput on a valid model, with the reason.
    - ``device``: the device differs from rammer's evaluation.
    - ``lowering``: rammer's evaluation differs from all other references used.
    - ``internal``: an error that the user did not cause.
    - ``traceback``.
    - ``evaluator``: rammer's evaluation fails.
    - ``voice``: one of two other references is alone, which is not a fault of rammer."""

    kind: str
    site: str = ""
    detail: str = ""
    told: float = 1.0
    voices: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """True if the verdict is not a fault."""
        return self.kind in GOOD

    @property
    def key(self) -> tuple[str, str]:
        """The properties that stay fixed while a fault is shrunk."""
        return self.kind, self.site


@dataclass(frozen=True)
class Module:
    """An entry point for a plugin that is on the path but not installed."""

    name: str

    def load(self) -> Any:
        """Import and return the module."""
        return importlib.import_module(self.name)


def registry_of(modules: tuple[str, ...]) -> Registry:
    """Return a registry of the installed plugins, or of these modules only."""
    return Registry([Module(m) for m in modules]) if modules else Registry()


@dataclass
class Judge:
    """The judge of cases, which opens every device once. ``voices`` False compares the device with rammer's evaluation only."""

    registry: Registry = field(default_factory=Registry)
    voices: bool = True
    outside: Outside = field(default_factory=Outside)
    backends: dict[tuple[str, tuple[tuple[str, str], ...]], Backend] = field(default_factory=dict)

    def backend(self, setting: Setting) -> Backend:
        """Return the opened device of ``setting``."""
        key = setting.device, setting.options
        if key not in self.backends:
            self.backends[key] = self.registry.open(setting.device, options=dict(setting.options))
        return self.backends[key]

    def __call__(self, case: GraphCase, setting: Setting) -> Verdict:
        """Run and compare a case. Never raises exceptions of the code under test."""
        model = case.model()
        try:
            have = self.run(model, case.inputs, setting)
        except BadInput as error:
            return Verdict("refused", normalised(error.what), str(error))
        except RammerError as error:
            return Verdict("internal", f"{type(error).__name__}: {normalised(error.what)}", str(error))
        except Exception as error:  # any escaped exception is a fault to shrink
            return Verdict("traceback", _site(error), "".join(traceback.format_exception(error)[-6:]))
        return self.compared(case, have, setting)

    def compared(self, case: GraphCase, have: Outputs, setting: Setting) -> Verdict:
        """Compare the outputs of a device with all references."""
        try:
            return self._compared(case, have, setting, 3)
        except Exception as error:
            return Verdict("evaluator", _site(error), "".join(traceback.format_exception(error)[-6:]))

    def run(self, model: ModelProto, inputs: Mapping[str, Array], setting: Setting) -> dict[str, Array]:
        """Run the model on the device and return its outputs, without the user's cache."""
        options = CompileOptions(setting.policy, precision=setting.precision, layout=setting.layout)

        def compile_model(model: ModelProto, ranges: Mapping[str, tuple[int, int]]) -> Executable:
            source, device = open_source(model), self.backend(setting)
            lengths = Lengths.of(source.head.inputs, ranges)
            store = KernelStore(None)
            return Executable(source, device, setting.device, options, self.registry, store=store, lengths=lengths)

        return FORMS[setting.form](compile_model, model, inputs)

    def _compared(self, case: GraphCase, have: Outputs, setting: Setting, trajectories: int) -> Verdict:
        narrow = setting.precision == "float16"
        rng = np.random.default_rng(len(case.nodes))
        apart = case.unfolded()
        ours = tracker(
            read_model(apart.model()),
            apart.inputs,
            rng,
            narrow=narrow,
            trajectories=trajectories,
            amplified=8.0 if trajectories == 3 else 32.0,
        )
        expected = ours.run(apart.inputs)
        found = _first(have, expected)
        if not found and self.voices and not narrow:
            others = expected
            if trajectories > 3:
                others = replace(ours, rng=np.random.default_rng(1), coarse=True).run(apart.inputs)
            verdict = self._other_voices(case, {n: e.widened() for n, e in others.items()})
            found = "" if verdict.kind == "ok" else verdict.detail
        else:
            verdict = Verdict("device" if found else "ok", "", found)
        if found and trajectories == 3:
            # Three trajectories can miss a near tie, which is not a fault: repeat with more trajectories.
            return self._compared(case, have, setting, 24)
        told = [e.told for e in expected.values()]
        return replace(verdict, told=sum(told) / max(len(told), 1))

    def _other_voices(self, case: GraphCase, expected: Mapping[str, Expected]) -> Verdict:
        """Compare rammer's evaluation with ONNX Runtime; if that is unavailable or differs, also with the reference."""
        plain = case.plain()
        said = dict[Voice, str]()
        made = None
        if trusted("onnxruntime", plain):
            made = self.outside(plain.model().SerializeToString(), plain.inputs, plain.outputs)
        if made is not None:
            said["onnxruntime"] = _first(dict(zip(plain.outputs, made, strict=True)), expected)
            if not said["onnxruntime"]:
                return Verdict("ok", voices=("onnxruntime",))
        reference = reference_outputs(plain) if trusted("reference", plain) else None
        if reference is not None:
            said["reference"] = _first(reference, expected)
        if any(said.values()):  # some decisions on references depend on computed values
            known = computed(plain)
            said = {v: text for v, text in said.items() if not text or trusted(v, plain, known)}
        if not any(said.values()):
            return Verdict("ok", voices=tuple(said))
        detail = "; ".join(f"{v} {'agrees' if not text else 'says: ' + text}" for v, text in said.items())
        kind = "lowering" if all(said.values()) else "voice"
        return Verdict(kind, "", detail, voices=tuple(said))


def _first(have: Outputs, expected: Mapping[str, Expected]) -> str:
    """Return the first output that differs, and the difference; "" if all agree."""
    for name, value in expected.items():
        text = value.differs(np.asarray(have[name])) if name in have else "missing"
        if text:
            return f"{name}: {text}"
    return ""


def computed(case: GraphCase) -> dict[str, Array]:
    """Return every value of ``case`` by rammer's evaluation; {} if it fails."""
    every = replace(case, outputs=tuple(o for c in case.nodes for o in c.outputs if o))
    try:
        made = tracker(read_model(every.model()), case.inputs, np.random.default_rng(0), trajectories=1).run(case.inputs)
    except Exception:  # it evaluates more than the outputs need
        return {}
    return {n: e.value for n, e in made.items()}


def trusted(voice: Voice, case: GraphCase, made: Outputs | None = None) -> bool:
    """Return True if no operator of ``case`` has a recorded error of ``voice``; ``made`` holds the intermediate values."""
    given = {**case.inputs, **case.constants}
    known = {**(made or {}), **given}
    types = {n: TensorType(str(a.dtype), a.shape) for n, a in given.items()}
    kinds = {v.name: v.type.tensor_type for v in case_types(case)}
    for name, kind in kinds.items():
        dtype = _name(kind.elem_type)
        if dtype in SHORT:
            types[name] = TensorType(dtype, tuple(d.dim_value for d in kind.shape.dim))
    for call in case.nodes:
        schema = schema_of(call.op, case.opset)
        attributes = {a.name: attribute_value(a) for a in call.proto().attribute}
        use = Use(
            call.op,
            schema.since_version if schema else 1,
            attributes,
            [types.get(n) for n in call.inputs],
            [bool(o) for o in call.outputs],
            [known.get(n) for n in call.inputs],
        )
        if find_decision(voice, use):
            return False
    return True


def case_types(case: GraphCase) -> list[Any]:
    """Return the types that ONNX infers for all values."""
    graph = case.inferred().graph
    return [*graph.value_info, *graph.output]


def _name(code: int) -> str:
    from rammer.frontend.read.node_protos import element_type

    return element_type(code)


def reference_outputs(case: GraphCase) -> dict[str, Array] | None:
    """Return the outputs of ``onnx.reference``, or None if it fails."""
    from onnx.reference import ReferenceEvaluator

    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            values = ReferenceEvaluator(_named(case.model())).run(None, dict(case.inputs))
        return {n: np.asarray(v) for n, v in zip(case.outputs, values, strict=True)}
    except Exception:  # it raises any exception of NumPy
        return None


def _named(model: ModelProto) -> ModelProto:
    """Return ``model`` with a name for every omitted output. The reference stores omitted outputs under "" and reads that entry
    for the next omitted optional input."""
    for place, node in enumerate(model.graph.node):
        for index, name in enumerate(node.output):
            node.output[index] = name or f"unused_{place}_{index}"
    return model


def normalised(text: str) -> str:
    """Return a message without model-specific names and numbers."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = re.sub(r"'[^']*'", "'..'", line)
    line = re.sub(r"\b[gvxcsk]\d+\w*\b", "N", line)
    return re.sub(r"\d+", "#", line)[:140]


def _site(error: BaseException) -> str:
    """Return the exception and the last line of rammer that it passed."""
    passed = traceback.extract_tb(error.__traceback__)
    frames = [f for f in passed if "rammer" in Path(f.filename).parts or "rammer_" in f.filename]
    where = f"{Path(frames[-1].filename).stem}.{frames[-1].name}" if frames else "?"
    return f"{type(error).__name__} in {where}: {normalised(str(error))[:80]}"
