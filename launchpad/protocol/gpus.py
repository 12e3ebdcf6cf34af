"""What a node reports of its GPUs (`launchpad gpus`)."""

from ..named import NamedTuple


class GpuLease(NamedTuple):
    """Who has a GPU."""

    user: str
    job: str
    since: float  # seconds since 1970; 0: not known


class SeenGpu(NamedTuple):
    """A GPU, or a slice of one (MIG)."""

    number: int  # nvidia-smi's, of the GPU
    uuid: str
    name: str  # the model
    used: int  # bytes
    total: int
    faulty: bool  # it has had memory errors that could not be corrected
    users: list[str]  # whose processes compute there
    lease: GpuLease | None
