"""Open and run a spec: from a document to an async stream of results.

The entry points are `open` and `run` in `api`, `open_replay` in `replay`, and `document` and `query_status`
in `diagnostics`. All of this code runs in the driver process (a replay runs in the process of its command);
worker processes import none of it.

| module | content |
|---|---|
| `api` | `open` and `run`: start the fork server, then import the rest |
| `run`, `result`, `subscription` | the run as the user sees it: its lifetime, results and streams |
| `progress` | a bar, or lines, that show the progress of a run |
| `execution`, `pass_execution` | phases one after the other; one pass step by step |
| `programs`, `pass_feeds` | the inputs of a pass: its program for workers, its feed |
| `kept_runs`, `kept_values`, `rebatching` | values that other passes read, and their division into other steps |
| `folds`, `gather_fold`, `pass_folds` | reductions and gathers, in step order |
| `training`, `state_history` | states, their updates, and the versions that are kept for replays |
| `quarantine` | elements that are set aside |
| `identity`, `pass_journal`, `resume` | when a run can be resumed, and the snapshots for that |
| `call_keys`, `replay`, `call_replay` | the name of a call, and the call executed again |
| `diagnostics` | what a run waits for, and the socket that reports it |
"""
