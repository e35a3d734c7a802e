"""Length variants for parts of a range: results at each length, with any tiling, in runs, bound calls and files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranged_models import RANGED, RangedModel, parsed

import rammer
from rammer.compiled.artifact import save_artifact
from rammer.compiled.segments import Compiled, ProgramSegment
from rammer.compiler.length_variants import priced_at, split_span
from rammer.device.manifest import Binding, Loaded
from rammer.ir.operator import ROperator
from rammer.ir.program import RProgram
from rammer.runtime.executable import Executable
from rammer_testing.nonempty import some
from rammer_testing.peer_process import PeerSession

OPTIONS = {"ipu_sim": {"tiles": "16"}}


def drawn(device: str, model: RangedModel, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> Executable:
    """Return the model as one program on a device that requests three length variants. Each variant has other tilings than the
    one before."""
    exe = rammer.compile(model.proto, device, shapes=model.spans, options=OPTIONS.get(device))
    exe.lengths = replace(exe.lengths, buckets=1)
    backend = exe.backend
    seen, first = dict[tuple[float, ...], int](), int(rng.integers(4))

    def recast(operator: ROperator, binding: Binding, within: float) -> ROperator:
        found = list(backend.candidates(replace(operator, tile=(), family="", config=()), binding)[:4])
        return found[(first + seen.setdefault(binding.parts, len(seen))) % len(found)]

    def load_case(program: RProgram, constants: Mapping[str, Any], first: Loaded) -> Loaded:
        return backend.load(program, constants)

    for name, value in {"cases": 3, "retile_for": recast, "load_case": load_case}.items():
        monkeypatch.setattr(backend, name, value, raising=False)
    return exe


def saved(exe: Executable, compiled: Compiled, path: Path) -> Executable:
    """Return the program, read from a file."""
    save_artifact(path, exe.artifact(compiled))
    return rammer.compile(path)


@pytest.mark.slow
@pytest.mark.sampled(1, of="device")
@pytest.mark.parametrize("device", ["ipu_sim", "rocm"])
@pytest.mark.parametrize("name", ["residual", "windows", "causal", "cache"])
def test_every_case_is_right(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Compare with ONNX Runtime at the ends of all parts: by runs, a bound call, and a file's program."""
    model = RANGED[name](rng)
    exe, reference = drawn(device, model, monkeypatch, rng), PeerSession(model.proto)
    ((symbol, span),) = model.spans.items()
    lengths = [int(n) for n in rng.permutation([n for part in split_span(span, 3) for n in part])]
    longest = model.inputs({symbol: span[1]}, rng)
    bound = exe.bind(longest)
    runs: list[Executable] = [exe]
    for length in some(lengths):
        inputs = model.inputs({symbol: length}, rng)
        expected = dict(zip([o.name for o in reference.get_outputs()], reference.run(None, inputs), strict=True))
        if len(runs) == 1:
            exe.run(inputs)
            (special,) = [s for s in exe.cache.values() if s.compiled.ranged is not None and s.loaded][-1:]
            runs.append(saved(exe, special.compiled, tmp_path / "it.rammer"))
        bound.write(inputs)
        bound.run(**{symbol: length})
        for got in (*(r.run(inputs) for r in runs), bound.to_host()):
            for output, value in expected.items():
                np.testing.assert_allclose(got[output], value, 1e-4, 1e-5, err_msg=f"{output} at {length}")
    cases = [s.cases for special in some(exe.cache.values()) for s in special.compiled.segments if isinstance(s, ProgramSegment)]
    assert name != "residual" or any(c is not None for c in cases)
    bound.close()
    for run in runs:
        run.close()


def test_operators_that_are_alike_are_asked_about_once(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Check one request for each part; equal operators get the first one's answer."""
    lines = "".join(f"a{i} = MatMul({f'h{i - 1}' if i else 'x'}, w{i})  h{i} = Softmax<axis = 0>(a{i})  " for i in range(5))
    weights = {f"w{i}": rng.standard_normal((8, 8)).astype(np.float32) for i in range(5)}
    model = RangedModel(parsed(f"layers (float[seq, 8] x) => (float[seq, 8] h4) {{ {lines} }}", **weights), {"seq": (1, 60)})
    exe = drawn("ipu_sim", model, monkeypatch, rng)
    recast, asked = exe.backend.retile_for, list[str]()  # type: ignore[attr-defined]

    def counted(operator: ROperator, binding: Binding, within: float) -> Any:
        asked.append(binding.key(operator))
        return recast(operator, binding, within)

    monkeypatch.setattr(exe.backend, "retile_for", counted)
    exe.prepare(model.inputs({"seq": 60}, rng))
    (segment,) = next(iter(exe.cache.values())).compiled.segments
    assert isinstance(segment, ProgramSegment) and segment.cases is not None
    assert len(set(asked)) == len(asked) < 3 * sum(bool(o.lengths) for o in segment.program.operators)
    for table in some(segment.cases.tables):
        found, binding = dict[str, set[object]](), Binding.of(table, segment.constants)
        for o, first in zip(table.operators, segment.program.operators, strict=True):
            found.setdefault(binding.key(replace(first, tile=(), family="", config=())), set()).add((o.tile, o.family, o.config))
        assert all(len(forms) == 1 for forms in found.values())
    exe.close()


def test_parts_of_a_range(rng: np.random.Generator) -> None:
    """Check that they cover the range, each length once, in parts of similar size."""
    for _ in range(200):
        low = int(rng.integers(0, 50))
        span, count = (low, low + int(rng.integers(1, 600))), int(rng.integers(1, 9))
        parts = split_span(span, count)
        assert [n for low, high in parts for n in range(low, high + 1)] == list(range(span[0], span[1] + 1))
        sizes = [high - low + 1 for low, high in some(parts)]
        assert len(parts) <= count and max(sizes) <= 2 * ((span[1] - span[0] + 1) // count) + 2, parts
        assert all(0 < p <= 1 for part in parts for p in some(priced_at(part, span[1])))
