"""What the user sees while a job runs: the ranks' output, and launchpad's own messages."""
