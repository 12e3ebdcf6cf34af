"""Print a line and leave."""
print("here")
