"""The variables that ranks get where the user has not set them."""


def defaults_for(threads: int) -> dict[str, str]:
    """Those of a node whose ranks may have so many threads each."""
    return {"OMP_NUM_THREADS": str(max(1, threads)), "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
