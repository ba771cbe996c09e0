"""The advice of an error works when it is pasted."""

from __future__ import annotations

import datetime
import re
from collections import Counter, deque
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipedist.protocol.codec import UnsendableError, decode, encode

pd = pytest.importorskip("pandas")
FRAME = pd.DataFrame(
    {
        "text": ["a", "b"],
        "mixed": [1, "b"],
        "missing": ["a", None],
        "number": [1.5, float("nan")],
        "date": pd.to_datetime(["2026-01-01", "2026-01-02"]),
        "zoned": pd.to_datetime(["2026-01-01", "2026-01-02"], utc=True),
        "kind": pd.Categorical(["x", "y"]),
        3: [1, 2],
    },
    index=["first", "second"],
)


@pytest.mark.parametrize("frame", [FRAME, FRAME.reset_index(), pa.table({"n": [1, 2], "text": ["a", "b"]})])
def test_the_advice_for_data_frames_works_for_every_column(frame: Any) -> None:
    with pytest.raises(UnsendableError) as caught:
        encode(frame)
    found = re.search(r"for a data frame df, (\{.*\}) makes", str(caught.value))
    assert found is not None
    sent = decode(encode(eval(found[1], {"np": np, "df": frame})))
    assert all(type(column) is np.ndarray and len(column) == 2 for column in sent.values())


@pytest.mark.parametrize(
    "value",
    [
        FRAME["text"],
        FRAME["number"],
        FRAME["kind"],
        np.ma.array([1.0, 2.0], mask=[True, False]),
        Counter(a=1),
        {3, 1},
        {"b": 1}.keys(),
        {"b": 1}.values(),
        deque([1, 2]),
        (n for n in (1, 2)),
        datetime.datetime(2020, 1, 2, 3),
        datetime.date(2020, 1, 2),
        datetime.timedelta(days=2),
        Decimal("1.50"),
    ],
)
def test_the_advice_for_one_value_works(value: Any) -> None:
    with pytest.raises(UnsendableError) as caught:
        encode(value)
    advice = str(caught.value).partition("; ")[2]
    call = re.match(r"\S+", advice)
    assert call is not None
    encode(eval(call[0].replace("...", "x"), {"np": np}, {"x": value}))


def test_the_advice_for_objects_works() -> None:
    value = np.array(["a", 1.5], object)
    with pytest.raises(UnsendableError, match="astype"):
        encode(value)
    encode(value.astype(str))
