"""The command line, one file per command: argv becomes a JobSpec, an outcome becomes an exit code."""
