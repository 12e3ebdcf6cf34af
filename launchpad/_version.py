"""The version, for the package, its build, and the nodes that compare theirs."""

__version__ = "0.1.0"
