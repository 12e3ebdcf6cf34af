"""The transport to nodes that dial in: TLS, and a proof by both sides that they know the job's secret.

On the wire, inside TLS, one JSON object per line; then frames, as on every link:

    node: {"launchpad": version, "nonce"}    head: {"launchpad": version, "nonce"}
    node: {"proof"}                          head: {"proof"} or {"error"}
    node: {"offer"}                          head: {"welcome": notes} or {"error"}
"""
