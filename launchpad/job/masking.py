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
_FLAGS = "mqv"

_IN_URL = r"(\b[\w+.-]+://[^\s/:@]*:)([^\s/@]+)(?=@)"

# A shorter value of a secret variable is looked for nowhere else: it may stand in any text by chance.
SHORTEST = 6


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
        elif equals and (sets or is_secret(name) or _sets_variable(name)):
            word = f"{name}={MASK}"
        hides = option and is_secret(name)
        sets = option and (name == "--env" or name[1:].lstrip(_FLAGS) == "x")
        found.append(_masked_url(word))
    return found


def _sets_variable(name: str) -> bool:
    """Whether it is --env (which = follows), or -xNAME."""
    short = name[1:].lstrip(_FLAGS) if name.startswith("-") else ""
    return name == "--env" or (short.startswith("x") and len(short) > 1)


class TextMask:
    """Hides the secrets of an environment, and passwords in URLs, in any text."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """`environ`: the values of its secret variables are hidden, if they aren't shorter than SHORTEST characters."""
        values = {value for name, value in environ.items() if len(value) >= SHORTEST and is_secret(name)}
        longest_first = sorted(values, key=len, reverse=True)
        self._values = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def __call__(self, text: str) -> str:
        """The text, as long as before: a star for each character of a secret."""
        text = self._values.sub(lambda found: "*" * len(found[0]), text)
        return re.sub(_IN_URL, lambda found: found[1] + "*" * len(found[2]), text)


def _masked_url(text: str) -> str:
    return re.sub(_IN_URL, rf"\1{MASK}", text) if "://" in text else text
