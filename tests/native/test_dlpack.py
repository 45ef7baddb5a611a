"""What `operands` makes of layouts that DLPack's C exchange can tell and no torch tensor on a CPU has, in a table that
ctypes builds here. test_operands.py and tests/ops/test_row_norm_checks.py ask tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from onetrip.ops import row_norm_native as native
from onetrip.ops.common.backends import native as native_library

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="the native library was not built")

CPU, CUDA = 1, 2
INT, FLOAT, BFLOAT, COMPLEX = 0, 2, 4, 5
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


def operands(x: Any, residual: Any = None, bias: Any = None, weight: Any = None, norm_bias: Any = None) -> Any:
    assert library is not None
    code = library.operands_reader(Layout, Parameter)(x, residual, bias, weight, norm_bias)
    return None if code < 0 else native.decode(code)


def vector(n: int = N, **changes: Any) -> Layout:
    return Layout((n,), **changes)


PLAIN = {
    "contiguous_without_strides": (Layout(),),
    "one_column_of_any_stride": (Layout((2, 1), strides=(1, 77)),),
    "a_card": (Layout(device=(CUDA, 1)), Layout(device=(CUDA, 1)), None, vector(device=(CUDA, 1))),
}
NOT_PLAIN = {
    "rows_overlap": (Layout(strides=(0, 1)),),
    "reversed": (Layout(strides=(N, -1)),),
    "no_rows_without_strides": (Layout((0, N), data=None),),
}
LEFT_TO_THE_CHECKS = {
    "no_memory": (Layout(data=None),),
    "vector_without_memory": (Layout(), None, None, None, vector(data=None)),
    "float8": (Layout(dtype=(FLOAT, 8, 1)),),
    "bfloat32": (Layout(dtype=(BFLOAT, 32, 1)),),
    "int16": (Layout(dtype=(INT, 16, 1)),),
    "complex32": (Layout(dtype=(COMPLEX, 32, 1)),),
    "four_lanes": (Layout(dtype=(FLOAT, 32, 4)),),
    "no_lanes": (Layout(dtype=(FLOAT, 16, 0)),),
    "residual_on_another_card": (Layout(device=(CUDA, 0)), Layout(device=(CUDA, 1))),
    "weight_on_another_kind_of_device": (Layout(device=(CUDA, 0)), None, None, vector(device=(CPU, 0))),
    "residual_of_more_rows": (Layout(), Layout((3, N))),
    "vector_too_short": (Layout(), None, None, vector(N - 1)),
    "vector_of_rows": (Layout((N, 2)), None, vector(N)),
}


@pytest.mark.parametrize("tensors", [pytest.param(tensors, id=name) for name, tensors in PLAIN.items()])
def test_layouts_that_kernels_can_read(tensors):
    assert operands(*tensors)[1]


@pytest.mark.parametrize("tensors", [pytest.param(tensors, id=name) for name, tensors in NOT_PLAIN.items()])
def test_layouts_that_have_to_be_prepared(tensors):
    assert not operands(*tensors)[1]


@pytest.mark.parametrize("tensors", [pytest.param(tensors, id=name) for name, tensors in LEFT_TO_THE_CHECKS.items()])
def test_layouts_that_are_left_to_the_checks(tensors):
    assert operands(*tensors) is None


def test_every_role_tells_its_own_dtype():
    halves = {"float16": (FLOAT, 16, 1), "bfloat16": (BFLOAT, 16, 1)}
    roles = (Layout(), Layout(dtype=halves["float16"]), vector(dtype=halves["bfloat16"]), vector(), None)
    assert operands(*roles)[0] == (torch.float32, torch.float16, torch.bfloat16, torch.float32, None)


class Other(Layout):
    pass


@pytest.mark.parametrize("tensors", [(Other(),), (Layout(), Other()), (Layout(), None, None, 1.0), ([1.0],)])
def test_objects_of_other_types_are_not_asked(tensors):
    assert operands(*tensors) is None


def test_an_error_of_is_neg_is_raised(monkeypatch: pytest.MonkeyPatch):
    def broken(tensor: Layout) -> bool:
        raise LookupError("is_neg")

    monkeypatch.setattr(Layout, "is_neg", broken)
    with pytest.raises(LookupError, match="is_neg"):
        operands(Layout())


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (ExchangeTable(2, 0, None, (ctypes.c_void_p * 3)(), tell, None), NAME),
        (ExchangeTable(0, 9, None, (ctypes.c_void_p * 3)(), tell, None), NAME),
        (ExchangeTable(1, 0, None, (ctypes.c_void_p * 3)(), Reader(), None), NAME),
        (TABLE, b"another_api"),
    ],
    ids=["major_version_2", "major_version_0", "no_function", "another_capsule"],
)
def test_a_table_of_another_kind_is_not_read(table, name, monkeypatch):
    monkeypatch.setattr(Layout, "__dlpack_c_exchange_api__", new_capsule(ctypes.addressof(table), name, None))
    assert library.operands_reader(Layout, Parameter) is None


def test_an_attribute_that_is_no_capsule_is_not_read(monkeypatch):
    monkeypatch.setattr(Layout, "__dlpack_c_exchange_api__", "a string")
    assert library.operands_reader(Layout, Parameter) is None
