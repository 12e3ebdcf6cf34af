"""`python -m launchpad`, with the lines measured that its agent runs too.

coverage follows Python processes by a file in site-packages, which an agent, started with -I and -S, doesn't read. The
command and its agent come to it by this file instead: `python tests/support/measured.py run …`, or as the agent itself.
"""

import os
import runpy
import sys
from pathlib import Path

SITE = "LAUNCHPAD_MEASURED"  # where the agent finds coverage


def be_launchpad() -> None:
    sys.path[0] = str(Path(__file__).parents[2])  # of the checkout, as only that is measured
    import coverage

    from launchpad.transport import local

    os.environ[SITE] = str(Path(coverage.__file__).parent.parent)
    local._AGENT = __file__
    sys.argv[0] = "launchpad"
    from launchpad.cli.entry import main

    main()


def be_agent() -> None:
    sys.path.append(os.environ[SITE])
    import coverage

    coverage.process_startup()
    sys.path.remove(os.environ.pop(SITE))
    runpy.run_path(str(Path(__file__).parents[2] / "launchpad" / "agent" / "__main__.py"), run_name="__main__")


if sys.flags.isolated:
    be_agent()
else:
    be_launchpad()
