"""Chooses a folder whose path is short enough for Unix sockets.

The kernel limits a socket's path to 107 bytes (103 on macOS), and `TMPDIR` may be longer than that by itself.
"""

import os
import tempfile

from paceline.errors import PacelineError

LONGEST_PATH = 103
OTHER_FOLDERS = ("/tmp", "/var/tmp")
"""Tried when the path of `TMPDIR` is too long."""
RAY_BYTES = len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""What Ray appends to its temporary folder."""


def socket_parent(more_bytes: int) -> str:
    """A writable temporary folder under which a path of `more_bytes` more bytes may be a socket's."""
    folders = (tempfile.gettempdir(), *OTHER_FOLDERS)
    for folder in folders:
        if len(os.fsencode(folder)) + more_bytes <= LONGEST_PATH and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise PacelineError(
        f"no temporary folder has a path short enough for a Unix socket (tried {', '.join(dict.fromkeys(folders))}): "
        f"set TMPDIR to a writable folder of at most {LONGEST_PATH - more_bytes} bytes"
    )


def shorten_ray_sockets() -> None:
    """Let Ray put its sockets where their paths are short enough. `RAY_TMPDIR` wins if it is set."""
    if "RAY_TMPDIR" not in os.environ and (folder := socket_parent(RAY_BYTES)) != tempfile.gettempdir():
        os.environ["RAY_TMPDIR"] = folder
