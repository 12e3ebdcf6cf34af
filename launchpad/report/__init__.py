"""A job's record as a page to send around, and as a trace for Perfetto."""
