"""A job as values: what was asked for (spec), what is run (plan), how it ended (outcome). Nothing here does I/O."""
