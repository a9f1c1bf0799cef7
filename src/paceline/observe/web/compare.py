"""Routes that compare two runs: their rewards over the same draws, their curves, and their first difference.

Large runs take seconds to compare, so a thread does it and the page polls for progress.
"""

import threading
import time
from collections import Counter
from dataclasses import asdict
from itertools import count
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Query, Request, Response

from paceline.observe.record import RolloutNotFound, RunFolder, StoredRollout
from paceline.observe.record.curve_difference import compare_curves
from paceline.observe.record.first_difference import GROUP_RESULTS, FirstDifference, RunComparison, compare
from paceline.observe.record.paired import verdict
from paceline.observe.web.runs import AllRuns, FiniteJsonResponse, Runs
from paceline.observe.web.tokens import vocabulary_of

MOST_DRAWS, MOST_TEXT = 20, 4000
"""Draws that are listed, those with the largest differences, and characters of a text."""
WAIT_SECONDS = 0.4
"""Seconds a request waits for the result; small runs are compared in that time."""
CONTEXT_TOKENS = 12
"""Tokens shown on either side of one that differs."""
CAUSAL_CHAIN = (
    ("row", "the row of the data"),
    ("prompt", "the prompt"),
    ("weights", "the fingerprint of the weights"),
    ("token", "the sampled tokens, their versions and log probabilities"),
    ("reward", "reward, metrics and error"),
    ("sample", "the streams of the samples: mask, advantages, weights, scores"),
    ("fate", "the state of the rollout: trained, or dropped and why"),
    ("ticket", "which rollouts the step holds"),
    ("loss", "the loss, component by component"),
    ("gradient", "gradient norm and learning rate"),
    ("measure", "everything else that was measured"),
)
"""In causal order, which is the order of comparison."""
KIND_ALIASES = {"version": "token", "logprob": "token", "finish": "token", "metric": "reward", "error": "reward"}
KIND_MEANINGS = {
    "row": "The data or its order: the seed, the dataset, the curriculum.",
    "prompt": "What the model was asked: the data, the chat template or the environment.",
    "weights": "The update before it: both runs sampled, but with weights that are not the same.",
    "version": "When new weights came. Above `staleness = 0` that is a matter of timing.",
    "token": "Sampling: the seed, the numerics of the machine, or when new weights came.",
    "logprob": "The numerics of sampling: another device, type or batch; or other weights.",
    "finish": "Where sampling stopped: stop tokens, or the limit of tokens.",
    "reward": "The environment: the same conversation was graded differently.",
    "metric": "The environment: it measured the same conversation otherwise.",
    "error": "The environment: the same conversation failed in one run and not in the other.",
    "sample": "The algorithm: the same rollouts became other training data.",
    "fate": "Filters, failures or the gate: the same rollout was not treated alike.",
    "ticket": "The gate: a step took in other rollouts.",
    "loss": "The loss: the same samples gave another value. Settings of `trainer.loss`, or the trainer's numerics.",
    "gradient": "The optimizer or its schedule: the loss was the same.",
    "measure": "What was only measured: everything before it is the same.",
    "length": "One of them goes on where the other has nothing more.",
}

router = APIRouter()
Name = Annotated[str, Query(max_length=1000)]


def _open_pair(runs: Runs, a: str, b: str) -> tuple[RunFolder, RunFolder]:
    one, other = runs.open(a), runs.open(b)
    if one.path == other.path:
        raise HTTPException(400, "a run does not differ from itself: choose two")
    return one, other


@router.get("/ab")
def ab(runs: AllRuns, a: Name, b: Name) -> Response:
    """The estimate of the difference in reward, step by step, in training and on held-out rows."""
    known = verdict(*_open_pair(runs, a, b))
    if known is None:
        return FiniteJsonResponse({"draws": 0, "different_rows": 0, "steps": [], "held_out": [], "farthest": []})
    pairs = known.pairs
    last = np.flatnonzero(np.diff(pairs.step, append=-1))  # of each step, what was known at its end
    far = np.argsort(-np.abs(pairs.differences), kind="stable")[:MOST_DRAWS]
    estimate = {
        "draws": len(pairs.ticket),
        "different_rows": pairs.different_rows,
        "real": known.decided_after,
        "real_step": None if known.decided_after is None else int(pairs.step[known.decided_after - 1]),
        "sentence": known.sentence,
        "held_out_sentence": known.held_out_sentence,
        "held_out": [asdict(one) | {"is_real": one.is_real} for one in known.held_out],
        "steps": pairs.step[last],
        "means": known.mean[last],
        "radii": known.radius[last],
        "farthest": [
            {
                "env": pairs.names[pairs.env[at]],
                "ticket": int(pairs.ticket[at]),
                "step": int(pairs.step[at]),
                "a": float(pairs.a[at]),
                "b": float(pairs.b[at]),
                "rollouts": [int(places[at]) for places in pairs.places],
            }
            for at in far
            if pairs.differences[at]
        ],
    }
    return FiniteJsonResponse(estimate)


def describe_difference(one: RunFolder, other: RunFolder, compared: RunComparison) -> dict[str, Any]:
    first = compared.first
    view = compared.as_json() | {"same": _equal_counts(compared)}
    if first is None:
        return view | {"meaning": "", "chain": [], "sides": [], "evaluation": False}
    kept = one.rollouts.keeps_all and other.rollouts.keeps_all
    sides = [
        (run, index, value, None if index is None else run.rollouts.get_or_none(index))
        for run, index, value in zip((one, other), first.indices, (first.one, first.other), strict=True)
    ]
    evaluation = any(body is not None and body.row.domain != "training" for *_, body in sides)
    return view | {
        "meaning": KIND_MEANINGS.get(first.kind, ""),
        "chain": _chain_states(first, kept, evaluation),
        "evaluation": evaluation,
        "sides": [_side_view(first, *side) for side in sides],
    }


def _equal_counts(compared: RunComparison) -> dict[str, int | bool]:
    """Counts of what was equal: a rollout that differs was counted as soon as it was looked at. Where credit or fate
    differs, that of the step's other rollouts is not known, but all they said is the same (`said`)."""
    first = compared.first
    differs = first is not None and None not in first.indices
    is_judged = first is not None and first.kind in GROUP_RESULTS
    return {"steps": compared.steps, "rollouts": compared.rollouts - (differs and not is_judged), "said": is_judged}


def _chain_states(first: FirstDifference, kept: bool, evaluation: bool) -> list[dict[str, str]]:
    """Each thing that is compared: `same`, `differs`, `later`, or `unknown` where no record was kept. Rollouts that
    evaluate are compared after the loss, which is no part of their chain."""
    kind = KIND_ALIASES.get(first.kind, first.kind)
    kinds = [name for name, _ in CAUSAL_CHAIN]
    if kind not in kinds:
        return []
    here, measured = kinds.index(kind), kinds.index("loss")

    def state(at: int) -> str:
        if at >= here:
            return "differs" if at == here else "later"
        return "same" if kept or at >= measured else "unknown"

    links = CAUSAL_CHAIN[:measured] if evaluation else CAUSAL_CHAIN
    return [{"what": what, "state": state(at)} for at, (_, what) in enumerate(links)]


def _side_view(
    first: FirstDifference, run: RunFolder, index: int | None, value: Any, body: StoredRollout | None
) -> dict[str, Any]:
    """One run's side of the difference: its value, the tokens around it, the text, and the place on the token page."""
    side: dict[str, Any] = {"run": run.name, "value": value, "rollout": index, "tokens": None, "said": ""}
    if body is None:
        return side
    turn = body.turns[first.turn] if first.turn is not None and first.turn < len(body.turns) else None
    side["said"] = (turn or body.turns[-1]).text[:MOST_TEXT] if body.turns else ""
    if first.token is None:
        return side
    if turn is not None:
        ids, place = turn.full_ids, {"turn": first.turn}
        at = first.token + (0 if first.kind == "prompt" else len(turn.prompt_ids))
    elif first.sample is not None and first.sample < len(body.samples):
        ids, place, at = body.samples[first.sample].token_ids, {"sample": first.sample}, first.token
    else:
        return side
    start = max(0, at - CONTEXT_TOKENS)
    shown, (vocabulary, _) = ids[start : at + CONTEXT_TOKENS + 1].tolist(), vocabulary_of(run)
    texts = vocabulary.decode(shown)[0] if vocabulary is not None else [None] * len(shown)
    tokens = [{"id": id, "text": text} for id, text in zip(shown, texts, strict=True)]
    return side | {"tokens": tokens, "marked": at - start, "place": place | {"at": at}}


ABANDON_SECONDS = 20.0
"""A comparison that no page has asked for in so long is cancelled."""
MOST_COMPARISONS, MOST_CONCURRENT = 16, 2
"""Comparisons that are remembered, and that go on at a time."""


class ComparisonAbandoned(Exception):
    """No page asks for the comparison any more."""


class AbandonableCounter(Counter[str]):
    """Counts what was compared, and ends the work when no page asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.last_request = time.monotonic()

    def __setitem__(self, key: str, value: int) -> None:
        if time.monotonic() - self.last_request > ABANDON_SECONDS:
            raise ComparisonAbandoned
        super().__setitem__(key, value)


class ComparisonJob:
    """One comparison: `working` until it is `done` or `failed`."""

    def __init__(self, one: RunFolder, other: RunFolder, tolerance: float, slots: threading.Semaphore) -> None:
        self._runs, self._tolerance, self._slots = (one, other), tolerance, slots
        self._counter = AbandonableCounter()
        self._answer: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._work, name="paceline-diff", daemon=True)
        self._thread.start()

    def progress(self, wait: float) -> dict[str, Any]:
        """The result, or the progress after waiting `wait` seconds."""
        self._counter.last_request = time.monotonic()
        self._thread.join(wait)
        if self._answer:
            return self._answer
        steps = max((step for run in self._runs for step in run.metrics()["step"] if step is not None), default=0)
        done = {name: self._counter[name] for name in ("steps", "rollouts")}
        return {"state": "working", "total_steps": int(steps), **done}

    def _work(self) -> None:
        one, other = self._runs
        with self._slots:
            try:
                compared = compare(one, other, self._tolerance, self._counter)
                self._answer = {"state": "done", **describe_difference(one, other, compared)}
            except ComparisonAbandoned:
                self._answer = {"state": "failed", "failure": "no page asked for it in time: compare again"}
            except (RolloutNotFound, OSError, ValueError) as error:
                self._answer = {"state": "failed", "failure": f"the runs cannot be compared: {error}"}


class ComparisonJobs:
    """The comparisons of one app, by number."""

    def __init__(self) -> None:
        self._slots = threading.Semaphore(MOST_CONCURRENT)
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._jobs: dict[int, ComparisonJob] = {}

    def start(self, one: RunFolder, other: RunFolder, tolerance: float) -> int:
        with self._lock:
            number = next(self._numbers)
            self._jobs[number] = ComparisonJob(one, other, tolerance, self._slots)
            while len(self._jobs) > MOST_COMPARISONS:
                self._jobs.pop(min(self._jobs))
            return number

    def progress(self, number: int, wait: float) -> dict[str, Any]:
        found = self._jobs.get(number)
        if found is None:
            raise HTTPException(404, "this comparison is not known any more: compare again")
        return found.progress(wait) | {"job": number}


def _comparisons(request: Request) -> ComparisonJobs:
    return request.app.state.comparisons


@router.get("/diff")
def diff(
    runs: AllRuns,
    comparisons: Annotated[ComparisonJobs, Depends(_comparisons)],
    a: Name = "",
    b: Name = "",
    exact: bool = False,
    tolerance: Annotated[float, Query(ge=0, le=1e6, allow_inf_nan=False)] = 0.0,
    job: int | None = None,
) -> Response:
    """Compare the curves of two runs, or, if `exact`, their bits: with the number of an earlier answer see how far that
    is. Without runs: nothing."""
    if job is None:
        if not a or not b:
            return FiniteJsonResponse({"state": "idle"})
        pair = _open_pair(runs, a, b)
        if not exact:
            return FiniteJsonResponse({"state": "done", **compare_curves(*pair).as_json()})
        job = comparisons.start(*pair, tolerance)
    return FiniteJsonResponse(comparisons.progress(job, WAIT_SECONDS))
