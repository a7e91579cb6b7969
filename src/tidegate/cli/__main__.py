"""`python -m tidegate.cli`: the same program where no script was installed."""

from tidegate.cli import main

main()
