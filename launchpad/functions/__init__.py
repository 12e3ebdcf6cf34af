"""`launchpad.run`: a function on N ranks, with what they return; the head of the job is in the caller's process."""
