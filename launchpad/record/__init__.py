"""Records jobs: sinks that keep the event stream, and readers of what they kept."""
