"""Command line of flashqla: one file per command, `console.py` prints, `app.py` maps errors to exit codes."""


def main() -> None:
    """Entry point."""
    from flashqla import signals

    signals.handle(signals.leave)  # first of all: what the commands import takes longer than some of them
    from flashqla.cli import app

    app.main()
