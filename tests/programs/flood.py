"""Print N numbered lines on stdout (and, with "both", on stderr), in writes that are cut anywhere."""
import os, random, sys
rank, count = os.environ["RANK"], int(sys.argv[1])
both = "both" in sys.argv
rng = random.Random(int(rank))
text = b"".join(b"rank %s line %07d %s\n" % (rank.encode(), i, b"x" * (i % 50)) for i in range(count))
for fd in (1, 2) if both else (1,):
    at = 0
    while at < len(text):
        at += os.write(fd, text[at : at + rng.randint(1, 9000)])
