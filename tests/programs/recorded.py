"""torch's @record writes the error file."""
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    if os.environ["RANK"] == "1":
        raise KeyError("no such column")
    time.sleep(600)
main()
