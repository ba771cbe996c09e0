"""What of a run is durable: an append-only journal, and the files beside it that hold its values.

    .pipedist/journal/
        journal                 records: which calls are committed, and what became of them
        0-dataset.rows.log      values that grow with the run, record by record
        0-dataset.folds.17      a value that is replaced as a whole, too large for a record

| module | what it decides |
|---|---|
| `frames` | bytes: length, CRC32, hash chain; what is a torn tail and what is damage |
| `disk` | the system calls, and nothing else |
| `logs` | files that grow by records of arrays |
| `history` | what the records mean, and whether they add up |
| `writer` | in which order things become durable |
| `differences` | what differs between two specs |
| `audit` | what a person is told about a journal |
"""
