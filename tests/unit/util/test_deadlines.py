"""No wait without a name and a bound: `wait_within`, `named_wait`, the watchdog, the doctor and the lint rule."""

import asyncio
import contextlib
import contextvars
import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
from rich.console import Console

from paceline.commands import main
from paceline.errors import PacelineError
from paceline.observe.monitor import Monitor, Monitors, RunDirectory, RunOutcome, RunPlan, RunRecorder
from paceline.observe.monitor.doctor import diagnose, render_findings, resume_command
from paceline.observe.monitor.waitgraph import blocking_chain, wait_graph
from paceline.observe.monitor.watchdog import Watchdog, stalled_file, waits_file, watch_run
from paceline.orchestrator.metrics import Stopwatch
from paceline.util.deadlines import (
    AbandonedError,
    Clock,
    DeadlineError,
    UserCall,
    named_wait,
    registry,
    wait_within,
)
from simulator.engine import run_virtual

ROOT = Path(__file__).parents[3]

# -- within and waiting -----------------------------------------------------------------------------------------------


async def forever():
    await asyncio.Event().wait()


async def deaf():
    """Hears that it is to stop, and answers all the same."""
    with contextlib.suppress(asyncio.CancelledError):
        await forever()
    return "late"


async def breaks():
    try:
        await forever()
    except asyncio.CancelledError:
        raise KeyError("mine") from None


async def own_timeout():
    raise TimeoutError("its own")


async def answers():
    return "soon"


async def fails():
    raise ZeroDivisionError


async def standard(seconds, what, work):
    """What `wait_within` must do in the standard library's words."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(f"{what} took longer than {seconds:g} s") from error


async def happens(bound, work, cancel):
    """What comes of the work: its result or error, and whether the task still counts as being cancelled."""

    async def task():
        try:
            result = await bound(0.01 if not cancel else 60, "the work", work())
        except BaseException as error:
            result = error
        return repr(result), asyncio.current_task().cancelling()

    running = asyncio.create_task(task())
    if cancel:
        await asyncio.sleep(0)
        running.cancel()
    return await running


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("work", [forever, deaf, breaks, own_timeout, answers])
def test_within_does_what_a_timeout_of_the_standard_library_does(work, cancel):
    assert asyncio.run(happens(wait_within, work, cancel)) == asyncio.run(happens(standard, work, cancel))


def test_a_deadline_is_a_sentence_that_names_what_was_waited_for():
    async def run():
        await Clock().wait_within(0.01, "an episode of `code`", forever())

    with pytest.raises(PacelineError, match=r"^an episode of `code` took longer than 0\.01 s$") as error:
        asyncio.run(run())
    assert isinstance(error.value, DeadlineError)
    assert isinstance(error.value, TimeoutError)
    assert not registry.open


def test_the_inner_of_two_deadlines_leaves_the_outer_alone():
    async def run():
        async def inner():
            with contextlib.suppress(DeadlineError):
                await wait_within(0.01, "inner", forever())
            return [wait.what for wait in registry.waits()]

        return await wait_within(60, "outer", inner())

    assert asyncio.run(run()) == ["outer"]
    assert not registry.open


def test_deadlines_know_their_parents_through_tasks_but_never_one_that_is_over():
    async def run():
        seen = {}

        async def look(name):
            with named_wait(name) as wait:
                seen[name] = wait.parent and wait.parent.what
                await asyncio.sleep(0)

        with named_wait("outer"):
            await look("same task")
            await asyncio.gather(look("task inside"))
            with named_wait("short"):
                late = asyncio.ensure_future(asyncio.sleep(0))
                orphan = asyncio.create_task(after(late, look("task that outlives")))
            await orphan
        return seen

    async def after(first, then):
        await first
        await then

    assert asyncio.run(run()) == {"same task": "outer", "task inside": "outer", "task that outlives": "outer"}


def test_a_wait_that_is_over_keeps_nothing_alive():
    async def run():
        async def opens():
            with named_wait("outer"):
                kept.append(asyncio.get_running_loop().call_later(60, lambda: None))  # holds this context

        task = asyncio.create_task(opens())
        await task
        return weakref.ref(task)

    kept = []
    gone = asyncio.run(run())
    gc.collect()
    assert gone() is None


def test_progress_is_what_comes_to_a_good_end():
    async def run():
        before = registry.progress_count
        await wait_within(1, "work", answers())
        counted = registry.progress_count - before
        with contextlib.suppress(DeadlineError):
            await wait_within(0.001, "nothing", forever())
        return counted, registry.progress_count - before

    assert asyncio.run(run()) == (1, 1)


class Stubborn:
    """Swallows so many cancellations, then goes, or says something after all."""

    def __init__(self, swallows, end=forever):
        self.swallows, self.end = swallows, end

    async def __call__(self):
        for _ in range(self.swallows):
            with contextlib.suppress(asyncio.CancelledError):
                await forever()
        return await self.end()


@pytest.mark.parametrize(("swallows", "told"), [(1, False), (5, False), (20, True)])
def test_code_that_swallows_a_cancellation_is_cancelled_again_and_named_in_the_end(swallows, told, caplog):
    async def run():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        with pytest.raises(DeadlineError, match="an episode of `code` took longer than 60 s"):
            await wait_within(60, "an episode of `code`", Stubborn(swallows)())
        gone = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000):  # nothing is left that would wake us
                await forever()
        return gone, loop.time() - gone, task.cancelling()

    assert run_virtual(run()) == (60 + 5 * swallows, 1000, 0)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == told * [
        "an episode of `code` does not let itself be cancelled"
    ]
    assert not registry.open


@pytest.mark.parametrize("end", [answers, own_timeout])
def test_however_a_stubborn_one_ends_its_cancellations_are_taken_back(end):
    async def run():
        try:
            result = await wait_within(60, "it", Stubborn(3, end)())
        except TimeoutError as error:
            result = str(error)
        return result, asyncio.current_task().cancelling()

    assert run_virtual(run()) == ({answers: "soon", own_timeout: "its own"}[end], 0)


def test_a_stubborn_one_that_others_cancel_too_stays_cancelled():
    async def run():
        task = asyncio.create_task(wait_within(60, "it", Stubborn(3)()))
        asyncio.get_running_loop().call_later(75, task.cancel)  # together with the fourth time
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled()

    assert run_virtual(run())


# -- user code that is abandoned --------------------------------------------------------------------------------------


over = threading.Event()


async def deaf():
    while not over.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await forever()


async def behind_a_task():
    await asyncio.create_task(deaf())


async def behind_a_gather():
    await asyncio.gather(deaf(), deaf())


@pytest.mark.parametrize("work", [deaf, behind_a_task, behind_a_gather])
def test_user_code_that_never_ends_is_left_30_s_after_its_deadline_or_its_cancellation(work, caplog):
    async def run():
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        with pytest.raises(AbandonedError, match=r"cancelled and did not end within 30 s, at .*test_deadlines\.py"):
            await UserCall(60, "it", work())
        late, left = loop.time(), task.cancelling()
        task = asyncio.ensure_future(UserCall(60, "it", work()))
        loop.call_later(10, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task
        over.set()  # for tasks of its own, which are not abandoned
        return late, left, loop.time()

    over.clear()
    assert run_virtual(run()) == (90, 0, 130)
    assert [record.getMessage()[:16] for record in caplog.records] == ["it was cancelled"]
    assert not registry.open


def test_user_code_may_clean_up_after_its_deadline():
    async def work():
        try:
            await asyncio.gather(forever(), asyncio.create_task(forever()))
        finally:
            cleaning = asyncio.create_task(asyncio.sleep(29))
            while not cleaning.done():  # cancelled again every five seconds
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(cleaning)

    async def run():
        with pytest.raises(DeadlineError, match="it took longer than 60 s"):
            await UserCall(60, "it", work())
        return asyncio.get_running_loop().time(), asyncio.current_task().cancelling()

    assert run_virtual(run()) == (89, 0)


def test_user_code_keeps_its_own_time_outs_and_tasks():
    async def own():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.create_task(forever())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(forever(), 1)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(asyncio.sleep(40, "first"))
        with pytest.raises(ZeroDivisionError):
            await asyncio.gather(forever(), fails())
        return first.result(), await asyncio.gather(answers(), asyncio.sleep(1, "second")), asyncio.current_task()

    async def run():
        first, rest, task = await UserCall(1000, "it", own())
        return first, rest, task is asyncio.current_task(), task.cancelling(), asyncio.get_running_loop().time()

    assert run_virtual(run()) == ("first", ["soon", "second"], True, 0, 43)


@pytest.mark.parametrize("then", ["awaits", "returns", "raises"])
def test_user_code_that_cancels_its_own_task_loses_its_own_call_alone(then):
    async def cancels():
        await asyncio.sleep(1)
        asyncio.current_task().cancel()
        if then == "awaits":
            await asyncio.sleep(1)
        if then == "raises":
            raise ZeroDivisionError
        return "done"

    async def run():
        try:
            answer = await UserCall(60, "it", cancels())
        except (asyncio.CancelledError, ZeroDivisionError) as error:
            answer = type(error)
        left = asyncio.current_task().cancelling()
        await asyncio.sleep(1)  # nothing is left to be thrown here
        return answer, left

    expected = {"awaits": asyncio.CancelledError, "returns": "done", "raises": ZeroDivisionError}
    assert run_virtual(run()) == (expected[then], 0)


@pytest.mark.parametrize("then", ["awaits", "returns"])
def test_a_caller_that_is_cancelled_stays_so_whatever_its_work_asked_of_the_task(then):
    async def cancels():
        try:
            await forever()
        finally:
            asyncio.current_task().cancel()
            if then == "awaits":
                await asyncio.sleep(0)

    async def run():
        task = asyncio.ensure_future(UserCall(60, "it", cancels()))
        await asyncio.sleep(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return task.cancelled(), task.cancelling()

    assert run_virtual(run()) == (True, 1)


def test_user_code_that_raises_a_base_exception_raises_it_here():
    async def run():
        with pytest.raises(SystemExit):
            await UserCall(60, "it", leaves())
        with pytest.raises(GeneratorExit):
            await UserCall(60, "it", leaves(GeneratorExit))

    async def leaves(what=SystemExit):
        await asyncio.sleep(1)
        raise what

    run_virtual(run())


# -- the graph --------------------------------------------------------------------------------------------------------


def test_thousands_of_episodes_are_one_line_below_what_waits_for_them():
    async def run():
        tasks = [asyncio.create_task(wait_within(300, "an episode of `code`", forever())) for _ in range(2_000)]
        with Stopwatch(Clock(), lambda: 0.0).phase("sample"):
            await asyncio.sleep(0)
            nodes = wait_graph(registry.waits(), time.monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return nodes

    nodes = asyncio.run(run())
    assert sorted((node["what"], node["count"]) for node in nodes) == [
        ("an episode of `code`", 2_000),
        ("sampling a batch", 1),
    ]
    assert blocking_chain(nodes).startswith("sampling a batch (")
    assert " waits for 2000 x an episode of `code` (" in blocking_chain(nodes)
    episode = next(node for node in nodes if node["count"] > 1)
    assert episode["limit"] == 300
    assert episode["stack"][-1].startswith("python/asyncio/locks.py"), "the stack goes down to what is awaited"
    assert any("test_deadlines.py" in line and line.endswith(" forever") for line in episode["stack"])


def test_a_stack_follows_tasks_that_wait_for_tasks():
    async def run():
        async def inner():
            await forever()

        async def outer():
            with named_wait("outer"):
                await asyncio.gather(asyncio.create_task(inner()))

        task = asyncio.create_task(outer())
        for _ in range(3):
            await asyncio.sleep(0)
        (node,) = wait_graph(registry.waits(), time.monotonic())
        task.cancel()
        return [line.rpartition(" ")[2] for line in node["stack"]]

    assert asyncio.run(run()) == ["outer", "inner", "forever", "wait"]


def test_a_task_in_two_waits_shows_its_stack_once_and_the_sentence_goes_down_to_the_last():
    async def run():
        with named_wait("sampling a batch"), named_wait("a batch that fills up", waits_for="an episode"):
            episode = asyncio.create_task(wait_within(9, "an episode of `code`", forever()))
            await asyncio.sleep(0)
            other = asyncio.create_task(wait_within(9, "a health check", forever()), context=contextvars.Context())
            await asyncio.sleep(0)
            nodes = wait_graph(registry.waits(), time.monotonic())
        for task in (episode, other):
            task.cancel()
        return nodes

    nodes = asyncio.run(run())
    assert [bool(node["stack"]) for node in nodes] == [False, True, True, True]
    words = blocking_chain(nodes).split(" waits for ")
    assert [word.partition(" (")[0] for word in words] == [
        "sampling a batch",
        "a batch that fills up",
        "an episode of `code`",
    ]


def test_a_wait_that_outlives_its_parent_goes_to_the_grandparent():
    async def run():
        with named_wait("the run"):
            with named_wait("publishing"):
                task = asyncio.create_task(wait_within(9, "an episode", forever()))
                await asyncio.sleep(0)
            nodes = wait_graph(registry.waits(), time.monotonic())
            task.cancel()
        return [(node["what"], node["parent"]) for node in nodes]

    assert asyncio.run(run()) == [("the run", None), ("an episode", 0)]


def test_names_that_wait_for_each_other_end_in_no_circle():
    opened, seen = threading.Event(), threading.Event()

    def other():
        with named_wait("b of y", waits_for="a"):
            opened.set()
            seen.wait(60)

    thread = threading.Thread(target=other)
    with named_wait("a of x", waits_for="b"):
        thread.start()
        assert opened.wait(60)
        nodes = wait_graph(registry.waits(), time.monotonic())
        seen.set()
        thread.join(60)
    assert sum(node["parent"] is None for node in nodes) == 1
    assert " waits for " in blocking_chain(nodes)


# -- the watchdog -----------------------------------------------------------------------------------------------------


class Ear(Monitor):
    """Remembers what was said."""

    def __init__(self):
        self.notes, self.phases = [], []

    def note(self, text):
        self.notes.append(text)

    def phase(self, text):
        self.phases.append(text)


class Dog:
    """A watchdog on a clock that the test winds."""

    def __init__(self, directory, **options):
        self.now, self.cpu = 1000.0, 0.0
        self.ear = Ear()
        self.dog = Watchdog(self.ear, directory, clock=lambda: self.now, cpu=lambda: self.cpu, **options)

    def after(self, seconds, busy=0.0, every=1):
        """Live through the seconds, a look in each."""
        for _ in range(0, seconds, every):
            self.now, self.cpu = self.now + every, self.cpu + busy * every
            self.dog.check()
        return self


def test_a_run_that_does_not_move_says_who_waits_for_whom_within_a_minute_and_then_ever_more_rarely(tmp_path):
    with named_wait("training on the batch", waits_for="the trainer"), named_wait("the answer of rank 3"):
        dog = Dog(tmp_path).after(58)
        assert not dog.ear.notes
        dog.after(2)
        (note,) = dog.ear.notes
        assert note.startswith("nothing has moved for 59 s: training on the batch (")
        assert " waits for the answer of rank 3 (" in note
        assert f"`paceline doctor {tmp_path}`" in note
        said = [len(dog.after(60, every=15).ear.notes) for _ in range(59)]
    assert said[-1] <= 10, "an hour of silence is ten words, not sixty"
    assert said[0] == 2, "the second follows a minute later"
    assert not dog.ear.phases
    stacks = stalled_file(tmp_path).read_text()
    assert "the answer of rank 3" in stacks
    assert "test_deadlines.py" in stacks


def test_a_stall_in_which_no_wait_has_a_name_says_where_the_process_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "waits", list)
    dog = Dog(tmp_path).after(70)
    thread = threading.main_thread().name
    assert f"nothing has moved for 59 s: the thread `{thread}` is at " in dog.ear.notes[-1]

    async def lonely() -> None:
        dog.dog.note("heard on the loop")
        dog.after(70)

    asyncio.run(lonely())
    said = dog.ear.notes[-1]
    assert "the task `Task-" in said
    assert "test_deadlines.py:" in said
    assert " lonely" in said


def test_after_every_movement_a_stall_is_told_anew(tmp_path):
    dog = Dog(tmp_path).after(70)
    assert len(dog.ear.notes) == 1
    dog.dog.step(3, {})
    assert len(dog.after(55).ear.notes) == 1
    assert len(dog.after(10).ear.notes) == 2


def test_a_run_that_moves_but_shows_nothing_says_that_it_is_still_at_it(tmp_path):
    dog = Dog(tmp_path)
    for _ in range(65):
        dog.dog.record_progress()
        dog.after(1)
    assert not dog.ear.notes
    (phase,) = dog.ear.phases
    assert phase.startswith("still at it after 59 s, 59 things finished")
    dog.dog.phase("evaluating 3/8")
    for _ in range(58):
        dog.dog.record_progress()
        dog.after(1)
    assert len(dog.ear.phases) == 1, "no reminder is due right after a phase was shown"


def test_a_process_that_computes_is_not_called_stuck(tmp_path):
    dog = Dog(tmp_path).after(60, busy=0.97)
    (note,) = dog.ear.notes
    assert note.startswith("still computing (1.0 cores) though nothing has finished for 59 s")


def test_a_blocked_event_loop_is_named_with_the_line_that_blocks_it(tmp_path):
    let_go, inside = threading.Event(), threading.Event()

    def blocks_the_loop():
        inside.set()
        let_go.wait(60)

    async def run():
        dog.dog.note("so that it knows the loop")
        asyncio.get_running_loop().call_soon(blocks_the_loop)
        await asyncio.sleep(0)

    dog = Dog(tmp_path)
    thread = threading.Thread(target=lambda: asyncio.run(run()), name="the loop's")
    thread.start()
    assert inside.wait(60)
    dog.after(62)
    snapshot = json.loads(waits_file(tmp_path).read_text())
    let_go.set()
    thread.join(60)
    (note,) = dog.ear.notes
    assert note.startswith("the event loop has been blocked for ")
    assert "test_deadlines.py" in note
    assert "blocks_the_loop (in python/threading.py:" in note
    assert snapshot["blocked"] > 50
    assert any("blocks_the_loop" in line for group in snapshot["threads"] for line in group["stack"])
    assert len(dog.after(1).ear.notes) == 1
    dog.dog.record_progress()
    assert len(dog.after(65).ear.notes) == 2
    assert "event loop" not in dog.ear.notes[1], "a loop that is closed owes no answer"


def test_an_event_loop_that_was_closed_owes_no_sign_of_life(tmp_path):
    dog, loop = Dog(tmp_path), asyncio.new_event_loop()
    dog.dog._loop = loop
    dog.after(10)
    assert dog.dog._blocked_seconds(dog.now) == 9
    loop.close()
    dog.after(1)
    assert dog.dog._blocked_seconds(dog.now) == 0


def test_what_the_watchdog_says_is_no_movement(tmp_path):
    ear = Ear()
    monitors = Monitors(ear)
    with watch_run(monitors, tmp_path, seconds=0.02) as dog:
        deadline = time.monotonic() + 60
        while len(ear.notes) < 2 and time.monotonic() < deadline:
            dog._stop.wait(0.01)
    assert len(ear.notes) >= 2, "had its own word counted, the intervals would never have grown past the first"
    assert dog._heard == 0
    assert not dog._thread.is_alive()
    assert not waits_file(tmp_path).exists(), "where nothing waits any more there is nothing to show"


def test_a_watchdog_that_is_to_be_silent_still_leaves_its_snapshot(tmp_path):
    dog = Dog(tmp_path, patience=0.0).after(200, every=10)
    assert not dog.ear.notes
    assert not dog.ear.phases
    assert json.loads(waits_file(tmp_path).read_text())["pid"] == os.getpid()


def test_a_full_disk_silences_the_watchdog_and_no_more(tmp_path):
    dog = Dog(tmp_path / "missing").after(61)
    assert not dog.ear.notes


def test_a_watchdog_that_stumbles_says_so_once_and_watches_on(tmp_path, monkeypatch, caplog):
    looks = threading.Semaphore(0)

    def stumble(self):
        looks.release()
        raise RuntimeError("dictionary changed size")

    monkeypatch.setattr(Watchdog, "check", stumble)
    with watch_run(Monitors(Ear()), tmp_path, seconds=0.02):
        assert all(looks.acquire(timeout=60) for _ in range(3))
    assert [record.getMessage() for record in caplog.records] == [
        "the watchdog stumbled, and watches on; this is told once"
    ]


# -- the doctor -------------------------------------------------------------------------------------------------------


def begun(path, pid=None):
    """A run directory in the middle of its run."""
    directory = RunDirectory.claim(path)
    directory.begin("steps = 9\n")
    recorder = RunRecorder(path)
    recorder.begin(RunPlan("demo", path, 9, 0, {}, ("reverse-text",), "cpu", 100))
    recorder.phase("loading the model")
    recorder.step(3, {"reward/mean": 0.5})
    recorder.note("something to know")
    checkpoint = path / "checkpoints" / "step-000002"
    checkpoint.mkdir()
    (checkpoint / "state.json").write_text("{}")
    (path / "checkpoints" / "step-000004").mkdir()  # not whole
    if pid is not None:
        directory.lock_file.write_text(f"{pid}\n")
    directory.release()
    return recorder


def shown(found, width=4000):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    console.print(render_findings(found))
    console.file.close()
    return console.export_text()


def test_doctor_shows_a_living_run_and_who_waits_in_it(tmp_path):
    begun(tmp_path / "run")
    with named_wait("sampling a batch", waits_for="an episode"), named_wait("the answer of the engine"):
        dog = Dog(tmp_path / "run")
        dog.dog.step(3, {})
        dog.after(1)
        part = Dog(tmp_path / "run", part="trainer").after(1)
    assert not part.ear.notes
    found = diagnose(tmp_path / "run")
    assert found.alive
    assert found.verdict == f"runs as process {os.getpid()}"
    text = shown(found)
    assert "step        3" in text
    assert "sampling a batch (" in text
    assert "the answer of the engine (" in text
    assert "test_deadlines.py" in text
    assert "who waits for whom in the trainer" in text
    assert "something to know" in text
    assert "step-000002" in text
    assert "--resume" not in text


def test_doctor_says_that_a_run_was_killed_and_how_to_go_on(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        begun(tmp_path / "run", sleeper.pid)
        assert diagnose(tmp_path / "run").verdict == f"runs as process {sleeper.pid}"
        os.kill(sleeper.pid, signal.SIGSTOP)
        os.waitpid(sleeper.pid, os.WUNTRACED)
        assert f"`kill -CONT {sleeper.pid}`" in diagnose(tmp_path / "run").verdict
    finally:
        sleeper.kill()
        sleeper.wait(60)
    found = diagnose(tmp_path / "run")
    assert not found.alive
    assert found.verdict.startswith(f"killed: process {sleeper.pid} is gone and wrote no end (SIGKILL, out of memory")
    assert found.checkpoint == tmp_path / "run" / "checkpoints" / "step-000002"
    assert resume_command(found) == f"paceline train {tmp_path}/run/config.toml --resume step-000002"


def test_doctor_is_not_fooled_by_a_process_number_that_is_used_again(tmp_path):
    begun(tmp_path / "run")
    Dog(tmp_path / "run").after(1)
    snapshot = json.loads(waits_file(tmp_path / "run").read_text())
    waits_file(tmp_path / "run").write_text(json.dumps(snapshot | {"born": "1"}))
    if snapshot["born"]:
        assert diagnose(tmp_path / "run").verdict.startswith(f"killed: process {os.getpid()}")
    waits_file(tmp_path / "run").write_text(json.dumps(snapshot | {"host": "far-away"}))
    assert diagnose(tmp_path / "run").verdict.startswith("on far-away, process ")
    waits_file(tmp_path / "run").write_text(json.dumps(snapshot))
    assert "has written nothing for 100 s" in diagnose(tmp_path / "run", lambda: snapshot["time"] + 100).verdict


def test_doctor_tells_the_outcome_of_a_run_that_ended(tmp_path, capsys):
    tmp_path = tmp_path / ("a long name " * 20).strip().replace(" ", "-")
    recorder = begun(tmp_path / "run")
    recorder.end(RunOutcome("failed", 3, "the engine was lost", tmp_path / "run" / "checkpoints" / "step-000002"))
    assert main(["doctor", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "failed at step 3: the engine was lost" in said
    assert said.splitlines()[-1] == f"to go on: paceline train {tmp_path}/run/config.toml --resume step-000002"
    recorder.end(RunOutcome("finished", 9))
    found = diagnose(tmp_path / "run")
    assert found.verdict == "finished at step 9"
    assert not resume_command(found)


def test_doctor_refuses_what_is_no_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert f"there is no run at {tmp_path}: name a run directory" in capsys.readouterr().err


# -- the lint rule ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lint():
    spec = importlib.util.spec_from_file_location("lint_waits", ROOT / "scripts" / "lint_waits.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


PLANTED = """
    await event.wait()
    await queue.get()
    await queue.put(1)
    await queue.join()
    await lock.acquire()
    await reader.readexactly(4)
    await reader.readline()
    await writer.drain()
    await writer.wait_closed()
    await process.wait()
    await process.communicate(b"")
    await task
    await self._future
    await futures[3]
    await asyncio.shield(task)
    await asyncio.gather(*tasks)
    await asyncio.gather(one(), event.wait())
    await asyncio.gather(*(queue.get() for queue in queues))
    await asyncio.wait({task})
    await asyncio.wait({task}, timeout=None)
    await asyncio.wrap_future(future)
    await loop.create_future()
    await server.serve_forever()
    while not ready: await asyncio.sleep(1)
    while not ready: time.sleep(1)
    thread.join()
    child.wait()
    child.communicate()
    future.result()
    door.accept()
    door.recv(4)
    line = lines.get()
    lock.acquire()
    subprocess.run(["ls"])
    select.select([door], [], [])
    os.waitpid(child, 0)
    async with places: await work()
    async with asyncio.timeout(None): await event.wait()
"""

BOUNDED = """
    await wait_within(5, "it", event.wait())
    await clock.wait_within(5, "it", queue.get())
    await asyncio.wait_for(event.wait(), 5)
    await asyncio.wait({task}, timeout=5)
    async with asyncio.timeout(5): await event.wait()
    async with asyncio.timeout(5): await asyncio.gather(*tasks)
    await asyncio.sleep(1)
    await self.anything()
    await asyncio.gather(one(), two())
    await asyncio.gather(*map(one, rows))
    await client.get(url)
    thread.join(5)
    ", ".join(names)
    child.wait(timeout=5)
    child.communicate(timeout=5)
    future.result(5)
    table.get(key)
    variable.get()
    gate.accept(3)
    lock.acquire(timeout=5)
    subprocess.run(["ls"], timeout=5)
    select.select([door], [], [], 5)
    await queue.get()  # unbounded: a worker without work waits for some
    await task  # bounded: by the caller's deadline
    async with places: await work()  # bounded: each before it is
"""

HEAD = """import asyncio
from contextvars import ContextVar
variable = ContextVar("variable")
places = asyncio.Semaphore(2)
async def f():
"""


def found(lint, path, lines):
    path.write_text(HEAD + "\n".join(lines) + "\n")
    return [offence.line - HEAD.count("\n") - 1 for offence in lint.offences(path)]


def test_the_rule_finds_every_planted_wait(lint, tmp_path):
    lines = PLANTED.strip("\n").splitlines()
    missed = set(range(len(lines))) - set(found(lint, tmp_path / "planted.py", lines))
    assert [lines[index].strip() for index in sorted(missed)] == []


def test_the_rule_accepts_what_has_a_bound_or_says_why_it_has_none(lint, tmp_path):
    lines = BOUNDED.strip("\n").splitlines()
    assert [lines[index].strip() for index in found(lint, tmp_path / "bounded.py", lines)] == []


def test_a_bound_around_a_definition_bounds_no_call_of_it(lint, tmp_path):
    lines = ["    async with asyncio.timeout(5):", "        async def later():", "            await event.wait()"]
    assert found(lint, tmp_path / "nested.py", lines) == [2]


def test_a_mark_needs_a_reason(lint, tmp_path):
    assert found(lint, tmp_path / "lazy.py", ["    await task  # unbounded:"]) == [0]


def test_the_command_prints_place_and_remedy_and_fails(lint, tmp_path, capsys):
    found(lint, tmp_path / "bad.py", ["    thread.join()"])
    assert lint.main([str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert f"{tmp_path}/bad.py:6: `thread.join()` may wait for ever: give it a timeout" in said
    assert "# unbounded: WHY" in said
    (tmp_path / "bad.py").write_text("thread.join(5)\n")
    assert lint.main([str(tmp_path)]) == 0
