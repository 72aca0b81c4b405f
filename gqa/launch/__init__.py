"""Runs the points of a sweep on this machine, under SLURM, or in a cloud."""
