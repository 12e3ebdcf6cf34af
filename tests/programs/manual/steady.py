import time

time.sleep(2)
