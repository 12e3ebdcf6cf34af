"""One job from typed options to its exit code: what the command line and launchpad.run share."""
