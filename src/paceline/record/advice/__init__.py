"""What a run's own figures say against it: each with its evidence, the key to turn, and how sure it is."""

from paceline.record.advice.advisory import Advisory, Knob
from paceline.record.advice.rules import RULES, Rule, advise
from paceline.record.advice.window import AdviceWindow, sight_of

__all__ = ["RULES", "AdviceWindow", "Advisory", "Knob", "Rule", "advise", "sight_of"]
