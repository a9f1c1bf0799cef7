"""Runs a module as a child process that exits when its parent is gone, also while its imports take seconds.

python -m paceline.util.child_main MODULE ARGUMENTS ...
"""

import runpy
import sys

from paceline.util.process_exit import exit_with_stdin

if __name__ == "__main__":
    exit_with_stdin()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
