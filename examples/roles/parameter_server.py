"""A parameter server after the textbook: it holds the weights, adds each gradient that a worker pushes, in the order in
which they come, and answers with what the weights are then."""

from __future__ import annotations

import os
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener

import torch

RATE = 0.1

weights = torch.zeros(4)
lock = threading.Lock()


def serve(worker: Connection) -> None:
    """Take the gradients of a worker; None asks for the weights only."""
    try:
        while True:
            gradient = worker.recv()
            with lock:
                if gradient is not None:
                    weights.sub_(RATE * torch.tensor(gradient))
                worker.send(weights.tolist())
    except EOFError:  # it has ended
        worker.close()


key = os.environ["TORCHELASTIC_RUN_ID"].encode()  # all ranks of the job have it, and nobody else
with Listener(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_PUSH"])), authkey=key) as listener:
    while True:
        try:
            threading.Thread(target=serve, args=(listener.accept(),), daemon=True).start()
        except (AuthenticationError, EOFError, ConnectionError):  # who looks whether we are ready
            pass
