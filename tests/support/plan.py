"""A node to lay out ranks on."""

from __future__ import annotations

from launchpad.protocol.events import AgentReady

NODE = AgentReady(
    time=0,
    wall=0.0,
    pid=1,
    hostname="node0",
    cores=8,
    gpus=0,
    visible_devices=None,
    open_files=1 << 20,
    processes=1 << 15,
    port=29501,
)
