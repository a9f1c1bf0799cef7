"""Refuses calls from foreign web pages. A browser lets any page send requests to a server on loopback."""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit


def why_foreign(headers: Iterable[tuple[bytes, bytes]], has_key: bool) -> str | None:
    """The reason to refuse a call with these headers, as a sentence, or None.

    A page's own address stands in `Origin`; it must be the one the server was called by. And a page may point a name of
    its own at 127.0.0.1: where no key is asked for, only loopback names are answered to.

    >>> why_foreign([(b"host", b"127.0.0.1:8000")], has_key=False)
    >>> why_foreign([(b"host", b"rebound.example:8000")], has_key=False)
    '`Host` is `rebound.example`: without a key only 127.0.0.1 and localhost are answered to; use those, or set a key'
    >>> why_foreign([(b"host", b"gpu1:8000"), (b"origin", b"https://page.example")], has_key=True)
    'a web page of https://page.example may not call this server'
    """
    given = {name.lower(): value.decode("latin-1") for name, value in headers if name.lower() in (b"host", b"origin")}
    host = given.get(b"host", "")
    name = host_name(host)
    if not has_key and not is_loopback(name):
        return (
            f"`Host` is `{name}`: without a key only 127.0.0.1 and localhost are answered to; use those, or set a key"
        )
    origin = given.get(b"origin")
    if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
        return f"a web page of {origin} may not call this server"
    return None


def host_name(host: str) -> str:
    """The name or address in a `Host` header, without its port."""
    return host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
