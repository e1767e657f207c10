"""The paper's tables as one command: what is to be run, running it, and gathering what came of it."""
