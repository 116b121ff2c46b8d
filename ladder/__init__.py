"""Rows of runs: what is to run, and running it."""
