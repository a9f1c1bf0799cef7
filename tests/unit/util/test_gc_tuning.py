"""While a run is led, Python looks for garbage rarely; afterwards as its caller had it."""

import gc

import pytest

from paceline.util.gc_tuning import freeze_new_objects, tuned_gc


@pytest.fixture(autouse=True)
def thawed():
    """Nothing is frozen, as in a process that knows nothing of it; this suite has frozen its modules."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_was_there_before_a_run_is_not_looked_through_until_it_ends():
    before = gc.get_threshold()
    with tuned_gc():
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() > before
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == before


def test_what_a_caller_has_frozen_stays_frozen():
    before = gc.get_threshold()
    gc.freeze()
    frozen = gc.get_freeze_count()
    with tuned_gc():
        assert gc.get_threshold() > before
    assert gc.get_freeze_count() > frozen / 2  # other threads may have let go of some
    assert gc.get_threshold() == before


def test_what_a_run_makes_and_keeps_is_frozen_with_the_rest_and_only_then():
    freeze_new_objects()
    assert gc.get_freeze_count() == 0
    with tuned_gc():
        before = gc.get_freeze_count()
        kept = [[] for _ in range(1000)]
        freeze_new_objects()
        assert gc.get_freeze_count() >= before + len(kept)
    assert gc.get_freeze_count() == 0
