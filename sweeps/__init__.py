"""What sweep.py is made of: the runs of a study resolved, their folders, their estimates, and their processes."""
