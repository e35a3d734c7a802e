"""Concurrent filling of constants by threads while the runtime compiles: completely or not at all."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rammer.device.manifest import OpenOptions
from rammer.device.shared_constants import WantedForm, form_of

pytest.importorskip("pyopencl")
from rammer_rocm.backend import OpenClBackend
from rammer_rocm.constants import LINE, SHARE, Array, DeviceConstants
from rammer_rocm.opencl_runtime import import_opencl
from rammer_rocm.plugin import DEVICE

if not DEVICE.probe() or DEVICE.probe()[0].kind != "cpu":
    pytest.skip("no OpenCL unit that is a CPU", allow_module_level=True)


@pytest.fixture
def shared() -> DeviceConstants:
    """Return the constants of a unit without loaded programs."""
    backend = DEVICE.open(OpenOptions())
    assert isinstance(backend, OpenClBackend)
    return backend.constants


def wanted(values: Array, make: Callable[[Array], Array], key: str) -> WantedForm:
    return WantedForm(form_of(values, key, values.nbytes), values, make)


def on_device(shared: DeviceConstants, buffer: object, start: int, nbytes: int) -> Array:
    """Return the bytes that kernels would read."""
    found = np.empty(nbytes, np.uint8)
    import_opencl().enqueue_copy(shared.queue, found, buffer, src_offset=start, is_blocking=True)
    return found


def test_all_forms_are_there_at_the_end(shared: DeviceConstants, rng: np.random.Generator) -> None:
    sizes = [1, 7, LINE // 4, 1000, SHARE // 4 + 3, 5, SHARE // 2]  # several slices, and part of a slice
    values = {f"c{i}": rng.standard_normal(n).astype(np.float32) for i, n in enumerate(sizes)}
    ways = {"as it is": lambda given: given, "turned": lambda given: given[::-1]}
    forms = {(n, key): wanted(v, make, key) for n, v in values.items() for key, make in ways.items()}
    with shared.filling():
        placed = shared.placed(forms)
    assert len(placed.buffers) == 1
    for (name, key), (number, start) in placed.places.items():
        found = on_device(shared, placed.buffers[number - 1], start, values[name].nbytes)
        np.testing.assert_array_equal(found.view(np.float32), ways[key](values[name]))


def test_what_could_not_be_made_is_not_known(shared: DeviceConstants, rng: np.random.Generator) -> None:
    good, bad = (rng.standard_normal(1000).astype(np.float32) for _ in range(2))

    def failing(given: Array) -> Array:
        raise MemoryError("no room for this one")

    kept = None
    with pytest.raises(MemoryError, match="no room"), shared.filling():
        kept = shared.placed({("good", ""): wanted(good, np.negative, "n"), ("bad", ""): wanted(bad, failing, "n")})
    assert kept is not None  # while the buffer is still referenced, the next program gets another
    with shared.filling():
        placed = shared.placed({("good", ""): wanted(good, np.negative, "n"), ("bad", ""): wanted(bad, np.negative, "n")})
    for name, values in (("good", good), ("bad", bad)):
        number, start = placed.places[name, ""]
        np.testing.assert_array_equal(on_device(shared, placed.buffers[number - 1], start, 4000).view(np.float32), -values)
