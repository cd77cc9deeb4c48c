"""Classes whose type arguments reach their constructor: ``Tool[Params, Result](...)``."""

from __future__ import annotations

import types
from typing import Any, cast


class _TypedAlias(types.GenericAlias):
    """``Tool[A, B]``: an ordinary alias, but calling it hands the arguments on."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return cast("type[TypedConstructor]", self.__origin__).with_types(
            self.__args__, *args, **kwargs
        )


class TypedConstructor:
    """Mixin: ``Class[X](...)`` calls ``Class.with_types((X,), ...)``.

    ``typing.Generic`` tells an instance its type arguments only after ``__init__``; too late for
    checks at construction.
    """

    def __class_getitem__(cls, item: Any) -> Any:
        return _TypedAlias(cls, item if isinstance(item, tuple) else (item,))

    @classmethod
    def with_types(cls, type_args: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Construct with these type arguments."""
        raise NotImplementedError
