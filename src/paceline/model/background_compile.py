"""Compiles layers in another process while this one goes on uncompiled.

torch keeps compiled kernels in a folder on disk, found again by what was compiled. A worker process compiles a few
layers of the same shape, which fills that folder; this process then switches to compiled code in a few seconds instead
of half a minute, between two steps. A later run of the same shape finds the folder filled and starts compiled.
"""

import contextlib
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn

from paceline.util.child_process import WITH_PARENT
from paceline.util.gc_tuning import freeze_new_objects

SWITCH_SECONDS = 10.0
"""Cost of a switch to compiled code: a pause for tracing and, in the engine, for capturing graphs."""
CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"

log = logging.getLogger(__name__)


def compile_cache() -> Path:
    """The folder torch keeps compiled code in: the user's cache, where no reboot empties it, unless the variable names
    another. Sets the variable, which torch reads when it first compiles."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "compiled"
    return Path(os.environ.setdefault(CACHE_VARIABLE, str(default)))


def has_cached_code() -> bool:
    return any(compile_cache().glob("paceline-*"))


class BackgroundCompile:
    """One part's way to compiled code: waiting -> compiling -> ready -> used, or failed and never again.

    `command` starts the worker, which gets `spec` as JSON on its standard input and prints a line for each piece it has
    compiled. `gain` is the share of the part's time that compiled code saves.
    """

    def __init__(self, part: str, command: Sequence[str], spec: dict[str, Any], gain: float) -> None:
        self.part = part
        self._command, self._spec, self._gain = list(command), spec, gain
        self._marker = compile_cache() / f"paceline-{part}-{_digest(spec)}"
        self._state = "waiting"
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_cached(self) -> bool:
        """Whether an earlier run left this very code on disk, so that compiling at the start takes seconds."""
        return self._marker.is_file()

    @property
    def is_compiling(self) -> bool:
        return self._state == "compiling"

    @property
    def is_ready(self) -> bool:
        return self._state == "ready"

    def consider(self, seconds: float, steps: int, remaining: int | None) -> None:
        """Start compiling once what it saves is more than what the switch costs.

        `seconds` is the part's time over `steps` uncompiled steps; `remaining` steps are still to come. Where that is
        not known, as much again is expected as there was so far.
        """
        if self._state != "waiting" or not steps:
            return
        expected = seconds if remaining is None else seconds / steps * remaining
        if self._gain * expected > SWITCH_SECONDS:
            self.start()

    def start(self) -> None:
        """Begin; where another process has made the code meanwhile it is ready at once."""
        if self.is_cached:
            self._state = "ready"
            return
        self._state = "compiling"
        errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the worker's, until it has ended
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {WITH_PARENT: str(os.getpid())},
                start_new_session=True,  # Ctrl-C is for the run, which then ends the worker
            )
        except OSError as error:
            errors.close()
            self._fail(str(error))
            return
        followed = (self._process, errors)
        threading.Thread(target=self._follow, args=followed, name="paceline-compile", daemon=True).start()

    def mark_switched(self) -> None:
        """The part runs compiled code from now on."""
        if self._state != "used":
            self._state = "used"
            freeze_new_objects()
            log.warning("the %s runs compiled code from here on", self.part)

    def write_marker(self) -> None:
        """Leave a mark for later runs: this code is on disk now."""
        self._marker.parent.mkdir(parents=True, exist_ok=True)
        self._marker.touch()

    def close(self) -> None:
        """End the worker, whatever it has reached."""
        self._state = "used"
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    def _follow(self, process: "subprocess.Popen[str]", errors: IO[str]) -> None:
        """Hand over the spec, show progress, and wait for the end. On a thread of its own."""
        goes_on = "decoding" if self.part == "engine" else "training"
        log.warning("compiling the %s in the background; %s goes on uncompiled", self.part, goes_on)
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:  # the exit code tells
            json.dump(self._spec | {"marker": str(self._marker)}, pipe)
        for line in process.stdout:
            log.warning("compiling the %s, %s; %s goes on uncompiled", self.part, line.strip(), goes_on)
        code = process.wait()  # bounded: its output has ended
        with errors:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
        if self._state != "compiling":
            return  # closed meanwhile
        if code == 0:
            self.write_marker()
            self._state = "ready"
        else:
            self._fail(lines[-1] if lines else f"exit code {code}")

    def _fail(self, why: str) -> None:
        self._state = "failed"
        log.warning("the %s could not be compiled in the background and stays uncompiled: %s", self.part, why)


def _digest(spec: dict[str, Any]) -> str:
    """Names compiled code by all it depends on: the shape, the settings, the libraries and the GPU."""
    libraries = {name: _version(name) for name in ("torch", "triton", "transformers", "peft", "paceline")}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    text = json.dumps([spec, libraries, gpu], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return sys.modules[name].__version__ if name in sys.modules else ""


KEPT = 0.9
"""Share of its activations a compiled layer keeps. At 0.9 it drops what one pointwise pass brings back: a third."""


def compile_blocks(decoder: nn.Module, retain_graph: bool = False) -> None:
    """Compile one layer, for any number of tokens, and let all layers run that code.

    The layers differ only in their weights and their number, which is not baked in. The whole model in one piece would
    be a few percent faster and take a minute at every start.

    `retain_graph`: one forward pass may have several backward passes, so none may write over its inputs.
    """
    compile_cache()
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)  # float32 is meant where it is used
    number_layers(decoder)
    # The compiler's settings belong to this thread in torch 2.13 and to the process in 2.11: engine and trainer set the
    # same ones, or one would compile with the other's and not find its code on disk.
    # A float that is no constant reaches the graph as a tensor of the CPU, and with it a C++ kernel, for which torch
    # first tries out what this CPU can do: 45 s on an H200's host, and the layer is traced twice.
    torch._dynamo.config.specialize_float = True  # ty: ignore[invalid-assignment]
    torch._dynamo.config.recompile_limit = 64  # ty: ignore[invalid-assignment]
    torch._functorch.config.activation_memory_budget = KEPT
    if retain_graph:
        torch._functorch.config.donated_buffer = False  # ty: ignore[invalid-assignment]
    for child in decoder.children():
        for block in child if isinstance(child, nn.ModuleList) else [child]:
            if not isinstance(block, nn.Embedding):
                block.compile(dynamic=True)


def number_layers(decoder: nn.Module) -> None:
    """Make each layer's number a tensor on the host. Compiled code takes a plain number for a constant, and one layer's
    code would not do for the next."""
    for module in decoder.modules():
        if isinstance(number := getattr(module, "layer_idx", None), int):
            module.layer_idx = torch.tensor(number)
