"""agent/host/kernel_log: what of the kernel's log is about hardware."""

from __future__ import annotations

from pathlib import Path

from launchpad.agent.host.kernel_log import hardware_errors

LOG = """\
4,100,5000000,-;NVRM: Xid (PCI:0000:07:00): 63, an old one
4,101,9000000,-;NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.
 SUBSYSTEM=pci
6,102,9100000,-;eth0: link up
3,103,9200000,-;blk_update_request: I/O error, dev nvme0n1, sector 2048 \x1b[1m
nonsense
"""


def test_errors_since_a_time(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(LOG)
    assert hardware_errors(8.0, str(log)) == [
        "NVRM: Xid (PCI:0000:07:00): 79, GPU has fallen off the bus.",
        "blk_update_request: I/O error, dev nvme0n1, sector 2048 \\x1b[1m",
    ]
    assert hardware_errors(10.0, str(log)) == []


def test_a_log_that_is_hidden_says_nothing(tmp_path: Path) -> None:
    assert hardware_errors(0.0, str(tmp_path / "none")) == []
