"""The worker: a process that executes replica calls."""
