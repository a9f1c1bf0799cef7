"""A small reverse proxy as a process of its own: shows a server below a path, with or without taking that path off.

python tests/reverse_proxy.py http://127.0.0.1:8200 /tools/ui --strip
"""

import argparse
import socket

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HOP_BY_HOP = {b"connection", b"keep-alive", b"transfer-encoding", b"host"}


def build_proxy(upstream: str, prefix: str, strip: bool) -> Starlette:
    client = httpx.AsyncClient(base_url=upstream, timeout=240, verify=False)

    async def forward(request: Request) -> Response:
        path = request.url.path
        if not path.startswith(prefix):
            return PlainTextResponse("this path is of another service", 418)
        headers = [(name, value) for name, value in request.headers.raw if name not in HOP_BY_HOP]
        headers.append((b"x-forwarded-host", request.headers["host"].encode()))
        target = (path.removeprefix(prefix) or "/") if strip else path
        asked = client.build_request(
            request.method,
            f"{target}?{request.url.query}" if request.url.query else target,
            headers=headers,
            content=await request.body(),
        )
        answer = await client.send(asked, stream=True)
        relayed = StreamingResponse(answer.aiter_raw(), answer.status_code, background=None)
        relayed.raw_headers = [one for one in answer.headers.raw if one[0].lower() not in HOP_BY_HOP]
        return relayed

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("upstream")
    parser.add_argument("prefix")
    parser.add_argument("--strip", action="store_true")
    known = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        app = build_proxy(known.upstream, known.prefix, known.strip)
        uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off")).run(sockets=[listener])


if __name__ == "__main__":
    main()
