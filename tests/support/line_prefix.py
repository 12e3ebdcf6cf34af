"""What the tests of line prefix share."""

from __future__ import annotations

import os

from tests.support.logs import Piece

HERE = os.uname().nodename

BY_HOST = "${hostname}:${rank}: "

PIECES: list[Piece] = [(0, rank, 1, 1.0 + rank / 1000, f"up\nrank {rank}\n") for rank in range(4)]
PIECES.append((1, 3, 1, 20.0, "again\n"))
