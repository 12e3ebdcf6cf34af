"""Ports and addresses of this node."""
