"""Authentication: offer the keys one by one, and if none is taken say which were tried and what to do."""

from __future__ import annotations

import time
from collections.abc import Sequence

import paramiko

from launchpad.errors import ConnectError
from launchpad.transport.ssh.config import DEFAULT_PORT, Destination
from launchpad.transport.ssh.keys import Keyring
from launchpad.transport.ssh.session import Dropped, Session

# Longer than this between two keys is a user at a prompt.
PROMPT_SECONDS = 1.0


def log_in(session: Session, destination: Destination, keys: Keyring) -> None:
    """Authenticate. Raises ConnectError; Dropped, where the host went away and a new connection may fare better."""
    tried: list[str] = []
    notes: list[str] = []
    methods: Sequence[str] = ("publickey",)
    answered = time.monotonic()
    for offer in keys.offers(destination, notes):
        if not session.is_active():
            ended = _ended(session, destination, tried)
            # sshd's LoginGraceTime may be over before the user has found the passphrase: it is known the next time.
            raise ended if time.monotonic() - answered < PROMPT_SECONDS else Dropped(ended)
        tried.append(offer.label)
        try:
            rest = session.auth_publickey(destination.user, offer.key)
        except paramiko.BadAuthenticationType as error:
            methods = error.allowed_types
            break
        except (paramiko.SSHException, EOFError, OSError) as error:
            if session.is_active() and "imeout" in str(error):
                text = f"{destination.place} did not answer to {offer.label} within {session.auth_timeout:g} s; try ssh"
                raise ConnectError("timed out", destination.name, f"{text} {destination.name}") from None
            if not session.is_active():
                raise _ended(session, destination, tried, error) from None
            answered = time.monotonic()
            continue
        if not rest:
            return
        if "publickey" in rest:  # one key more
            continue
        text = f"{destination.place} takes {offer.label}, but wants {' or '.join(rest)} besides, for which launchpad"
        mend = "let it be content with a key: AuthenticationMethods in sshd_config"
        raise ConnectError("authentication", destination.name, f"{text} can't ask; {mend}")
    else:
        try:
            # What else it would take is told to a request without credentials only; a host may even let it in.
            session.auth_none(destination.user)
            return
        except paramiko.BadAuthenticationType as error:
            methods = error.allowed_types
        except (paramiko.SSHException, EOFError, OSError):
            pass
    raise ConnectError("authentication", destination.name, _refused(destination, tried, notes, methods))


def _refused(destination: Destination, tried: list[str], notes: list[str], methods: Sequence[str]) -> str:
    who = f"{destination.user!r} was refused by {destination.place}"
    if "publickey" not in methods:
        takes = " and ".join(methods) or "nothing"
        return (
            f"{who}, which takes {takes}, and launchpad has only keys; its sshd_config needs PubkeyAuthentication yes"
        )
    if tried:
        what = f"tried {', '.join(tried)}"
    else:
        names = destination.identity_files
        where = "the files that IdentityFile names" if names else "~/.ssh"
        what = f"there is no key to try in {where} or in an agent"
    if notes:
        what += f"; {'; '.join(notes)}"
    port = "" if destination.port == DEFAULT_PORT else f"-p {destination.port} "
    # Behind another host it is the configuration that knows the way.
    proxied = destination.proxy_jump or destination.proxy_command
    copy = f"ssh-copy-id {port}{destination.user}@{destination.name if proxied else destination.address}"
    return f"{who}, which takes {', '.join(methods)}; {what}; {copy}, or name the key in ~/.ssh/config"


def _ended(
    session: Session, destination: Destination, tried: list[str], error: Exception | None = None
) -> ConnectError:
    # paramiko's only word for a connection that the server closed.
    closed = error is None or not str(error) or "saw EOF" in str(error)
    if "too many" in session.farewell.lower() or (len(tried) > 1 and closed and not session.farewell):
        return ConnectError(
            "authentication",
            destination.name,
            f"{destination.place} hung up on {destination.user!r} after {len(tried)} keys (its MaxAuthTries): tried "
            f"{', '.join(tried)}; name the right one in ~/.ssh/config: IdentityFile, and IdentitiesOnly yes",
        )
    when = f"at {tried[-1]}" if tried else "before the first key"
    why = f" ({session.farewell or error})" if session.farewell or not closed else ""
    text = f"the connection to {destination.place} ended during authentication, {when}{why}; its sshd's log says why"
    return ConnectError("authentication", destination.name, text)
