"""The transport to nodes that dial in: TLS, and a proof by both sides that they know the job's secret.

On the wire, inside TLS, one JSON object per line; then frames, as on every link:

    node: {"launchpad": version, "nonce"}    head: {"launchpad": version, "nonce"}
    node: {"proof"}                          head: {"proof"} or {"error"}
    node: {"offer"}                          head: {"welcome": notes} or {"error"}

Every launcher has a door like the head's. One that has lost its head asks at those of the others:

    node: {"ask"}                            door: {"leads": term}, {"led": [host, port], "term"},
                                                   {"seeks": age of its newest roster, or null} or {}
    node: {"offer"}                          door: {"led": [host, port], "term"}; {"wait"} if it has no head either: it
                                                   may lead soon; {"later"} if it has just found one
    head: {"led": [host, port], "term"}      door: as to {"ask"}. By this it learns who leads by now
"""
