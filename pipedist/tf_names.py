"""Names of tf.distribute that are called otherwise here: asking for one says how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, NoReturn


class TfNames:
    """A base of classes whose counterparts in TensorFlow have other names too."""

    __slots__ = ()

    _tf_names: ClassVar[Mapping[str, str]] = {}
    """Of each name there, what stands for it here."""

    # a type checker is to find the mistake itself: it sees classes without this
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            here = self._tf_names.get(name)
            if here is not None:
                text += f": in pipedist, {here} (docs/from_tf_distribute.md)"
            raise AttributeError(text, name=name, obj=self)
