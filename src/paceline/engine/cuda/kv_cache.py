"""GPU memory that can be freed while its addresses stay, so that captured graphs remain valid.

torch frees memory together with its address. CUDA's virtual memory calls keep the two apart: an address range is
reserved once, physical memory is mapped into it and taken away again.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from paceline.errors import EngineError

PINNED_ON_DEVICE = 1
READ_WRITE = 3


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Property(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Bytes:
    """A raw address range, in the form torch wraps without copying."""

    def __init__(self, address: int, size: int, owner: object) -> None:
        described = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None}
        self.__cuda_array_interface__ = described
        self.owner = owner


class CudaVirtualMemory:
    """One tensor whose physical memory comes and goes."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        self._device = torch.device("cuda", device.index or 0)
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._where = _Location(1, self._device.index)
        self._property = _Property(type=PINNED_ON_DEVICE, location=self._where)
        self._address = ctypes.c_uint64()
        self._handle = ctypes.c_uint64()
        self._size = 0
        self._mapped = False
        self._tensor: Tensor | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        step = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(step), ctypes.byref(self._property), 0)
        wanted = torch.Size(shape).numel() * dtype.itemsize
        self._size = -(-wanted // step.value) * step.value
        none = ctypes.c_uint64(0)
        size = ctypes.c_size_t(self._size)
        self._call("cuMemAddressReserve", ctypes.byref(self._address), size, ctypes.c_size_t(0), none, none)
        self._map()
        raw = torch.as_tensor(_Bytes(self._address.value, wanted, self), device=self._device)
        self._tensor = raw.view(dtype).view(shape)
        return self._tensor.zero_()

    def sleep(self) -> None:
        if self._mapped:
            torch.cuda.synchronize(self._device)
            self._call("cuMemUnmap", self._address, ctypes.c_size_t(self._size))
            self._call("cuMemRelease", self._handle)
            self._mapped = False

    def wake(self) -> None:
        torch.cuda.empty_cache()
        self._map()
        assert self._tensor is not None
        self._tensor.zero_()

    def _map(self) -> None:
        size, none = ctypes.c_size_t(self._size), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(self._property), none)
        self._call("cuMemMap", self._address, size, ctypes.c_size_t(0), self._handle, none)
        access = _Access(self._where, READ_WRITE)
        self._call("cuMemSetAccess", self._address, size, ctypes.byref(access), ctypes.c_size_t(1))
        self._mapped = True

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise EngineError(f"the KV cache's memory: {name} failed: {(text.value or b'?').decode()}")
