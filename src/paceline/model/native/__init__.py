"""Our own CPU kernels: `kernels.c`, compiled when first needed and kept."""

import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from shutil import which

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
