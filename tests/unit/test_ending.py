"""The end of a run: bounded, whatever tasks are left."""

import asyncio
import contextlib

import pytest

from paceline.cluster.ending import run_to_the_end


def test_a_task_that_refuses_to_be_cancelled_is_left_behind(caplog):
    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    left = []

    async def main():
        left.append(asyncio.ensure_future(stubborn()))
        await asyncio.sleep(0)
        return 7

    assert run_to_the_end(main(), farewell=0.05) == 7
    left[0]._log_destroy_pending = False  # it is pending for ever, and this is the test's doing


def test_whoever_lets_go_is_waited_for():
    cleaned = []

    async def tidy():
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    async def main():
        task = asyncio.ensure_future(tidy())
        await asyncio.sleep(0)
        raise ZeroDivisionError(str(task.done()))

    with pytest.raises(ZeroDivisionError):
        run_to_the_end(main())
    assert cleaned == [True]


def test_an_interruption_in_the_middle_cancels_the_rest():
    cleaned = []

    async def main():
        asyncio.get_running_loop().call_later(0.01, interrupt)
        try:
            await asyncio.sleep(100)
        finally:
            cleaned.append(True)

    def interrupt():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_to_the_end(main())
    assert cleaned == [True]
