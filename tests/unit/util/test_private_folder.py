"""Sockets' folders: whatever `TMPDIR` is, what is put into it fits into a socket's address, or a sentence says so."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from paceline.errors import PacelineError
from paceline.util import private_folder
from paceline.util.private_folder import RAY_BYTES, shorten_ray_sockets, socket_parent


@pytest.fixture(params=[1, 40, 90, 150])
def temporary(request, tmp_path_factory, monkeypatch) -> Path:
    """`TMPDIR` with this many more characters in its path."""
    folder = tmp_path_factory.mktemp("t") / ("x" * request.param)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.mark.parametrize("name", ["s", "trainer.sock", "x" * 60])
def test_a_socket_can_be_bound_whatever_the_length_of_tmpdir(temporary, name):
    parent = socket_parent(len(f"/paceline-12345678/{name}"))
    with tempfile.TemporaryDirectory(prefix="paceline-", dir=parent) as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/{name}")


def test_ray_gets_another_folder_only_where_its_own_is_too_long(temporary, monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    shorten_ray_sockets()
    fits = len(os.fsencode(temporary)) + RAY_BYTES <= private_folder.LONGEST_PATH
    assert ("RAY_TMPDIR" in os.environ) is not fits
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    shorten_ray_sockets()
    assert os.environ["RAY_TMPDIR"] == "/elsewhere"


def test_no_folder_that_is_short_enough_is_one_sentence(temporary, monkeypatch):
    monkeypatch.setattr(private_folder, "OTHER_FOLDERS", ())
    with pytest.raises(PacelineError, match=r"set TMPDIR to a writable folder of at most 3 bytes"):
        socket_parent(100)
