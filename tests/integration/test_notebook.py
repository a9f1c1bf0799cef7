"""`paceline.train` in a real Jupyter kernel: inside its event loop, shown in its cell, stopped by its interrupt."""

import json
import os
import signal
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

SECONDS = 300
CELLS = {
    "train": """
        import asyncio, os, pathlib
        import paceline
        asyncio.get_running_loop()  # as every notebook has
        pathlib.Path("pid").write_text(str(os.getpid()))
        rows = [{"prompt": f"add: {a}+{b}", "answer": str(a + b)} for a in range(20) for b in range(10)]
        def score(completion, answer):
            return completion.strip() == answer
        small = dict(dataset=rows, reward=score, batch_size=16, sampling={"max_tokens": 6})
        result = paceline.train(model="paceline:quickstart", name="sums", steps=3, **small)
        result
    """,
    "chat": 'result.policy.chat("copy: ab", temperature=0)',
    "refuse": """
        for wrong in ({"stepz": 3}, {"dataset": "nowhere.jsonl"}):
            try:
                paceline.train(**{**small, **wrong}, name="refused")
            except paceline.PacelineError as error:
                print(error)
        print(os.listdir("runs"), len(asyncio.all_tasks()))
    """,
    "interrupt": """
        long = paceline.train(**small, name="long", steps=100_000)
        print(long.outcome.status, long.outcome.checkpoint.is_dir())
    """,
    "resume": """
        again = paceline.train(**small, name="long", resume="latest", steps=long.outcome.step + 1, quiet=True)
        print(again.outcome.status, again.outcome.step - long.outcome.step)
    """,
}


def interrupt_when_trained(folder: Path, over: threading.Event) -> None:
    """As the button of a notebook does, once the long run has trained two steps."""
    metrics, deadline = folder / "runs" / "long" / "metrics.jsonl", time.monotonic() + SECONDS
    while time.monotonic() < deadline and not over.wait(0.05):
        if metrics.is_file() and metrics.read_text().count("\n") > 2:
            os.kill(int((folder / "pid").read_text()), signal.SIGINT)
            return


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """What each cell has put out, from one kernel that ran them all."""
    folder = tmp_path_factory.mktemp("notebook")
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (spec / "kernel.json").write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(code)) for code in CELLS.values()]
    over = threading.Event()
    watcher = threading.Thread(target=interrupt_when_trained, args=(folder, over), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder / "jupyter"))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        watcher.start()
        notebook = nbformat.v4.new_notebook(cells=cells)
        client = nbclient.NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(folder)}})
        try:
            client.execute()
        finally:
            over.set()
            watcher.join(SECONDS)
    return dict(zip(CELLS, (cell.outputs for cell in cells), strict=True))


def text(outputs, name="stdout"):
    return "".join(output["text"] for output in outputs if output.get("name") == name)


def test_a_run_is_shown_in_place_and_its_result_with_the_curve(outputs):
    view, result = (output["data"] for output in outputs["train"] if "data" in output)
    assert '<progress value="3" max="3"' in view["text/html"]
    assert "finished at step 3" in view["text/plain"]
    assert result["text/plain"].startswith("RunResult(sums: finished after 3 steps, reward ")
    assert "data:image/png;base64," in result["text/html"]


def test_nothing_is_left_pending(outputs):
    noise = "".join(text(cell, "stderr") for cell in outputs.values())
    for word in ("Task was destroyed", "never awaited", "never retrieved", "Traceback"):
        assert word not in noise, noise


def test_the_next_cell_chats(outputs):
    [said] = [output["data"]["text/plain"] for output in outputs["chat"] if "data" in output]
    assert said.startswith("'")


def test_a_refused_call_leaves_no_folder(outputs):
    lines = text(outputs["refuse"]).splitlines()
    assert "did you mean `steps`?" in lines[0]
    assert "dataset nowhere.jsonl: no such file" in lines[1]
    assert lines[2].startswith("['sums']")


def test_an_interrupted_run_goes_on(outputs):
    assert text(outputs["interrupt"]) == "interrupted True\n"
    assert text(outputs["resume"]) == "finished 1\n"
