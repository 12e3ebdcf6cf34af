"""Lines that hold one of some texts, of all ranks in one file: torchrun's --duplicate-stdout-filters."""

from __future__ import annotations

# A line that never ends is looked through in pieces of this size.
LONGEST_LINE = 1 << 20


class Filter:
    """Picks the lines of one stream, whichever way their bytes are cut."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = [text.encode(errors="surrogateescape") for text in texts]
        self._held: dict[int, bytes] = {}

    def pick(self, rank: int, data: bytes) -> bytes:
        """The lines that `data` completes and that hold a text, each behind its rank."""
        *whole, self._held[rank] = (self._held.get(rank, b"") + data).split(b"\n")
        if len(self._held[rank]) > LONGEST_LINE:
            whole.append(self._held.pop(rank))
        mark = b"[%d] " % rank
        return b"".join(mark + line + b"\n" for line in whole if any(text in line for text in self._texts))
