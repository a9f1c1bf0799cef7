"""Laws of the recording address: agents are told a host they can connect to, whatever the server listens on."""

import asyncio
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from paceline.rollout import RecordingServer
from paceline.rollout.recording import reachable_host


def has(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as door:
            door.bind((host, 0))
    except OSError:
        return False
    return True


async def told(*args) -> tuple[str, int]:
    """The host of a seat's address, and what is answered there: 200, for the seat is still taken."""
    recorder = RecordingServer(*args)
    try:
        url = await recorder.address("actor")
        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.get(f"{url}/models")
        return urlsplit(url).hostname or "", answer.status_code
    finally:
        await recorder.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "", "::1", "::", "localhost"])
def test_the_address_agents_are_told_answers(host):
    if not has(host):
        pytest.skip("this machine has no IPv6")
    seen, status = asyncio.run(told(host))
    assert status == 200
    assert seen not in ("0.0.0.0", "::", "")
    assert seen == reachable_host(host)
    if host in ("127.0.0.1", "::1", "localhost"):
        assert seen == host


def test_a_host_of_the_users_own_is_told_instead():
    assert asyncio.run(told("0.0.0.0", 0, "localhost")) == ("localhost", 200)


def test_without_a_network_everywhere_is_reached_at_home(monkeypatch):
    def unreachable(*args):
        raise OSError("network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    assert [reachable_host(host) for host in ("0.0.0.0", "", "::")] == ["127.0.0.1", "127.0.0.1", "::1"]
    assert reachable_host("box.example") == "box.example"
