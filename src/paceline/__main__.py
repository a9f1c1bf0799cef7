"""`python -m paceline` is the `paceline` command."""

import sys


def main() -> None:
    """The `paceline` command as a process: Ctrl-C while its modules are loaded is no traceback either."""
    try:
        from paceline.commands import command

        command()
    except KeyboardInterrupt:
        print("paceline: stopped", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
