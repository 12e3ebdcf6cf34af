"""Entry point of a node's guard and agent: `python -I -S .../launchpad/agent/__main__.py [STDIN_FD | zygote]`.

-I and -S keep the user's PYTHON* variables and site-packages out of the agent, so this file adds the package to the
import path itself.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from launchpad.agent import guard

if sys.argv[1:] == ["zygote"]:
    from launchpad.agent import zygote

    zygote.main()
guard.main(stdin_fd=int(sys.argv[1]) if len(sys.argv) > 1 else None)
