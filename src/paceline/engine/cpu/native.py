"""Our own CPU kernels: `kernels.c`, compiled when first needed and kept, and installed in a model's layers.

They are installed in place; names, parameters and results stay.
"""

import ctypes
import hashlib
import inspect
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from shutil import which
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from paceline.errors import PacelineError
from paceline.model.adapters import SlotLinear
from paceline.util.private_folder import PrivateFolder

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", "-Wall")

_SIZE, _POINTER, _FLOAT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_float
_SIGNATURES = {
    "paceline_linear": [_POINTER] * 4 + [_SIZE] * 3,
    "paceline_linear_half": [_POINTER] * 6 + [_SIZE] * 3,
    "paceline_attend": [_POINTER] * 6 + [_SIZE] * 6 + [_FLOAT],
    "paceline_keep": [_POINTER] * 6 + [_SIZE] * 3,
    "paceline_norm": [_POINTER] * 3 + [_SIZE] * 2 + [_FLOAT] * 2,
    "paceline_gate": [_POINTER] * 2 + [_SIZE],
}


@cache
def kernels() -> ctypes.CDLL | None:
    """The kernels, or None where they would not help or cannot be built: torch does everything then."""
    compiler = which("cc") or which("gcc") or which("clang")
    if platform.machine() != "aarch64" or sys.platform != "linux" or compiler is None:
        return None
    try:
        library = _build(compiler)
        _share_threads()
        loaded = ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError):
        return None
    for name, arguments in _SIGNATURES.items():
        if hasattr(loaded, name):
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, None
    return loaded


def has_half_products() -> bool:
    """Whether this machine can multiply in float16."""
    library = kernels()
    return library is not None and hasattr(library, "paceline_linear_half")


def _build(compiler: str) -> Path:
    """Compile into the user's cache, under a name that changes with the source, the flags and the machine."""
    parts = (SOURCE.read_bytes(), " ".join(FLAGS).encode(), compiler.encode(), _cpu())
    name = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"
    library = folder / f"kernels-{name}.so"
    if not library.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with PrivateFolder(folder) as scratch:
            fresh = scratch / "kernels.so"
            command = [compiler, *FLAGS, str(SOURCE), "-lm", "-o", str(fresh)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            fresh.replace(library)  # whole or not at all: another process may be building it too
    return library


def _cpu() -> bytes:
    """The CPU facts that `-march=native` depends on: a home folder may be shared by different machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(("CPU part", "CPU impl", "Features"))})).encode()


def _share_threads() -> None:
    """Let the kernels find the OpenMP that torch has loaded: two pools of threads would fight for the cores."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line}
    for library in mapped:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)


MOST_HEADS = 256
"""Query heads that the kernel has room for."""


def has_kernel(keys: Tensor, values: Tensor, heads: int) -> bool:
    """Whether there is a kernel for a cache like this, [slots, length, kv heads, dim], under so many query heads."""
    if kernels() is None or not keys.is_cpu or keys.dtype != torch.float32 or keys.shape != values.shape:
        return False
    return heads <= MOST_HEADS and keys.shape[3] % 16 == 0


def attend(
    keys: Tensor, values: Tensor, q: Tensor, slots: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """The query of row r, [heads, dim], stands at `positions[r]` of slot `slots[r]` and sees itself and all before."""
    library = kernels()
    assert library is not None
    q = q.contiguous()
    out = torch.empty_like(q)
    rows, heads, dim = q.shape
    pointers = (t.data_ptr() for t in (q, keys, values, out, slots, positions))
    library.paceline_attend(*pointers, rows, heads, keys.shape[2], dim, keys.shape[1], window or 0, scale)
    return out


def write_cache(keys: Tensor, values: Tensor, k: Tensor, v: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Put new keys and values, [rows, kv heads, dim], into their places."""
    library = kernels()
    assert library is not None
    k, v = k.contiguous(), v.contiguous()
    pointers = (t.data_ptr() for t in (k, v, keys, values, slots, positions))
    library.paceline_keep(*pointers, len(k), keys.shape[1], keys.shape[2] * keys.shape[3])


Products = Literal["exact", "half"]

FEW_ROWS = 32
"""Rows up to which the exact kernel beats BLAS."""
SMALL_WEIGHT = 1 << 16
"""Numbers in a weight below which calling the kernel costs more than it saves."""


def install(model: PreTrainedModel, products: Products = "exact") -> "list[NativeLinear]":
    """Use the kernels wherever they compute what the layer computes; nothing happens where they do not exist. Returns
    the products, which must be refreshed when the weights change."""
    usable = model.device.type == "cpu" and model.dtype == torch.float32
    if products == "half" and not (usable and has_half_products()):
        raise PacelineError(
            'engine.products = "half" needs a float32 model on a 64-bit ARM Linux machine with float16 '
            'arithmetic and a C compiler: leave it at "exact" here'
        )
    library = kernels()
    if library is None or not usable:
        return []
    made: list[NativeLinear] = []
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.numel() >= SMALL_WEIGHT:
            kind = HalfLinear if products == "half" else NativeLinear
            made.append(kind(library, module.weight, module.bias))
            # A layer with adapters beside it asks for its base alone.
            setattr(module, "base_forward" if isinstance(module, SlotLinear) else "forward", made[-1])
    for module in model.modules():
        for candidate in (*norm_candidates(library, module), *gate_candidates(library, module)):
            if candidate.agrees(module):
                module.forward = candidate.forward
                break
    return made


class NativeLinear:
    """x @ weight.T + bias in float32."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._run = library.paceline_linear
        self._weight, self._bias = weight, bias
        self._n, self._k = weight.shape

    def refresh(self) -> None:
        """The weights changed: make anew what was made from them."""

    def __call__(self, input: Tensor) -> Tensor:
        rows = input.numel() // self._k
        if not 1 < rows <= FEW_ROWS:
            return F.linear(input, self._weight, self._bias)
        x = input.contiguous()
        out = torch.empty((*x.shape[:-1], self._n))
        bias = None if self._bias is None else self._bias.data_ptr()
        self._run(x.data_ptr(), self._weight.data_ptr(), bias, out.data_ptr(), rows, self._n, self._k)
        return out


class HalfLinear(NativeLinear):
    """The same with both sides in float16 and the sums in float32, from a float16 copy of the weight."""

    def __init__(self, library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(library, weight, bias)
        self._run = library.paceline_linear_half
        self._wide = -(-self._k // 8) * 8
        self._copy = torch.zeros(-(-self._n // 4), self._wide // 8, 4, 8, dtype=torch.float16)
        self.refresh()

    def refresh(self) -> None:
        """Four rows interleaved, eight numbers of each in turn, as the kernel reads them."""
        rows = F.pad(self._weight.detach(), (0, self._wide - self._k, 0, -self._n % 4))
        self._copy.copy_(rows.view(-1, 4, self._wide // 8, 8).transpose(1, 2))

    def __call__(self, input: Tensor) -> Tensor:
        x = input.contiguous()
        rows = x.numel() // self._k
        out = torch.empty((*x.shape[:-1], self._n))
        small, scales = _scratch.take(-(-rows // 4) * 4, self._wide)
        bias = None if self._bias is None else self._bias.data_ptr()
        self._run(x.data_ptr(), self._copy.data_ptr(), bias, out.data_ptr(), small, scales, rows, self._n, self._k)
        return out


class _Scratch(threading.local):
    """Room for a rounded x and its scales, kept from call to call."""

    def __init__(self) -> None:
        self._numbers, self._scales = torch.empty(0, dtype=torch.float16), torch.empty(0)

    def take(self, rows: int, width: int) -> tuple[int, int]:
        if rows * width > self._numbers.numel():
            self._numbers = torch.empty(rows * width, dtype=torch.float16)
        if rows > self._scales.numel():
            self._scales = torch.empty(rows)
        return self._numbers.data_ptr(), self._scales.data_ptr()


_scratch = _Scratch()


# -- between the products: tried on random numbers first, because the same name may mean another formula ---------------


class Candidate(NamedTuple):
    """A forward pass that may be a module's own."""

    width: int
    forward: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def agrees(self, module: nn.Module) -> bool:
        noise = torch.randn(6, self.width, generator=torch.Generator().manual_seed(1))
        x = (noise * torch.tensor([1e-3, 0.1, 1.0, 3.0, 10.0, 100.0])[:, None])[None]
        theirs, ours = module(x), self.forward(x)
        return torch.allclose(theirs, ours, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def norm_candidates(library: ctypes.CDLL, module: nn.Module) -> list[Candidate]:
    """Root mean square norms, times the weight or, as in Gemma, times one plus the weight."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(epsilon, float):
        return []
    if len(inspect.signature(type(module).forward).parameters) != 2:
        return []  # some are gated by a second argument
    dim = weight.shape[-1]

    def norm(offset: float, x: Tensor) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        pointers = (t.data_ptr() for t in (x, weight, out))
        library.paceline_norm(*pointers, x.numel() // dim, dim, epsilon, offset)
        return out

    return [Candidate(dim, partial(norm, offset)) for offset in (0.0, 1.0)]


def gate_candidates(library: ctypes.CDLL, module: nn.Module) -> list[Candidate]:
    """down(silu(gate(x)) * up(x))"""
    parts = dict(module.named_children())
    if parts.keys() != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return []
    first, second, last = parts["gate_proj"], parts["up_proj"], parts["down_proj"]
    if not isinstance(first, nn.Linear):
        return []

    def forward(x: Tensor) -> Tensor:
        gate, up = first(x), second(x)
        library.paceline_gate(gate.data_ptr(), up.data_ptr(), gate.numel())
        return last(gate)

    return [Candidate(first.in_features, forward)]
