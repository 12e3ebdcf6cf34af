"""`launchpad.run`: calls a function on N ranks and returns their results. The head runs in the caller's process."""
