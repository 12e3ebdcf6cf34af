"""The forkserver: one process per node that imports torch once and forks the ranks."""
