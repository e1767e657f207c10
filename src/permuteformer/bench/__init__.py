"""Benchmarks of time and memory: each case runs in its own process, and cases that are compared alternate."""
