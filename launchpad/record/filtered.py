"""Picks the lines of all ranks that contain one of some texts: torchrun's --duplicate-stdout-filters."""

from __future__ import annotations

# A line that never ends is searched in pieces of this size.
LONGEST_LINE = 1 << 20


class Filter:
    """Picks lines from one stream, however its bytes arrive."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._held: dict[int, bytes] = {}

    def pick(self, rank: int, data: bytes) -> bytes:
        """The lines completed by `data` that contain one of the texts, each with its rank in front."""
        *whole, self._held[rank] = (self._held.get(rank, b"") + data).split(b"\n")
        if len(self._held[rank]) > LONGEST_LINE:
            whole.append(self._held.pop(rank))
        mark = b"[%d] " % rank
        return b"".join(mark + line + b"\n" for line in whole if any(text in line for text in self._texts))
