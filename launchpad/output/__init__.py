"""Writes bytes, for console and record: the writer thread, open files, and the terminal's status line."""
