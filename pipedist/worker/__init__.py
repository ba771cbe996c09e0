"""The worker: executes replica functions, and reports their results to the scheduler.

Entry points: `process.run_process` is the life of a worker process, from its first line to its exit code;
`supervisor.run_worker` starts such processes on a host and keeps one of them alive. In the worker process,
`driver.Driver` executes the commands of `machine.WorkerMachine`, the sans-I/O state machine of the protocol, and
calls user code in between. The supervisor runs in a process of its own, without user code. The driver process
uses `context`, `variables` and `array_isolation` for code that runs outside of replica functions.
"""
