"""What runs on a node. Standard library only: this package, wire.py and events.py can be shipped there alone."""
