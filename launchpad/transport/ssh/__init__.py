"""Nodes that are reached over SSH."""
