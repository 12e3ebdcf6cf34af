"""Entry point of a node's guard and agent: `python -I -S .../launchpad/agent/__main__.py [ASKED_FD [STDIN_FD]]`.

-I and -S keep the user's PYTHON* variables and site-packages out of the agent, so this file adds the package to the
import path itself.
"""

import gc
import os
import sys

# What is imported is to stay, and each look for cycles in the agent would copy what it shares with the guard.
gc.set_threshold(50_000)

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from launchpad.agent import guard  # noqa: E402

asked, stdin = [*map(int, sys.argv[1:]), None, None][:2]
guard.main(stdin, asked=asked)
