"""Pipelines: a spec in, an async stream of results out.

| module | what it decides |
|---|---|
| `doors` | `open` and `run`; imports the rest after the fork server is on its way |
| `own_thread` | work in a thread that its caller waits for, and ends with Ctrl-C |
| `runs` | a run as the user sees it, between `open` and its results |
| `execution` | phases and passes, carried out |
| `training`, `states`, `gating` | readings that take turns through states |
| `result`, `subscription` | what the user reads |
"""
