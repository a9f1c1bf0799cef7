"""A real HTTP server that speaks OpenAI's API and answers as a test tells it to."""

import json
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = str | int | bytes | tuple[int, dict[str, str]] | dict[str, Any] | None
"""A text; a status, perhaps with headers; raw bytes; a whole message; None hangs until the server ends."""


class JudgeServer:
    """Answers with `answer(body)`, and keeps what it was asked."""

    def __init__(self, answer: Callable[[dict[str, Any]], Answer]) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.keys: list[str | None] = []
        self.most = self._now = 0
        """Requests that were answered at once, at most."""
        self.model_status = 200
        self.first = threading.Event()
        """Set once something was asked."""
        self._lock, self._over = threading.Lock(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.asked]

    @contextmanager
    def running(self) -> Generator["JudgeServer"]:
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:  # /v1/models
                self.reply(owner.model_status, json.dumps({"data": [{"id": "judge"}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner.asked.append(body)
                    owner.times.append(time.monotonic())
                    owner.keys.append(self.headers.get("Authorization"))
                    owner.first.set()
                    owner._now += 1
                    owner.most = max(owner.most, owner._now)
                answer = owner.answer(body)
                with owner._lock:
                    owner._now -= 1
                if answer is None:
                    owner._over.wait(60)
                elif isinstance(answer, bytes):
                    self.reply(200, answer)
                elif isinstance(answer, int):
                    self.reply(answer, b'{"error": {"message": "as told"}}')
                elif isinstance(answer, tuple):
                    self.reply(answer[0], b"{}", answer[1])
                else:
                    choice = answer if isinstance(answer, dict) else {"message": {"content": answer}}
                    self.reply(200, json.dumps({"choices": [{"finish_reason": "stop"} | choice]}).encode())

            def reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                """A client that left is no news here."""

        with Quiet(("127.0.0.1", 0), Handler) as self._server:
            thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self._over.set()
                self._server.shutdown()
                thread.join(10)


@contextmanager
def judge_server(answer: Callable[[dict[str, Any]], Answer] | Answer) -> Generator[JudgeServer]:
    """A server that always says the same, or what a function of the request's body gives."""
    with JudgeServer(answer if callable(answer) else lambda body: answer).running() as server:
        yield server


def in_turn(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    """These answers one after another; the last one from then on."""
    rest = list(answers)
    return lambda body: rest.pop(0) if len(rest) > 1 else rest[0]
