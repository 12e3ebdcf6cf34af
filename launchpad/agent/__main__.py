"""Entry point of a node's guard and agent: `python -I -S .../launchpad/agent/__main__.py [ASKED_FD [STDIN_FD]]`.

-I and -S keep the user's PYTHON* variables and site-packages out of the agent, so this file adds the package to the
import path itself.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from launchpad.agent import guard

asked, stdin = [*map(int, sys.argv[1:]), None, None][:2]
guard.main(stdin, asked=asked)
