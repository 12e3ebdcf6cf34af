"""Ranks sum in steps, and rank 2 fails in the third in the way that is named."""
import os, sys, signal
import torch, torch.distributed as dist
how = sys.argv[1]
def train(rank):
    x = torch.ones(4)
    for step in range(1000):
        if step == 3 and rank == 2: fail()
        dist.all_reduce(x)
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, i):
        return {}["sample %d" % i]
def child(i): raise OSError(5, "bad block")
def fail():
    if how == "raise": raise ValueError("batch is empty")
    if how == "_exit": os._exit(3)
    if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if how == "segv":
        import ctypes; ctypes.string_at(8)
    if how == "early": sys.exit(0)
    if how == "exit": print("no data", file=sys.stderr); sys.exit(9)
    if how == "loader":
        for _ in torch.utils.data.DataLoader(Data(), num_workers=2): pass
    if how == "spawn":
        import torch.multiprocessing as mp; mp.spawn(child, nprocs=2)
    if how == "abort": os.abort()
    if how == "group": raise ExceptionGroup("two", [ValueError("one"), OSError("other")])
    if how == "excepthook":
        sys.excepthook = lambda *a: print("mine", file=sys.stderr)
        raise KeyError("lr")
if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(dist.get_rank())
