"""Small modules without dependencies on other packages, used in every process: driver, workers and supervisors.

Each module is an entry point of its own: `trees` (nested containers of values), `functions` (references to
functions, and loading them in a worker), `files` (locks and atomic replacement of files), `record_format`
(checksummed records on disk), `gpus` (the GPUs of this host), `platform_id` (properties that decide the bits of
results), `dlpack` (arrays of other libraries), `html` (tables for notebooks), `temp_dirs`, `remote_errors`
(exceptions of other processes), `plugins` (sources and sinks of other packages), and checks and hints for mistakes in
calls of the API (`arguments`, `import_guard`, `misuse_hints`).
"""
