"""A checkup of this host (`launchpad doctor`), run from memory: no file is written, no agent started."""
