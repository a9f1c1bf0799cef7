"""Writes and checks `manifest.json`: size and digest of every file of a checkpoint or export.

A file system reports a full disk or a lost block, but not a flipped bit or a copy that was cut short: weights with
either load without an error and train or answer worse.
"""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

MANIFEST = "manifest.json"
CHUNK = 1 << 25
"""Bytes that are hashed at a time. A file's digest is the digest of its chunks' digests, so that several threads share
the chunks of one large file."""
DIGEST_BYTES = 16
MOST_THREADS = 8


def write_manifest(folder: Path) -> None:
    """Hash every file under the folder. Call it after the last of them is written."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    entries = {
        file.relative_to(folder).as_posix(): {"bytes": file.stat().st_size, "blake2b": digest}
        for file, digest in zip(files, _hash_files(files), strict=True)
    }
    draft = folder / f".{MANIFEST}.tmp"
    draft.write_text(json.dumps({"chunk": CHUNK, "files": entries}, indent=1), encoding="utf-8")
    draft.replace(folder / MANIFEST)


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def find_problems(folder: Path, file_name: str | None = None) -> list[str]:
    """What is wrong with the files of a folder, or with one of them, by name; nothing where it has no manifest."""
    if not has_manifest(folder):
        return []
    try:
        table = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        entries: Mapping[str, tuple[int, str]] = {
            str(name): (int(entry["bytes"]), str(entry["blake2b"]))
            for name, entry in table["files"].items()
            if file_name in (None, name)
        }
        chunk = int(table["chunk"])
        if chunk < 1:
            raise ValueError(chunk)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return [f"{MANIFEST} cannot be read"]
    found, whole = [], []
    for name, (size, _) in entries.items():
        if not (file := folder / name).is_file():
            found.append(f"{name} is missing")
        elif (there := file.stat().st_size) != size:
            found.append(f"{name} has {there} bytes instead of {size}")
        else:
            whole.append(name)
    try:
        read = _hash_files([folder / name for name in whole], chunk)
    except OSError as error:
        return [*found, f"{error.filename or folder} cannot be read ({error.strerror or error})"]
    pairs = zip(whole, read, strict=True)
    found += [f"{name} is not what was written (its digest differs)" for name, own in pairs if own != entries[name][1]]
    return found


def join_first(found: Sequence[str], most: int = 3) -> str:
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more


def _hash_files(files: Sequence[Path], chunk: int = CHUNK) -> list[str]:
    """Of each file, on several threads: hashing leaves Python's lock alone."""
    parts = [(file, start) for file in files for start in range(0, max(1, file.stat().st_size), chunk)]
    with ThreadPoolExecutor(max(1, min(MOST_THREADS, os.cpu_count() or 1, len(parts))), "paceline-digest") as threads:
        digests = dict.fromkeys(files, b"")
        for (file, _), digest in zip(parts, threads.map(lambda part: _hash_chunk(*part, chunk), parts), strict=True):
            digests[file] += digest
    return [blake2b(digests[file], digest_size=DIGEST_BYTES).hexdigest() for file in files]


def _hash_chunk(file: Path, start: int, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return blake2b(opened.read(size), digest_size=DIGEST_BYTES).digest()
