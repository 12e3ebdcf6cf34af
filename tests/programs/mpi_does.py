"""Join the MPI world, print the names of its shared memory, and do WHAT: mpi_does.py WHAT [RANK]."""
import os
import signal
import sys

if sys.argv[1:] == ["absent", os.environ.get("RANK")]:
    sys.exit()

from mpi4py import MPI

world = MPI.COMM_WORLD
rank = world.Get_rank()
what = sys.argv[1]
chosen = int(sys.argv[2]) if len(sys.argv) > 2 else -1
with open("/proc/self/maps") as maps:
    names = {line.split("/dev/shm/")[1].split()[0] for line in maps if "/dev/shm/" in line}
if rank == 0:
    print(" ".join(["shm", *sorted(names)]), flush=True)
if what in ("abort", "raise", "exit", "kill"):  # only after rank 0 has printed them
    world.barrier()

if what == "sum":
    print("sum", rank, world.Get_size(), world.allreduce(rank + 1))
elif what == "once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    world.barrier()
    if rank == chosen:
        os.kill(os.getpid(), signal.SIGKILL)
elif what == "publish":
    if rank == 0:
        port = MPI.Open_port()
        MPI.Publish_name("a-service", port)
        world.barrier()
        peer = MPI.COMM_SELF.Accept(port)
        print("heard", peer.recv(source=0))
        peer.Disconnect()
        MPI.Unpublish_name("a-service", port)
        world.barrier()
    elif rank == 1:
        world.barrier()
        peer = MPI.COMM_SELF.Connect(MPI.Lookup_name("a-service"))
        peer.send("a word", dest=0)
        peer.Disconnect()
        world.barrier()
        try:
            MPI.Lookup_name("a-service")
        except MPI.Exception:
            print("gone")
    else:
        world.barrier()
        world.barrier()
elif what == "spawn":
    spawned = world.Spawn(sys.executable, args=[sys.argv[0], "spawned", "-1"], maxprocs=3)
    print("told", spawned.allreduce(rank))
    spawned.Disconnect()
elif what == "spawn-and-fail":
    world.Spawn(sys.executable, args=[sys.argv[0], "raise", "1"], maxprocs=2).barrier()
elif what == "spawned":
    parent = MPI.Comm.Get_parent()
    print("spawned", rank, world.Get_size(), parent.Get_remote_size(), parent.allreduce(10 + rank))
    parent.Disconnect()
elif rank == chosen:
    if what == "abort":
        world.Abort(5)
    elif what == "raise":
        raise ValueError("no good")
    elif what == "exit":
        sys.exit(7)
    elif what == "leave":
        os._exit(0)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
elif what == "finalize":
    MPI.Finalize()
    os._exit(0)

if what != "spawned":
    world.barrier()
