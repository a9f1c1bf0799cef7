"""A server that speaks as much of the hub's protocol as downloading a model takes, and refuses when it is told to."""

import hashlib
import json
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as one repository of models or datasets."""

    daemon_threads = True

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.name = folder, name
        self.refuse: Callable[[int], int | None] = lambda number: None
        """The status that the request of this number (from 1) is refused with; None serves it."""
        self.requests: list[str] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if (status := hub.refuse(len(hub.requests))) is not None:
            return self._send(status, b"refused", {})
        files = {str(file.relative_to(hub.folder)): file for file in hub.folder.rglob("*") if file.is_file()}
        for kind, prefix in (("models", ""), ("datasets", "datasets/")):
            if path.startswith(f"/api/{kind}/{hub.name}/tree/"):
                tree = [{"type": "file", "path": n, "size": f.stat().st_size, "oid": COMMIT} for n, f in files.items()]
                return self._send(200, json.dumps(tree).encode(), {"Content-Type": "application/json"})
            if path.startswith(f"/api/{kind}/{hub.name}"):
                about = {"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                about |= {"private": False, "gated": False, "tags": [], "downloads": 0, "likes": 0}
                return self._send(200, json.dumps(about).encode(), {"Content-Type": "application/json"})
            start = f"/{prefix}{hub.name}/resolve/"
            name = path.removeprefix(start).partition("/")[2] if path.startswith(start) else ""
            if name in files:
                body = files[name].read_bytes()
                etag = f'"{hashlib.sha256(body).hexdigest()}"'
                return self._send(200, body, {"ETag": etag, "X-Repo-Commit": COMMIT})
        known = path.startswith(f"/{hub.name}/") or path.startswith(f"/datasets/{hub.name}/")
        self._send(404, b"", {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"})

    do_HEAD = do_GET

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub_of(folder: Path, name: str) -> Generator[Hub]:
    hub = Hub(folder, name)
    threading.Thread(target=hub.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
