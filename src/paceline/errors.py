"""The base of every error that is a sentence for the user rather than a bug."""


class PacelineError(Exception):
    """Says what was wrong, where, and what to write instead. The command line prints it without a traceback."""
