import os
import time

batches = [[1, 2], [3, 4], [], [5, 6]]
batch = batches[int(os.environ["RANK"])]
print("mean", sum(batch) / len(batch))
time.sleep(60)  # and more work
