"""Variables in replica functions and closures (tf.Variable's semantics).

`rules` defines what assignments and reads do, for the driver and the workers alike; `access` lets NumPy use
variables as arrays. The other modules run in the worker process: `replica` has the variables of one step
(entry points: `bind`, `ReplicaVariables`), `closures` those of a parameter server's closure (`Closure`).
"""
