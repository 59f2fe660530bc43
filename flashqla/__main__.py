"""`python -m flashqla`."""

from flashqla.cli.app import main

main()
