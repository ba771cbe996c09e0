"""Word counts and group-by in pipedist and its peers; `benchmarks.keyed` runs each in a process of its own.

A system has `Jobs(workers)`, a context manager whose entry starts its workers, with a method for each job. It returns
the number of keys, the sum of all values, and the largest value. Its module is run with the interpreter that has it.
"""
