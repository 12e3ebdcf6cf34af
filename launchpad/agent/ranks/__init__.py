"""The ranks' processes: starting them, feeding their standard input, signalling them."""
