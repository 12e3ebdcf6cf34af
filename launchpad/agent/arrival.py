"""Where the bootstrap of a host leads: to the guard, forked from a kept image if one fits, to `warm` or to `doctor`."""

from __future__ import annotations

import gc
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any, NoReturn

from .. import linux
from ..image import Cold, place
from . import guard

if TYPE_CHECKING:
    from ..image.keeper_link import ForkRequest

Asked = dict[str, Any]


def main(asked: Asked) -> NoReturn:
    """Do what the head asks for (transport/ssh/bundle.py): {"warm"}, {"checkup"}, {"image": what ranks need}, or {}.

    {"hold"}: the agent is to be kept while the head is away (holder.py). "checkup" has the path at which the keeper of
    images would listen, if the head knows that: on its own machine.
    """
    gc.set_threshold(50_000)  # as in __main__.py
    if "hold" in asked:
        from . import holder

        holder.begin(**asked["hold"])
    environ = {name: value for name, value in os.environ.items() if name}
    if "checkup" in asked:
        from .checkup.answers import Checkup

        Checkup(asked["checkup"] or place.path(environ)).run()
    if "warm" in asked:
        _warm(environ)
    why_cold, held = "", None
    if "image" in asked and place.exists(environ):
        why_cold, held = _use_image(asked["image"], environ)
    guard.main(None, why_cold, held)


def _use_image(wanted: Asked, environ: dict[str, str]) -> tuple[str, int | None]:
    """Have a guard forked from an image, and exit with it. If that can't be, return why not.

    Also returns the connection to the keeper: it makes what was lacking when that ends.
    """
    from ..image.keeper_link import connect

    keeper = connect(environ)
    if keeper is None:
        return "", None
    keeper.want(_request(wanted, environ))
    try:
        keeper.ask_to_fork(0, 1, 2, None, sys.orig_argv, environ)
        forked = keeper.forked()
    except Cold as reason:
        return str(reason), os.dup(keeper.fileno())
    return _exit_with(forked)  # it does not return


def _request(wanted: Asked, environ: dict[str, str]) -> ForkRequest:
    from ..image.keeper_link import ForkRequest
    from ..protocol.defaults import defaults_for
    from .host import resources

    cores = resources.usable_cores()
    ranks = wanted["ranks"]
    if not isinstance(ranks, int):  # auto, cpu, gpu
        ranks = (ranks != "cpu" and resources.visible_gpus()) or cores
    variables = {**environ, **wanted["environ"]}
    return ForkRequest(
        python=sys.executable,
        preload=tuple(wanted["preload"]),
        environ=wanted["environ"],
        defaults=defaults_for(cores // ranks),
        forks=wanted["forks"] and not any(variables.get(name) for name in wanted["never"]),
    )


def _exit_with(forked: int) -> NoReturn:
    """Be what sshd waits for until the guard has ended."""
    from .host import processes

    processes.outlive_signals()
    ended = select.poll()
    ended.register(forked, select.POLLIN)
    ended.poll()
    os._exit(0)


def _warm(environ: dict[str, str]) -> NoReturn:
    """Answer one request."""
    from ..image import keeper_control
    from ..protocol import wire
    from ..protocol.events import KeeperReply

    decoder = wire.Decoder()
    while data := os.read(0, 1 << 16):
        for command in decoder.feed(data):
            answer = keeper_control.ask(command.request, environ)
            linux.write_all(1, wire.encode(KeeperReply(time.monotonic_ns(), answer)))
            os._exit(0)
    os._exit(1)
