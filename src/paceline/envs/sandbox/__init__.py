"""Runs untrusted programs in a sandbox and tests them from outside.

Two processes, so that a solution never meets its tests. The *grader* (`grader.py`, in one of our workers) runs them;
where they call the solution, the arguments travel to the *cell* (`cell.py`), which runs the solution and sends back
plain data. So nothing a solution prints, patches, overloads or exits can turn a failing test into a passing
one: all it can do is answer.

The cell lives in a *jail*. Where the kernel allows, that is a set of namespaces of its own: no network, no files but
Python's and an empty folder, no other process in sight, no privileges. Elsewhere (macOS, or a container that forbids
namespaces) a guard inside the interpreter ends a program that reaches for the network, foreign files or processes; it
stops everything a program does through Python, not a program that breaks the interpreter itself. The environment's
metric `sandbox` is 1 under the kernel's jail and 0 under the guard. Limits on time, memory, file sizes and processes
hold in both (but root has no limit on processes under the guard, which lets it start none anyway).
"""
