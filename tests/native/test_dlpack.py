"""What `operands` makes of layouts that DLPack's C exchange can tell and no torch tensor on a CPU has, in a table that
ctypes builds here. test_operands.py and tests/ops/test_row_norm_checks.py ask tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
from onetrip.ops import row_norm_native as native
from onetrip.ops.common.backends import native as native_library

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")

CPU, CUDA = 1, 2
INT, FLOAT = 0, 2
N = 8


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("n_dims", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Reader = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))


class ExchangeTable(ctypes.Structure):
    _fields_ = (
        ("major_version", ctypes.c_uint32),
        ("minor_version", ctypes.c_uint32),
        ("older", ctypes.c_void_p),
        ("others", ctypes.c_void_p * 3),
        ("tensor_from_object", Reader),
        ("current_work_stream", ctypes.c_void_p),
    )


def array(values: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


@dataclass
class Layout:
    """A tensor to the library: what the table's function says of it."""

    sizes: tuple[int, ...] = (2, N)
    strides: tuple[int, ...] | None = None
    dtype: tuple[int, int, int] = (FLOAT, 32, 1)
    device: tuple[int, int] = (CPU, 0)
    data: int | None = 64
    kept: list[Any] = field(default_factory=list)

    def is_neg(self) -> bool:
        return False


class Parameter(Layout):
    pass


@Reader
def tell(tensor: Layout, to: Any) -> int:
    sizes, strides = array(tensor.sizes), None if tensor.strides is None else array(tensor.strides)
    tensor.kept += [sizes, strides]
    to[0] = DLTensor(tensor.data, *tensor.device, len(tensor.sizes), *tensor.dtype, sizes, strides, 0)
    return 0


TABLE = ExchangeTable(1, 0, None, (ctypes.c_void_p * 3)(), tell, None)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
NAME = b"dlpack_exchange_api"
Layout.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(TABLE), NAME, None)  # type: ignore[attr-defined]


def operands(*tensors: Any) -> bool | None:
    """Whether kernels can read them as they are; None where they are left to the checks."""
    assert library is not None
    code = library.operands_reader(Layout, Parameter)(*tensors, *(None,) * (5 - len(tensors)))
    return None if code < 0 else native.decode(code)[1]


def vector(n: int = N, **changes: Any) -> Layout:
    return Layout((n,), **changes)


LAYOUTS: dict[str, tuple[bool | None, tuple[Layout | None, ...]]] = {
    "contiguous_without_strides": (True, (Layout(),)),
    "one_column_of_any_stride": (True, (Layout((2, 1), strides=(1, 77)),)),
    "a_card": (True, (Layout(device=(CUDA, 1)), Layout(device=(CUDA, 1)), None, vector(device=(CUDA, 1)))),
    "rows_overlap": (False, (Layout(strides=(0, 1)),)),
    "reversed": (False, (Layout(strides=(N, -1)),)),
    "no_rows_without_strides": (False, (Layout((0, N), data=None),)),
    "no_memory": (None, (Layout(data=None),)),
    "vector_without_memory": (None, (Layout(), None, None, None, vector(data=None))),
    "float8": (None, (Layout(dtype=(FLOAT, 8, 1)),)),
    "int16": (None, (Layout(dtype=(INT, 16, 1)),)),
    "four_lanes": (None, (Layout(dtype=(FLOAT, 32, 4)),)),
    "residual_on_another_card": (None, (Layout(device=(CUDA, 0)), Layout(device=(CUDA, 1)))),
    "weight_on_another_kind_of_device": (None, (Layout(device=(CUDA, 0)), None, None, vector(device=(CPU, 0)))),
}


@pytest.mark.parametrize(("readable", "tensors"), LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(readable, tensors):
    assert operands(*tensors) is readable


def test_an_error_of_is_neg_is_raised(monkeypatch: pytest.MonkeyPatch):
    def broken(tensor: Layout) -> bool:
        raise LookupError("is_neg")

    monkeypatch.setattr(Layout, "is_neg", broken)
    with pytest.raises(LookupError, match="is_neg"):
        operands(Layout())


OTHER_TABLES = {
    "major_version_2": ExchangeTable(2, 0, None, (ctypes.c_void_p * 3)(), tell, None),
    "major_version_0": ExchangeTable(0, 9, None, (ctypes.c_void_p * 3)(), tell, None),
    "no_function": ExchangeTable(1, 0, None, (ctypes.c_void_p * 3)(), Reader(), None),
}
ATTRIBUTES = {name: new_capsule(ctypes.addressof(table), NAME, None) for name, table in OTHER_TABLES.items()}
ATTRIBUTES |= {"another_capsule": new_capsule(ctypes.addressof(TABLE), b"another_api", None), "no_capsule": "a string"}


@pytest.mark.parametrize("attribute", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_a_table_of_another_kind_is_not_read(attribute, monkeypatch):
    monkeypatch.setattr(Layout, "__dlpack_c_exchange_api__", attribute)
    assert library.operands_reader(Layout, Parameter) is None
