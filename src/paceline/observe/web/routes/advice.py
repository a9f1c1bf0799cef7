"""Route that lists the advisories of a run."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from paceline.config.advice import AdviceConfig
from paceline.observe.record.advice import RULES, AdviceWindow, Advisory, advise, sight_of
from paceline.observe.record.advice.telling import silence
from paceline.observe.web.answers import FiniteJsonResponse
from paceline.observe.web.runs import OneRun

router = APIRouter()


@router.get("/advice")
def advice(run: OneRun) -> Response:
    """Every advisory with its evidence, and all that was looked for."""
    sight = sight_of(run)
    found = advise(sight)
    rules = [
        {
            "name": rule.name,
            "asks": rule.asks,
            "limit": getattr(sight.advice, rule.name),
            "help": AdviceConfig.model_fields[rule.name].description,
            "found": sum(advisory.rule == rule.name for advisory in found),
            "pauses": [env for env in sight.envs if rule.name in _grounds(sight, env)],
        }
        for rule in RULES
    ]
    told = [_told(sight, advisory) for advisory in found]
    return FiniteJsonResponse(
        {"steps": sight.steps, "trained": sight.trained, "silence": silence(sight), "rules": rules, "found": told}
    )


def _told(sight: AdviceWindow, advisory: Advisory) -> dict[str, Any]:
    """The advisory with each rollout in a few words, and each knob as it is written."""
    knobs = [asdict(knob) | {"text": knob.text, "flag": knob.flag} for knob in advisory.knobs]
    rollouts = [
        {"index": index} | {name: row[name].item() for name in ("step", "reward", "tokens")}
        for index in advisory.rollouts
        for row in [sight.rows[index - sight.first]]
    ]
    return asdict(advisory) | {"knobs": knobs, "rollouts": rollouts}


def _grounds(sight: AdviceWindow, env: str) -> Sequence[str]:
    own = sight.env(env).get("pause")
    return sight.advice.pause if own is None else own
