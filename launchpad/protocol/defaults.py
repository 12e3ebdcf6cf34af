"""The variables that ranks get where the user has not set them."""


def defaults_for(cores: int, ranks: int) -> dict[str, str]:
    """Those of a node with so many cores and ranks."""
    return {"OMP_NUM_THREADS": str(max(1, cores // ranks)), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
