"""JAX over all ranks: each has devices of its own, and the sum is over those of all."""

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

jax.distributed.initialize()  # launchpad tells it the coordinator's address, the number of processes and this one's id
rank, size = jax.process_index(), jax.process_count()
parts = multihost_utils.process_allgather(jnp.array([rank + 1.0]))
print(f"process {rank} of {size}: the sum is {float(parts.sum()):g}")
