"""Advisories: problems that a run's own metrics show, with the evidence, the key to change, and how sure it is."""

from paceline.observe.record.advice.measures import Advisory, Knob
from paceline.observe.record.advice.rules import RULES, AdviceMemory, advise
from paceline.observe.record.advice.window import AdviceWindow, advice_window

__all__ = ["RULES", "AdviceMemory", "AdviceWindow", "Advisory", "Knob", "advice_window", "advise"]
