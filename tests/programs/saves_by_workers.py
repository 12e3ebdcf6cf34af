"""Saves when it is asked to stop, with batches that its DataLoader's workers bring; until there is a file `go`."""
import os, signal, sys
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 1 << 40
    def __getitem__(self, place):
        return place

def main():
    asked = []
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, lambda signum, _: asked.append(signal.Signals(signum).name))
    left, saving = 100, False
    workers = 1 if sys.argv[1] == "spawn" else 2  # each imports torch
    for place, _ in enumerate(DataLoader(Numbers(), num_workers=workers, multiprocessing_context=sys.argv[1])):
        if place == 10:
            print("ready", flush=True)
        if asked and not saving:
            saving = True
            print("saving", flush=True)
        left -= saving and os.path.exists("go")
        if not left:
            break
    print("saved after", *asked, flush=True)

if __name__ == "__main__":
    main()
