"""Everything public is documented; private code is documented only where its signature is not enough."""

from __future__ import annotations

import inspect

import pytest

import pipedist
from pipedist import testing

PUBLIC = [(name, getattr(pipedist, name)) for name in pipedist.__all__ if name != "__version__"]
PUBLIC += [(f"testing.{name}", getattr(testing, name)) for name in testing.__all__]


@pytest.mark.parametrize(("name", "thing"), PUBLIC, ids=[name for name, _ in PUBLIC])
def test_a_public_name_and_its_public_methods_have_docstrings(name: str, thing: object) -> None:
    assert inspect.getdoc(thing), f"{name} has no docstring"
    if not inspect.isclass(thing):
        return
    for attribute, value in vars(thing).items():
        if attribute.startswith("_") or not (
            callable(value) or isinstance(value, property | classmethod | staticmethod)
        ):
            continue
        assert inspect.getdoc(getattr(thing, attribute)), f"{name}.{attribute} has no docstring"
