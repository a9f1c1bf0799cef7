"""Runs a worker process: one JSON line in, "loaded" and one JSON line out, until its parent is gone.

Run by `workers.py`, as a file, with its settings as an argument. The pipes move away from stdin and stdout before any
user code runs, so that it may print, read and close what it likes.
"""

import ctypes
import json
import os
import queue
import resource
import signal
import sys
import threading
from typing import Any, BinaryIO

PR_SET_PDEATHSIG = 1


def main() -> None:
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    settings = json.loads(sys.argv.pop())
    sys.path[:] = settings["path"]
    if settings["memory_mb"] is not None:
        size = settings["memory_mb"] << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    # The reading thread sees the pipe close, unless native code holds the interpreter's lock.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(requests, lines), daemon=True).start()
    while True:
        line = lines.get()  # unbounded: a worker without work waits for some; without a parent it is killed
        for answer in handle_request(json.loads(line), settings["bytes"]):
            answers.write(answer + b"\n")
            answers.flush()


def read_requests(requests: BinaryIO, lines: "queue.SimpleQueue[bytes]") -> None:
    """Queue the requests. When the parent is gone, kill this process group."""
    for line in requests:
        lines.put(line)
    os.killpg(0, signal.SIGKILL)


def handle_request(request: dict[str, Any], most: int) -> Any:
    """The lines that answer a request. Running out of memory ends the process, as do `sys.exit` and `os._exit`."""
    from paceline.util.importing import import_object  # the parent's path is known only now

    try:
        function = import_object(request["function"])
        yield b'{"loaded": true}'
        value = function(*request["args"])
        answer = json.dumps({"value": value}).encode()
    except MemoryError:
        os._exit(137)
    except Exception as error:  # the caller gets it
        answer = json.dumps({"raised": f"{type(error).__name__}: {str(error)[:500]}"}).encode()
    yield answer if len(answer) <= most else b'{"too_large": true}'


if __name__ == "__main__":
    main()
