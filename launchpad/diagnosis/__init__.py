"""Who failed first and why, and who holds up whom, in words and as JSON. Pure; sinks keep and tell it."""
