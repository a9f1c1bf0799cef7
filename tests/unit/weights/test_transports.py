"""The laws of weights between two processes: every byte arrives, nothing is left behind, one mark for the same bits."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import paceline
from paceline.errors import RequestError
from paceline.runtime.ray.engines import tensors_in
from paceline.server.service import write_all
from paceline.util.private_folder import PrivateFolder, sweep
from paceline.weights.update import MASK, PIECE_ELEMENTS, STRETCH_ELEMENTS, bits_of, mix_tensor, tensor_sums


class Stingy:
    """A file that takes a few bytes at a time, as one does on a disk that fills up."""

    def __init__(self, at_once: int) -> None:
        self.at_once, self.taken = at_once, bytearray()

    def write(self, data) -> int:
        self.taken += data[: self.at_once]
        return min(self.at_once, len(data))


@given(data=st.binary(max_size=200), at_once=st.integers(1, 50))
def test_every_byte_is_written_however_few_a_file_takes_at_once(data, at_once):
    file = Stingy(at_once)
    write_all(file, data)
    assert bytes(file.taken) == data


def test_every_temporary_folder_is_one_that_is_swept():
    """Others would stay behind after `kill -9`. Unnamed files (`TemporaryFile`) go by themselves."""
    source = Path(paceline.__file__).parent
    makers = re.compile(r"tempfile\.(mkdtemp|mkstemp|TemporaryDirectory|NamedTemporaryFile)\b")
    found = {str(file.relative_to(source)) for file in source.rglob("*.py") if makers.search(file.read_text())}
    assert found == {"util/private_folder.py"}


@pytest.mark.parametrize("parent", ["", "parent"], ids=["temporary", "named"])
def test_what_a_killed_owner_left_is_swept_and_a_living_ones_is_not(tmp_path, monkeypatch, parent):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    where = str(tmp_path) if parent else None
    code = "import sys; from paceline.util.private_folder import PrivateFolder\n"
    code += f"mine = PrivateFolder({where!r}); print(mine.path, flush=True); sys.stdin.read()"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert owner.stdout is not None
    theirs = tmp_path / owner.stdout.readline().strip().rpartition("/")[2]
    (theirs / "1.safetensors").write_bytes(b"weights")
    mine = PrivateFolder(where)
    sweep(where)
    assert (theirs / "1.safetensors").exists()
    owner.send_signal(signal.SIGKILL)
    owner.wait(60)
    owner.stdout.close()
    assert theirs.exists()
    sweep(where)
    assert not theirs.exists()
    assert mine.path.exists()
    assert mine.path.stat().st_mode & 0o777 == 0o700
    mine.close()
    mine.close()
    assert list(tmp_path.iterdir()) == []


@settings(max_examples=20)
@given(
    forms=st.lists(
        st.tuples(
            st.sampled_from([torch.bfloat16, torch.float32, torch.uint8, torch.float16, torch.int64]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=6,
    )
)
def test_tensors_of_a_file_in_memory_are_read_in_place(forms):
    tensors = {
        f"t{i}": torch.arange(torch.Size(shape).numel()).view(shape).to(kind) for i, (kind, shape) in enumerate(forms)
    }
    row = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    found = tensors_in(row)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("data", [b"", b"12345678", b"\x05" + bytes(7) + b"[1,2]", b"\x02" + bytes(7) + b"{]"])
def test_bytes_that_are_no_file_are_refused(data):
    with pytest.raises(RequestError, match="no safetensors file"):
        tensors_in(torch.tensor(list(data), dtype=torch.uint8))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32, torch.uint8])
def test_marks_are_the_plain_sum_however_it_is_cut(kind):
    lengths = [
        0,
        1,
        PIECE_ELEMENTS - 1,
        PIECE_ELEMENTS,
        PIECE_ELEMENTS + 1,
        STRETCH_ELEMENTS,
        STRETCH_ELEMENTS + PIECE_ELEMENTS + 3,
    ]
    tensors = [torch.randint(256, (length,), dtype=torch.uint8).to(kind) for length in lengths]
    plain = [int((bits_of(t).long() * mix_tensor(torch.arange(len(t)))).sum()) & MASK for t in tensors]
    assert tensor_sums(tensors) == plain
    assert [tensor_sums([tensor])[0] for tensor in tensors] == plain
