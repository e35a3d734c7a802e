"""OrtValue: an array on the host or on a device, and OrtDevice, the place of one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from rammer.device.arrays import Array, dtype_of, host_view, on_host, shape_of
from rammer.device.loader import Registry
from rammer.device.manifest import Backend, Device
from rammer.errors import RammerError
from rammer.ir.formats import numpy_type, to_carrier
from rammer.ir.port import onnx_element
from rammer.onnxruntime_api.providers import working_units

#: Element types by ONNX's numbers (``TensorProto.DataType``).
ELEMENTS: Final = (
    *("undefined", "float32", "uint8", "int8", "uint16", "int16", "int32", "int64", "string", "bool", "float16", "float64"),
    *("uint32", "uint64", "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "uint4", "int4", "float4_e2m1fn", "float8_e8m0fnu", "uint2", "int2", "float6_e2m3fn", "float6_e3m2fn"),
)
#: The name of host memory.
HOST: Final = "cpu"


@lru_cache
def _opened(spec: str) -> Backend:
    """Return the device on which values are allocated, opened once."""
    return Registry().open(spec)


class OrtDevice:
    """A place for values: ``cpu`` for host memory, or the name and index of a device."""

    def __init__(self, name: str, index: int) -> None:
        self._name, self._index = name, index

    @staticmethod
    def make(ort_device_name: str, device_id: int = 0, vendor_id: int = -1) -> OrtDevice:
        """Return the place with this name. Raises Exception for a name that is not an installed device's."""
        name = ort_device_name.lower()
        if name != HOST and not isinstance(Registry().devices.get(name), Device):
            raise Exception(f"Unsupported device type: {ort_device_name}")
        return OrtDevice(name, device_id)

    def device_type(self) -> str:
        """Return the name of the place."""
        return self._name

    def device_id(self) -> int:
        """Return the index of the unit."""
        return self._index

    @property
    def is_host(self) -> bool:
        """True for host memory."""
        return self._name == HOST

    def place(self, values: Array) -> Any:
        """Return ``values`` on the device: an array that its programs use in place. Raises RuntimeError if the device does not
        work here."""
        if self.is_host:
            return values
        try:
            return _opened(f"{self._name}:{self._index}").device_array(values)
        except RammerError as problem:
            raise RuntimeError(f"Can't allocate memory on the device: {problem}") from problem

    def fetch(self, array: Any) -> Array:
        """Return an array of the place as NumPy's: the array itself if it is one, else a copy."""
        return array if isinstance(array, np.ndarray) else _opened(f"{self._name}:{self._index}").host_array(array)


class OrtValue:
    """An array with its element type and place. A value from a NumPy array on the host shares its memory."""

    def __init__(self, array: Any, device: OrtDevice | None = None) -> None:
        self._array, self._device = array, device or OrtDevice(HOST, 0)

    @staticmethod
    def ortvalue_from_numpy(numpy_obj: Any, /, device_type: str = HOST, device_id: int = 0, vendor_id: int = -1) -> OrtValue:
        """Return a value of an array: the array itself on the host, a copy on a device."""
        device = OrtDevice.make(device_type, device_id)
        return OrtValue(device.place(np.asarray(numpy_obj)), device)

    @staticmethod
    def ortvalue_from_numpy_with_onnx_type(data: Array, /, onnx_element_type: int) -> OrtValue:
        """Return a value in the memory of ``data``, with an ONNX element type of the same size."""
        return OrtValue(data.view(_numpy_type(onnx_element_type)))

    @staticmethod
    def ortvalue_from_shape_and_type(
        shape: Sequence[int], element_type: Any, device_type: str = HOST, device_id: int = 0, vendor_id: int = -1
    ) -> OrtValue:
        """Return a value of zeros. ``element_type`` is NumPy's type, or the number of ONNX's."""
        device = OrtDevice.make(device_type, device_id)
        return OrtValue(device.place(np.zeros(tuple(shape), _numpy_type(element_type))), device)

    @staticmethod
    def from_dlpack(data: Any, /) -> OrtValue:
        """Return a value in the memory of another library's array."""
        if on_host(data):
            return OrtValue(host_view("the array", data))
        name = next((unit.device for unit in working_units() if unit.kind == "gpu"), "gpu")
        return OrtValue(data, OrtDevice(name, int(data.__dlpack_device__()[1])))

    @property
    def array(self) -> Any:
        """The array: NumPy's on the host, another library's on a device."""
        return self._array

    def data_ptr(self) -> int:
        """Return the address of the first element."""
        if isinstance(self._array, np.ndarray):
            return int(self._array.ctypes.data)
        return int(self._array.__cuda_array_interface__["data"][0])

    def device_name(self) -> str:
        """Return the name of the place, for example ``cpu``."""
        return self._device.device_type()

    def shape(self) -> list[int]:
        """Return the number of elements per axis."""
        return list(shape_of(self._array))

    def data_type(self) -> str:
        """Return ONNX's text of the type, for example ``tensor(float)``."""
        kind = dtype_of(self._array)
        return f"tensor({'string' if kind == 'object' else onnx_element(kind)})"

    def element_type(self) -> int:
        """Return the number of ONNX's element type."""
        return ELEMENTS.index("string" if (kind := dtype_of(self._array)) == "object" else kind)

    def tensor_size_in_bytes(self) -> int:
        """Return the size in bytes."""
        return int(np.prod(self.shape(), dtype=np.int64)) * numpy_type(dtype_of(self._array)).itemsize

    def has_value(self) -> bool:
        """Return True: the value is not an empty optional."""
        return True

    def is_tensor(self) -> bool:
        """Return True: values are tensors."""
        return True

    def is_sparse_tensor(self) -> bool:
        """Return False: values are dense."""
        return False

    def is_tensor_sequence(self) -> bool:
        """Return False: values are tensors."""
        return False

    def numpy(self) -> Array:
        """Return the elements: the array itself on the host, a copy from a device."""
        return self._device.fetch(self._array)

    def update_inplace(self, data: Any) -> None:
        """Copy an array of the same size and type into the memory of the value."""
        given = np.asarray(data)
        if given.nbytes != self.tensor_size_in_bytes() or dtype_of(given) != dtype_of(self._array):
            raise RuntimeError("The input size of numpy arrays does not match the size of the OrtValue.")
        if isinstance(self._array, np.ndarray):
            np.copyto(self._array, given.reshape(self._array.shape))
        else:
            self._array[...] = self._device.place(given.reshape(self.shape()))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self._array.__dlpack__(stream=stream, **options)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, index = self._array.__dlpack_device__()
        return int(kind), int(index)


def _numpy_type(element: Any) -> Any:
    """Return NumPy's type for NumPy's own or for the number of ONNX's."""
    if not isinstance(element, int):
        return np.dtype(element)
    return np.dtype(object) if ELEMENTS[element] == "string" else numpy_type(ELEMENTS[element])


def memory_at(address: int, shape: Sequence[int], element_type: Any, device: OrtDevice) -> Any:
    """Return the array at an address on the host or on a device, which must stay valid while it is bound."""
    kind, extents = _numpy_type(element_type), tuple(int(n) for n in shape)
    size = int(np.prod(extents, dtype=np.int64)) * kind.itemsize
    if not device.is_host:
        return _DeviceMemory(address, extents, kind)
    import ctypes

    whole = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)
    return whole.view(to_carrier(np.empty(0, kind)).dtype).view(kind).reshape(extents)


class _DeviceMemory:
    """Memory on a device at a fixed address, by the interface that libraries exchange."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.shape, self.dtype = shape, dtype
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": to_carrier(np.empty(0, dtype)).dtype.str,
            "data": (address, False),
            "version": 3,
        }
