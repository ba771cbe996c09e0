"""Durable progress of a run: an append-only journal, and files beside it with its values.

    .pipedist/journal/
        journal                 records: the committed calls of each pass, and their values
        0-dataset.rows.log      values that grow with the run, record by record
        0-dataset.folds.17      a value that is replaced as a whole, too large for a record

Entry points: `writer.Journal` in the driver process of a run, and `history.read_history` in every process that reads a
journal: a driver that resumes a run, `pipedist audit`, `pipedist replay`. Workers never access the journal.

| module | content |
|---|---|
| `log_format` | bytes: checksums, hash chain, torn tails; the system calls |
| `history` | the meaning of the records, and their consistency; `audit` |
| `writer` | the order in which data becomes durable |
"""
