"""Training: joins a model with a task, and owns every side effect of it."""
