"""`launchpad bench`: what the ranks measure, and the plain arithmetic on it. Only the ranks' modules import torch."""
