import os, sys, time

own = os.environ
again = own["TORCHELASTIC_RESTART_COUNT"]
print("group", own["REPLICA_GROUP_ID"], "of", own["NUM_REPLICA_GROUPS"], "start", again, flush=True)
if own["REPLICA_GROUP_ID"] == "1" and own["RANK"] == "0" and again == "0":
    sys.exit(7)
time.sleep(1)
