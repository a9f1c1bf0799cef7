"""Predicts the memory and the step time of a run file before anything is loaded, and compares them with the run."""
