"""What decides whether a kept image (`launchpad warm`) may stand in for a cold start, and how one asks for it."""
