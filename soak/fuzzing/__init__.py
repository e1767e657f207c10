"""Any input whatever: taken, or refused in a sentence; a target a class, a process a share of its inputs."""
