"""Rank 0 asks at a prompt and repeats the answer."""
import os
if os.environ["RANK"] == "0":
    name = input("name? ")
    print("hello", name)
else:
    print("stdin gives", repr(open(0).read()))
