"""The shells for which launchpad completes words, and how they ask for it."""

SHELLS = ("bash", "zsh", "fish", "tcsh")

# A shell asks what can stand at the cursor, and this variable names the shell.
COMPLETION = "_LAUNCHPAD_COMPLETE"
