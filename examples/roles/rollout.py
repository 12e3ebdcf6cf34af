"""A service that plays with the newest weights: GET /rollout answers what it got, PUT /weights takes new ones."""

from __future__ import annotations

import json
import os
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TARGET = 0.7  # the best action, which the policy is to find

weights = {"version": 0, "mean": 0.0}


class Handler(BaseHTTPRequestHandler):
    """Answers the trainer."""

    def do_GET(self) -> None:
        """Play a few rounds with the policy as it is; /health says that we are there."""
        actions = [random.gauss(weights["mean"], 0.1) for _ in range(8)]
        rounds = [(action, -abs(action - TARGET)) for action in actions]
        self.answer({"version": weights["version"], "rounds": rounds})

    def do_PUT(self) -> None:
        """Take new weights."""
        weights.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        print("plays with version", weights["version"], flush=True)
        self.answer({})

    def answer(self, found: object) -> None:
        """Send JSON."""
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line each."""


ThreadingHTTPServer(("127.0.0.1", int(os.environ["LAUNCHPAD_PORT_HTTP"])), Handler).serve_forever()
