"""The paper's tables as one command: jobs, running them, and collecting their results."""
