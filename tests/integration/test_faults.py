"""A fault that needs a whole run: its disk is full. Engines are killed in test_pool_http.py and test_processes.py."""

import errno

from paceline.config import CheckpointConfig, EvalConfig, RunConfig
from paceline.config.inference import SamplingConfig
from paceline.observe.monitor import RunRecorder
from paceline.runtime import train


def test_a_run_whose_disk_is_full_at_the_metrics_says_so_and_can_go_on(tmp_path, monkeypatch):
    whole = RunRecorder.step

    def full(self, step, metrics):
        if step == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(self, step, metrics)

    monkeypatch.setattr(RunRecorder, "step", full)
    settings = {"runs": str(tmp_path), "steps": 3, "batch_size": 8, "group_size": 4, "eval": EvalConfig(every=0)}
    settings |= {"sampling": SamplingConfig(max_tokens=8), "checkpoint": CheckpointConfig(every=1), "device": "cpu"}
    done = train(RunConfig(**settings))
    assert (done.outcome.status, done.outcome.step) == ("failed", 1)
    sentence = f"{tmp_path / 'run'} cannot be written (No space left on device): make room, then add --resume latest"
    assert sentence in str(done.error)
    monkeypatch.undo()
    again = train(RunConfig(**settings, resume="latest"))
    assert again.outcome.status == "finished", again.error
    assert [line["step"] for line in again.metrics] == [1, 2, 3]
