"""Simulates runs in virtual time: the real orchestrator in front of simulated GPUs."""
