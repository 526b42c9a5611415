"""The parts of sweep.py: resolved runs of a study, their folders, estimates and processes."""
