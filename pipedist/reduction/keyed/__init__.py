"""Reductions by key: tables of sorted key columns and value columns, merged in the fixed tree.

`keys` groups rows by key columns, `values` has the arithmetic of the value columns, `table` the table and its merge,
`ranges` the parts in which large tables are merged. `texts` sorts and searches texts that are offsets and UTF-8 bytes.
All of it is NumPy on whole columns.
"""
