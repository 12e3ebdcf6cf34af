"""The nursery: one process per node that imports torch once and forks the ranks. Needs nothing of launchpad's own."""
