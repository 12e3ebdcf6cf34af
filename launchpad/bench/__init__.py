"""`launchpad bench`: what the ranks measure, and the arithmetic on it. Only the ranks' modules import torch."""
