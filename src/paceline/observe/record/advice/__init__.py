"""Advisories: problems that a run's own metrics show, with the evidence, the key to change, and how sure it is."""

from paceline.observe.record.advice.measures import Advisory, Knob
from paceline.observe.record.advice.memory import AdviceMemory
from paceline.observe.record.advice.telling import RULES, advise
from paceline.observe.record.advice.window import AdviceWindow, sight_of

__all__ = ["RULES", "AdviceMemory", "AdviceWindow", "Advisory", "Knob", "advise", "sight_of"]
