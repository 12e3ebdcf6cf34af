"""The messages between head and agent, and their encoding."""
