"""Launchpad: turn one command into N supervised ranks of a distributed program.

This file is imported by every process of a job, so it imports nothing heavy itself.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
