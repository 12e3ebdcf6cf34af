"""The head: one per job. It owns every decision and all state, and never imports torch."""
