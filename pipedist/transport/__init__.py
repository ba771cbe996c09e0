"""How messages and trees of arrays travel between the scheduler and its workers."""
