"""This node's part in MPI worlds, over PMI-1 and PMIx."""
