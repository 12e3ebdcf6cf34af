"""Masks secrets: the values of variables and arguments whose names say that they are secret, and passwords in URLs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

MASK = "***"

_SECRET_ENDS = (
    *("TOKEN", "TOKENS", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "KEYS"),
    *("CREDENTIAL", "CREDENTIALS", "AUTH", "COOKIE", "DSN"),
)
_SECRET_WORDS = {"PASS", "PW", "PAT"}

# One-letter options without a value, which may stand before the x: -qx NAME=VALUE.
_FLAGS = "[mqv]*"

_IN_URL = re.compile(r"(\b[\w+.-]+://[^\s/:@]*:)[^\s/@]+(?=@)")


def is_secret(name: str) -> bool:
    """Whether a name of a variable or an option says that its value is secret."""
    words = [word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word]
    return any(word.endswith(_SECRET_ENDS) or word in _SECRET_WORDS for word in words) or (
        len(words) > 1 and words[-1] == "PWD"
    )


def masked_environ(environ: Mapping[str, str], hidden: Collection[str] = ()) -> dict[str, str]:
    """The variables, with secrets and the values of `hidden` masked."""
    return {
        name: MASK if value and (name in hidden or is_secret(name)) else _masked_url(value)
        for name, value in environ.items()
    }


def masked_words(words: Iterable[str]) -> list[str]:
    """A command line with secrets masked: --api-key VALUE, --api-key=VALUE, API_KEY=VALUE, and all that --env sets."""
    found, hides, sets = [], False, False
    for word in words:
        name, equals, _ = word.partition("=")
        option = name.startswith("-") and not equals
        if hides and not word.startswith("-"):
            word = MASK
        elif equals and (sets or is_secret(name) or re.match(f"--env$|-{_FLAGS}x.", name)):
            word = f"{name}={MASK}"
        hides = option and is_secret(name)
        sets = option and re.fullmatch(f"--env|-{_FLAGS}x", name) is not None
        found.append(_masked_url(word))
    return found


def _masked_url(text: str) -> str:
    return _IN_URL.sub(rf"\1{MASK}", text)
