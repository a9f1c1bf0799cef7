"""`python -m paceline` is the `paceline` command."""

from paceline.util.interrupts import end_interrupted, interrupt_ends_process


def main() -> None:
    """The `paceline` command as a process."""
    try:
        with interrupt_ends_process():
            from paceline.commands import command
        command()
    except KeyboardInterrupt:
        end_interrupted()


if __name__ == "__main__":
    main()
