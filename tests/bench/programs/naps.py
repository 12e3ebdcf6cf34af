"""Stay for a second."""
import time

time.sleep(1)
