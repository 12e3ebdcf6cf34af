"""console/message: how the launcher's own messages look."""

from __future__ import annotations

from launchpad.console.message import message_line
from launchpad.errors import failed_hosts


def test_each_line_has_the_prefix_or_is_indented() -> None:
    said = message_line("a host said:\n::error::forged\nlaunchpad: all well\n  a row\n\n\x1b]0;title\x07", False, False)
    assert said.split("\n") == [
        "launchpad: a host said:",
        "launchpad: : :error::forged",
        "launchpad: launchpad: all well",
        "  a row",
        "",
        "launchpad: \\x1b]0;title\\x07",
    ]


def test_what_hosts_say_stays_in_their_rows() -> None:
    text = failed_hosts({"n1": "refused\nall well", "n22": "no answer"}, 3, "correct the ports")
    assert message_line(f"error: {text}", False, True).split("\n") == [
        "launchpad: error: 2 of 3 hosts can't take part, so nothing was started:",
        "  n1   refused",
        "       all well",
        "  n22  no answer",
        "launchpad: correct the ports",
    ]
