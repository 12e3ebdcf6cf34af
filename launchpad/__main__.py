"""`python -m launchpad` is the console command."""

from launchpad.cli.entry import main

main()
