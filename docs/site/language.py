"""The reference of the spec, generated from its models.

The description of a key is in its field; this module has only the texts that belong to no single key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from pydantic.fields import FieldInfo

from pipedist.spec.datasets import DATASET_KEYS, SOURCES, ArraysSource, DatasetSpec
from pipedist.spec.fields import COLUMN_TYPES, Section, expected_phrase, keys_of, summary
from pipedist.spec.interpolation import DEPTH_MAX
from pipedist.spec.model import CheckpointSection, ClusterSection, SpecSection
from pipedist.spec.outputs import OUTPUT_ENDINGS, SINK_SECTIONS
from pipedist.spec.plugins import plugin_sinks, plugin_sources, section_of
from pipedist.spec.scalars import as_yaml
from pipedist.spec.stages import STAGES, RunSpec
from pipedist.spec.validation import section_in
from pipedist.spec.yaml_text import DOCUMENT_BYTES_MAX, NODES_MAX

LINK = re.compile(r"docs/([\w/-]+\.md)")  # of descriptions, which editors show too

_INTRODUCTION = """\
# The spec language, version 1

A dataset is divided into steps, and each step into `replicas` shards. This division and the seed decide every
bit of the result. Your function runs once on each shard, in any free worker process: the number of workers,
their hosts and their deaths never change the result. The per-replica values stream back and are combined in a
fixed order: `reduce` folds them, `gather` concatenates them, `update` carries a state to the next step.

```yaml
pipedist: 1
params: {late_after_min: 15}
replicas: 4
dataset:
  csv: {path: "data/flights*.csv", columns: {carrier: str, dep_delay: float32}}
  batch: 4096
stages:
  delays:
    run: flights:delays
    with: {late_after_min: "${params.late_after_min}"}
  late: {reduce: sum, of: delays, axis: 0}
  rows: {gather: 0, of: delays}
outputs: {late: late.json, rows: rows.npz}
```

`pipedist validate SPEC` reads only the file and reports every problem at once, each with its line, its column,
the expected value, and the nearest allowed name. `pipedist schema` prints the JSON Schema (draft-07), for
editors. This page describes all of version 1.
"""

_DOCUMENT = f"""\
## The document

A spec is one document of YAML 1.2 in UTF-8, so `no`, `on` and `1:20` are text, `0o17` is 15 and
`017` is 17. Keys are text (a number as a key needs quotes) and unique. There are no tags and no merge keys.
Anchors and aliases are read, and their expansion counts: a document has at most {DOCUMENT_BYTES_MAX:,} bytes,
{NODES_MAX:,} values and {DEPTH_MAX} levels. Integers have at most 64 bits, and a number beyond float64 is an
error. `.nan` and `.inf` are allowed in `params`, `with` and `init`, and are errors as durations.

In the embedded API a spec may also be a dict of the same form, in which a function may be a
callable, values below `with` and `init` may be arrays, and a source may be `{{"arrays": tree}}`.
Problems then have a path, such as `stages.late.reduce`, instead of a line.

Names of datasets, stages and parameters are made of letters, digits, `_` and `-`, and begin with
a letter or `_`. Datasets and stages share one namespace.

## References

In a value,

- `${{params.NAME}}` is the parameter `NAME`; `--set NAME=VALUE` overrides its default;
- `${{env.NAME}}` is the environment variable `NAME`, which must be set, unless there is a default:
  `${{env.NAME:default}}`;
- `${{spec.dir}}` is the spec's folder, absolute;
- `${{stages.NAME}}` is the finished value of a `reduce` or `gather` with `per: run`. It is allowed only in the
  `with` of a stage, and alone; the stage begins when that value is complete;
- `${{state.NAME}}` is the state of an `update` before the step, with every earlier update applied. It is allowed
  only in the `with` of a stage, and alone; in a stage with `after: NAME` it is the last state;
- `$${{` is the text `${{`.

A value that is one reference and nothing else has the reference's type: `batch: ${{params.batch}}`
is an integer. Inside text a reference becomes text; a value of `--set` or the environment keeps its
spelling. Values of `--set` and of environment variables are read as YAML scalars (`3`, `true`, `text`) or
flow lists (`[1, 2]`). Defaults of parameters may contain `${{env.NAME}}` and `${{spec.dir}}`.
References are replaced in values, never in keys.
"""

_DATASETS = """\
## Datasets

A dataset has exactly one source key, and the keys below. Step s of an epoch has the elements
`[s*B, (s+1)*B)` of the dataset in its (shuffled) order, where B is `batch`; a step never crosses an
epoch. A step of m elements is divided into shards of ceil(m / replicas), in replica order; the last
ones are shorter or empty. Shard arrays are read-only and C-contiguous.
"""

_SOURCES = f"""\
### Sources

A `path` is a glob (`**` includes subfolders) or a list of globs, relative to the spec's folder.
With `pip install 'pipedist[fsspec]'` it may also be a URL (`s3://bucket/part-*.csv`).
Matches are expanded once and sorted; several files are one dataset in that order; no match is an
error. Types of `columns`: {", ".join(f"`{name}`" for name in COLUMN_TYPES)}.
"""

_TEXT = """\
### Text, bytes, lists and records

Values of any length are cells of an array of Python objects (`dtype=object`), which takes the bytes that there are.
A function may receive and return them:

| data | a function receives | a function may return |
|---|---|---|
| text (`str`) | a `<U` array, or an object array of str | either, or a NumPy `StringDType` array |
| binary | an object array of bytes, with zeros at their ends | the same; `S` arrays drop such zeros |
| a list of fixed length, as an embedding | an array with a further axis, `float32[n, 768]` | the same |
| other lists | an object array of arrays, one for each element | the same, also of lists |
| structs, lists of structs | an object array of dicts, or of lists of dicts | the same |
| JSON objects | a list of n dicts | a list of RECORDS: dicts, with text keys, of such values |

What happens to each value that a function returns, in `gather: 0` and its file:

| value | result | `.npy`, `.npz` | `.csv` | `.jsonl`, `.json` | `.parquet` |
|---|---|---|---|---|---|
| array `[n]` of numbers | concatenated; one dtype | array | cells | numbers; NaN as text | column of its type |
| array `[n, k]` | concatenated | array | error | lists | list of fixed size |
| `np.array([])` | no rows, and no dtype: fits all others | no rows | no rows | no rows | no rows |
| text, `<U` or object | text of any length | one width (see below) | text | text | string |
| bytes, object array | bytes with their zeros | `S`, if none ends with a zero | base64 | base64 | binary |
| object array of lists or dicts | as it is | error | error | lists, objects | list, struct |
| dates, `datetime64` | concatenated; one unit | array | ISO 8601 | ISO 8601 | date, timestamp |
| list of records | one list; a key may be absent | error | rows; absent: empty | objects | rows; absent: null |
| dict, tuple, dataclass of arrays | leaf by leaf | `.npz`: by path | columns by path | columns | columns |
| None | contributes nothing | | | | |
| number, text or bytes by itself | error: return an array | | | | |

Python integers of more than 64 bits fit in records of `.csv` and `.jsonl` only. Integers and floats in one column of
records are float64 in `.parquet` if that is exact, and else an error. Sets, `Decimal`, `datetime`, pandas objects,
masked and structured arrays are errors at the call, which say how to convert them.

A column of text is an object array if `<U` would have more than 1 MiB and four times the bytes of the texts,
because one of them is long, or if a text ends with a zero, which `<U` drops; this depends on the texts of the
shard alone. `np.array(texts, dtype=object)` makes an object array of texts or bytes; `np.fromiter(lists,
object, len(lists))` makes one of arrays, and `np.stack(column)` one array of lists of one length. The cells of
one array are of one kind. A cell that is None is a null in `.parquet` and `.jsonl`, and an empty cell in
`.csv`. In data that is read, a null is an empty text, empty bytes, an empty list, or NaN; a null struct is
None. `gather: 0` concatenates arrays of any kind, and lists of records: it makes one list. A list of dicts in
which all values are arrays with axes is no list of records, but a tree.
"""

_STAGES = """\
## Stages

A stage has exactly one verb: `run`, `reduce`, `gather` or `update`. Stages are connected by their
names; cycles are errors. The input of a stage:

| verb | `of` |
|---|---|
| `run`, `reduce`, `gather` | a dataset or a run |
| `update` | a reduce or a gather |

A function is named "package.module:name". It is imported from the import path, to which the folder `code` is
appended. It is called as `fn(shard, **with)`. An empty shard makes no call (but see `collectives`).

The runs of a chain are one call: they are executed one after the other on each shard, by one worker. A run begins
calls of its own if its `resources` differ from those of the run that it reads, or if it has a `batch`. Its calls
get the committed values of that run while these are made, on other workers if these are free, and both make
progress at the same time. A step is available when all of its elements are; at most a few MiB of values wait
between the two, beside the limits of each. `pipedist plan` shows which runs share a call, and which are streamed.
Runs that read the same dataset with different `resources` have calls of their own too, and both sides make progress
at the same time. Each side reads the dataset; one that can only be read in order is read once for both, and the faster
side waits for the slower one, at most a few MiB behind.

A gang and a training are fed in the same way: decodes of later steps run while a step waits for its updates. A replica
without elements joins the collectives with arrays without rows. In a training, a run has calls of its own only if all
stages that feed an update or read its state are in these calls or after them, or none is. It has none in a held-out
dataset, or if an `until` may end the epochs early: there a chain is one call, whatever its resources, and a `batch` is
an error.
If the values of a run can't leave their process, give the runs that read it the same `resources`.

With `batch: B`, step s of an epoch is the elements `[s*B, (s+1)*B)` of the epoch in the dataset's order, and is divided
among the replicas as a step of a dataset is. An epoch's last step may be shorter. Elements that `drop_remainder`
drops are not part of it, and an element that an earlier run quarantined leaves its place empty, so the step of every
other element stays the same. Stages that read the run have its steps; a further `batch` divides them again. A
call gets the rows of its elements: every leaf of the input's values must be an array with one row for each element,
and equal dtypes. Without `batch`, or with that of the input, values may be any tree.

One dataset feeds all updates of a spec, step by step: a step begins when the updates whose states its stages
read are applied. A dataset whose stages read a state but feed no update is held out: it is read once after each
epoch of the feeding dataset, with the states of that moment. It has no `epochs` of its own, and its reductions
and gathers have `per: epoch`. A stage that waits for the end of the training (`after: weights`, or
`${stages.NAME}` of a value made in it) reads the last states.
"""

_OUTPUTS = f"""\
## Outputs

Finished values without an output are in the results document, `.pipedist/results.json` of the output folder, which
`--json` prints. There a value of more than 64 KiB, as arrays or as JSON, is a reference to a file beside it,
`{{file, dtype, shape}}`: a `.npy` or `.npz`, or a `.json` without `dtype` and `shape`. Without an output folder
every value is inline. Values per step or epoch that feed an update have no value there, unless they have an output.

`outputs` names the file of a finished value, as a path in the output folder. The ending is the format:
{", ".join(f"`{ending}`" for ending in OUTPUT_ENDINGS)}.

| ending | holds |
|---|---|
| `.json` | any tree; arrays are nested lists, NaN and infinities are texts, bytes are base64 |
| `.npy` | one array |
| `.npz` | the leaves of a tree by their paths, joined with `/`; a bare array is `data` |
| `.zarr`, `.h5` | the same leaves, as arrays in groups; texts are strings of any length |
| `.csv`, `.parquet`, `.jsonl`, `.arrow` | a row per index of axis 0, a column per leaf path, or a row per key |
| `.sqlite`, `.duckdb` | the same rows, in a table named for the stage |
| `.parquet/` | the same rows, in `part-00000.parquet`, ... of a folder |
| a name with `{{COLUMN}}` | a file for each row, in a folder: `thumbs/{{key}}.png` |

The one column that is not in the name of such a file is its content: bytes, text, or an array, which is encoded as
the ending says (`.npy`, `.json`, or an image of uint8). A folder counts as one file: a later run replaces it as a
whole.

With `per: run`, the value of `pipedist.combiners.by_key` and similar functions is a table: `key`, or a column for each
key column, and the values. `by_key_moments` gives `key,count,missing,mean,m2,min,max`; `counter` gives `value,count`;
`by_key_counter` gives `key,value,count`; `by_key_quantiles` gives `key,count,p1,...,p99`. A `.npz` has an array
for each column.

A mapping in place of the path writes parts of one value: `features: {{hists: hists.npy, table: table.parquet}}`
needs a value with the keys `hists` and `table`. A part is named by its path in the value, as the members of a
`.npz` are (`tables/left`, `rows/0`). Parts that no path names are not written; those of a gather are not kept either.

Columns are in the order of the result. A list of records, gathered or returned by a `combine` function, is a
row per record, and a column per key of the first ones; also per step or epoch. Text, bytes and lists of any
length are true columns of `.parquet`: string, binary, list (of fixed size for an array with further axes) and
struct. In `.jsonl` they are texts, base64 and lists, and a record is an object as it is. A cell of `.csv` holds
one value. `.npy` and `.npz` hold texts of one width: texts for which that would be wasteful, and values that
end with a zero, are an error that names the other formats.

Values of a reduction per step or per epoch are lines in `.jsonl` and `.csv`, and are stacked in `.npy` and `.npz`.

`np.array([])`, the result of a function that found no row in a shard, takes the dtype and shape of the results of
other shards in a gather, and in a reduction along an axis. In a reduction per step or epoch these are the dtype and
shape of the first value that has rows: values before it are written when it is there. If there is none, they are
float64, as in NumPy. An `update`, and a program that streams steps, can't wait: before that value they get float64.
"""


def reference() -> str:
    """Return the language reference as Markdown."""
    parts = [_INTRODUCTION, _DOCUMENT, "## At the top", *_keys(SpecSection, "###")]
    for title, section in (("Cluster", ClusterSection), ("Checkpoint", CheckpointSection)):
        parts += [f"## {title}", summary(section), *_keys(section, "###")]
    parts += [_DATASETS, *_keys(DatasetSpec, "###", only=DATASET_KEYS), _SOURCES]
    for name, model in SOURCES.items():
        parts += [f"#### `{name}`", summary(model)]
        if model is not ArraysSource:
            parts += [_example(name, keys_of(DatasetSpec)[name]), *_keys(model, "#####", f"{name}.")]
    for name, plugin in plugin_sources().items():
        model = section_of(plugin)
        parts += [f"#### `{name}` (of {plugin.package})", summary(model), *_keys(model, "#####", f"{name}.")]
    parts += [_TEXT, _STAGES]
    for verb, model in STAGES.items():
        parts += [f"### `{verb}`", summary(model), *_keys(model, "####", f"{verb}: ")]
    parts.append(_OUTPUTS)
    for kind, model in SINK_SECTIONS.items():
        parts += [f"### Output `{kind}`", summary(model), *_keys(model, "####", f"{kind}: ")]
    for name, plugin in plugin_sinks().items():
        model = section_of(plugin, "path")
        parts += [
            f"### Output `{name}` (of {plugin.package})",
            summary(model),
            *_keys(model, "####", f"{name}: "),
        ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _keys(
    model: type[Section], heading: str, prefix: str = "", *, only: Iterable[str] | None = None
) -> Iterator[str]:
    for key, field in keys_of(model).items():
        if only is not None and key not in only:
            continue
        phrase = expected_phrase(field.annotation, field.metadata)
        description = LINK.sub(r"[more](../\1)", field.description or "")
        texts = [description, f"Expected: {phrase}." if phrase else "", _default(model, key, field)]
        yield f"{heading} {prefix}`{key}`"
        yield " ".join(text for text in texts if text)
        yield _example(key, field)
        inner = section_in(field.annotation)
        if issubclass(model, RunSpec) and inner is not None:
            yield f"{summary(inner)} Its keys:"
            yield from _keys(inner, f"{heading}#", f"{key}: ")


def _default(model: type[Section], key: str, field: FieldInfo) -> str:
    if field.is_required():
        return "" if model is RunSpec and key == "of" else "Required."  # the description has the rule
    if field.default_factory is not None or field.default is None or isinstance(field.default, tuple):
        return "Optional."
    return f"Default: `{as_yaml(field.default)}`."


def _example(key: str, field: FieldInfo) -> str:
    if not field.examples:  # of another package
        return ""
    (example,) = field.examples
    return f"```yaml\n{key}: {as_yaml(example)}\n```"
