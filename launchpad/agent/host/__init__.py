"""The node: its resources, processes and files."""
