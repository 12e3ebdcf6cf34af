"""What decides whether a kept image (`launchpad warm`) may stand in for a cold start, and how one asks for it."""

# What torch imports when a program makes its first optimizer: it takes as long as torch itself.
WITH_OPTIMIZERS = "torch._dynamo"


class Cold(Exception):
    """A kept image is not used. The text says why, and follows "no kept image was used: "."""
