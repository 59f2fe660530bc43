"""`python -m flashqla`."""

from flashqla.cli import main

main()
