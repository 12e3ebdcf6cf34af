"""Sinks: whoever shows or keeps what happens in a job. Each consumes the event stream."""
