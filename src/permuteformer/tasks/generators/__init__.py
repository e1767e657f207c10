"""Data made by rule: seeded, in parallel, the same for the same seed whatever the number of processes."""
