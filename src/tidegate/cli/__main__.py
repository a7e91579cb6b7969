"""`python -m tidegate.cli`: the same program, without the installed script."""

from tidegate.cli import main

main()
