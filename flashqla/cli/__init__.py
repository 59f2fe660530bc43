"""Command line of flashqla: one file per command, `console.py` prints, `app.py` maps errors to exit codes."""
