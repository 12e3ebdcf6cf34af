"""A job as pure values: what was requested (spec), what is run (plan), how it ended (outcome). No I/O."""
