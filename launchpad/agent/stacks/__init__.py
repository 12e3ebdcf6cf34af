"""Dumps the ranks' stacks from outside, without stopping the ranks."""
