"""Weights broadcast between real processes: the same bits in every process, and no long wait for a lost one."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch

from child_processes import Launched
from paceline.errors import EngineError
from paceline.model import fingerprint
from paceline.weights.broadcast import Receiver, Sender, layout_of

pytestmark = pytest.mark.skipif(os.environ.get("PACELINE_SCALE") != "1", reason="takes half a minute: `make scale`")
SECONDS = 120.0
"""For processes to come together; a lost one is known at once by its connection."""
RECEIVER = """
import json, sys
from paceline.errors import EngineError
from paceline.weights.broadcast import Receiver
from paceline.model import fingerprint
invitation = json.loads(sys.stdin.readline())
receiver = Receiver(**invitation)
receiver.form()
for line in sys.stdin:
    try:
        print(fingerprint(receiver.receive(json.loads(line)).items()), flush=True)
    except EngineError as error:
        print(error, flush=True)
        break
"""


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Types and sizes that do not fit buckets: some smaller, one of many, one empty, one without dimensions."""
    torch.manual_seed(seed)
    return {
        "a": torch.randn(7, 3).bfloat16(),
        "b": torch.randn(300, 41),
        "none": torch.empty(0, 5),
        "c": torch.randint(0, 255, (1000,), dtype=torch.uint8),
        "one": torch.randn(()),
        "d": torch.randn(1024).bfloat16(),
    }


@pytest.fixture
def group():
    """A sender here, and two receivers in processes of their own."""
    sender = Sender(members=2, seconds=SECONDS, bucket=4096)
    started = [
        Launched([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for rank, process in enumerate(started, 1):
        tell(process, sender.invitation(rank))
    try:
        sender.form()
        yield sender, started
    finally:
        sender.close()
        for process in started:
            process.stdin.close()
            process.stdout.close()
            process.kill()
            process.wait(240)


def tell(process, what) -> None:
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def test_all_members_hold_the_same_bits_and_a_lost_one_delays_no_other(group):
    sender, (first, second) = group
    for seed in range(3):
        tensors = weights(seed)
        for process in (first, second):
            tell(process, layout_of(tensors))
        sender.send(tensors)
        marks = [process.stdout.readline().strip() for process in (first, second)]
        assert marks == [fingerprint(tensors.items())] * 2
    second.kill()
    second.wait(240)
    tell(first, layout_of(tensors))
    with contextlib.suppress(EngineError):
        sender.send(weights(3))  # the first part may leave before anybody notices
    with pytest.raises(EngineError, match=r"a member of the group for weights is gone|must be formed first"):
        sender.send(tensors)
    sender.close()
    assert "is gone" in first.stdout.readline() or "is gone" in first.stdout.readline()
    with pytest.raises(EngineError, match="must be formed first"):
        sender.send(tensors)


def test_a_group_that_never_comes_together_is_given_up_in_time():
    sender = Sender(members=1, seconds=1.0)
    with pytest.raises(EngineError, match="did not form"):
        sender.form()
    with pytest.raises(EngineError, match="no sender listens"):
        Receiver("127.0.0.1", 9, 2, 1, seconds=1.0).form()
