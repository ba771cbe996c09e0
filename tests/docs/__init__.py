"""Every fenced block of README.md and of docs/ runs, or is checked.

A page is one test. Its blocks are used in order, in a folder that is empty at first. The language of the fence
decides what happens with a block:

| fence | effect |
|---|---|
| any, with `title="f.py"`, or after a line `` `f.py`: `` | written to that file; with ` (continued)`, added to it |
| ```` ```python ```` | executed; the blocks of a page share their names, and `await` is allowed at the top |
| ```` ```text title="Output" ```` | compared with what the Python block before it printed |
| ```` ```yaml ```` | with the key `pipedist`: a valid spec; otherwise keys of a spec, with valid values |
| ```` ```console ```` | each line after `$ ` is executed; its output is compared if the block shows some |
| ```` ```json ````, ```` ```toml ```` | parsed |
| ```` ```text ````, ```` ```csv ````, ```` ```dockerfile ````, ```` ```bash ```` | not used, unless it has a title |

In an expected output, `...` stands for any text, also of several lines. Differences of blanks, times, run ids, names of
workers and the closing table of a run are ignored. Standard
output and standard error are one text, as in a terminal, which is 88 characters wide. The page's folder is
shown as `/home/me/project`. A command that exits with another code than 0 is an error, unless the next command is
`echo $?`, whose output then is that code. `pip install 'pipedist[NAME]'` installs nothing: the extra must exist.
Give `--workers 2` (`-w 2`), and keep each command below a second: the suite runs all pages.

A comment right before the block changes that:

| comment | effect |
|---|---|
| `<!-- exit: 2 -->` | the last command of the block exits with this code |
| `<!-- repeated: UNTIL WHEN -->` | the last command is executed until it prints what the block shows |
| `<!-- invalid -->` | the spec has problems on purpose |
| `<!-- slow block: REASON -->` | the block is left to `make test-slow` |
| `<!-- not run: REASON -->` | the block is not used; `NOT_RUN_MAX` limits the number of these in all pages |

A comment anywhere in a page holds for the page:

| comment | effect |
|---|---|
| `<!-- files: specs/pi.yaml specs/pi.py -->` | files of the repository that are copied to the same paths |
| `<!-- slow: REASON -->` | the page is left to `make test-slow` |
| `<!-- needs: torch, make bench-torch -->` | the page is skipped where a module is missing; the target installs it |

Run one page: `pytest tests/docs -k quickstart`. Fill in its outputs: write `?` in place of each, and call
`python -m tests.docs docs/get-started/quickstart.md`; then replace what differs from run to run by `...`.
"""
