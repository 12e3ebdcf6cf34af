import os

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and os.environ["RANK"] == "1":
    raise ConnectionError("the file server is down")
print("attempt", attempt)
