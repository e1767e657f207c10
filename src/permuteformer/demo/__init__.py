"""A page to play with, on this machine only: what a permutation does to features, and what a trained model makes of a text."""
