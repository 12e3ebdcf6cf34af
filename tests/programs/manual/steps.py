import launchpad

left = launchpad.stop_by()
print("no limit" if left is None else "time for a step" if left > 60 else "save now")
