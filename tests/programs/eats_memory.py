"""Touch memory until somebody ends it, as the first whom the kernel should choose."""
open("/proc/self/oom_score_adj", "w").write("1000")
blocks = []
while True:
    blocks.append(bytearray(b"x" * (8 << 20)))
