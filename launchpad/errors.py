"""What can go wrong before a job runs.

    LaunchpadError
    ├── UsageError    what the user asked for can't be done: exit code 2
    └── NodeError     a node could not be reached or set up: exit code 3

The message is one sentence for the user: what is wrong, where, and what to do about it.
"""


class LaunchpadError(Exception):
    """Base of all errors that end `launchpad` with a message instead of a traceback."""

    exit_code = 1


class UsageError(LaunchpadError):
    """The request can't be carried out as it stands; nothing was started."""

    exit_code = 2


class NodeError(LaunchpadError):
    """A node could not be reached or set up; nothing was started."""

    exit_code = 3
