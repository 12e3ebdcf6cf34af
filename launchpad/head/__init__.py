"""The head, one per job: owns all state, makes every decision, and never imports torch."""
