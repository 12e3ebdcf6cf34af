"""Judges the facts of a checkup (`launchpad doctor`): what is wrong, on which host, and what to type. Pure."""
