"""Authenticate: offer the keys one by one; if none is accepted, say which were tried and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence

import paramiko

from launchpad.errors import ConnectError
from launchpad.transport.ssh.config import DEFAULT_PORT, Destination
from launchpad.transport.ssh.keys import Keyring
from launchpad.transport.ssh.session import Session
from launchpad.transport.ssh.turns import Dropped

# A longer pause between two keys means that the user was at a prompt.
PROMPT_SECONDS = 1.0

_OTHERWISE = "give --ssh openssh on a terminal, or set its sshd_config to accept a key alone"


class LoginRefused(ConnectError):
    """The host takes none of the keys. `methods`: the ways to log in that it would have taken further."""

    def __init__(self, destination: Destination, text: str, methods: Sequence[str]) -> None:
        super().__init__("authentication", destination.name, text)
        self.methods = methods


def log_in(session: Session, destination: Destination, keys: Keyring) -> None:
    """Authenticate. Raises ConnectError, or Dropped if the host hung up and a new connection may work."""
    tried: list[str] = []
    notes: list[str] = []
    methods: Sequence[str] = ("publickey",)
    answered = time.monotonic()
    for offer in keys.offers(destination, notes):
        if not session.is_active():
            ended = _ended(session, destination, tried)
            # The user may need longer for a passphrase than sshd's LoginGraceTime; a retry already has the key.
            raise ended if time.monotonic() - answered < PROMPT_SECONDS else Dropped(ended)
        tried.append(offer.label)
        try:
            rest = session.auth_publickey(destination.user, offer.key)
        except paramiko.BadAuthenticationType as error:
            methods = error.allowed_types
            break
        except (paramiko.SSHException, EOFError, OSError) as error:
            if session.is_active() and "imeout" in str(error):
                text = f"{destination.place} did not respond to {offer.label} within {session.auth_timeout:g} s;"
                raise ConnectError("timed out", destination.name, f"{text} try ssh {destination.name}") from None
            if not session.is_active():
                raise _ended(session, destination, tried, error) from None
            answered = time.monotonic()
            continue
        if not rest:
            return
        if "publickey" in rest:  # it requires another key
            continue
        text = f"{destination.place} accepts {offer.label}, but also requires {' or '.join(rest)}, which paramiko is"
        raise LoginRefused(destination, f"{text} not used for; {_OTHERWISE}", rest)
    else:
        try:
            # sshd lists its methods only in reply to a request without credentials; a host may even accept that.
            session.auth_none(destination.user)
            return
        except paramiko.BadAuthenticationType as error:
            methods = error.allowed_types
        except (paramiko.SSHException, EOFError, OSError):
            pass
    raise LoginRefused(destination, _refused(destination, tried, notes, methods), methods)


def _refused(destination: Destination, tried: list[str], notes: list[str], methods: Sequence[str]) -> str:
    refused = f"{destination.place} refused user {destination.user!r}"
    if "publickey" not in methods:
        accepted = " and ".join(methods) or "nothing"
        return f"{refused}: it accepts {accepted}, but paramiko is used for keys only; {_OTHERWISE}"
    if tried:
        keys = f"tried {', '.join(tried)}"
    else:
        where = "the files named by IdentityFile" if destination.identity_files else "~/.ssh"
        keys = f"found no key in {where} or in an agent"
    if notes:
        keys += f"; {'; '.join(notes)}"
    port = "" if destination.port == DEFAULT_PORT else f"-p {destination.port} "
    # Behind a proxy only the configuration knows the route, so use the host's name there.
    proxied = destination.proxy_jump or destination.proxy_command
    copy = f"ssh-copy-id {port}{destination.user}@{destination.name if proxied else destination.address}"
    return f"{refused} (it accepts {', '.join(methods)}); {keys}; run {copy}, or name the key in ~/.ssh/config"


def _ended(
    session: Session, destination: Destination, tried: list[str], error: Exception | None = None
) -> ConnectError:
    # All that paramiko says if the server closed the connection.
    closed = error is None or not str(error) or "saw EOF" in str(error)
    if "too many" in session.farewell.lower() or (len(tried) > 1 and closed and not session.farewell):
        return ConnectError(
            "authentication",
            destination.name,
            f"{destination.place} disconnected user {destination.user!r} after {len(tried)} keys (MaxAuthTries): tried "
            f"{', '.join(tried)}; in ~/.ssh/config, name the right one with IdentityFile and set IdentitiesOnly yes",
        )
    when = f"at {tried[-1]}" if tried else "before the first key"
    reason = f" ({session.farewell or error})" if session.farewell or not closed else ""
    text = f"the connection to {destination.place} ended during authentication, {when}{reason}; see its sshd's log"
    return ConnectError("authentication", destination.name, text)
