"""Generators of task data: seeded and parallel, with the same data for any number of processes."""
