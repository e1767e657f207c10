"""Readers of untrusted files: bounded memory, nothing executed, errors that name the file and the line."""
