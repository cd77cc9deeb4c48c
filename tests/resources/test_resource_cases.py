"""The cases for resources find what is wrong with one, and pass those that are right."""

from __future__ import annotations

from typing import Any, Self

import pytest
from rpds import HashTrieMap

from weakincentives.errors import MergeConflict
from weakincentives.filesystem import MemoryFilesystem
from weakincentives.resources import Forkable
from weakincentives.session.memory import MemoryManager
from weakincentives.testing import resource_cases


class Shelf:
    def __init__(self) -> None:
        self.items: list[int] = []

    def snapshot(self) -> Any:
        return tuple(self.items)

    def restore(self, token: Any) -> None:
        self.items[:] = token


class Forking:
    """One with views, which merges what was added."""

    def __init__(self, items: HashTrieMap[int, bool] | None = None) -> None:
        self.items: HashTrieMap[int, bool] = HashTrieMap() if items is None else items
        self.base = self.items

    def snapshot(self) -> Any:
        return self.items

    def restore(self, token: Any) -> None:
        self.items = token

    def fork(self) -> Forking:
        return Forking(self.items)

    def merge(self, view: Forking) -> None:
        for number in view.items:
            if number not in view.base:
                self.items = self.items.insert(number, True)


class Inheriting(Forkable):
    """One that inherits ``discard``, and merges nothing over the changes of others."""

    def __init__(self, items: tuple[int, ...] = ()) -> None:
        self.items = self.base = items

    def snapshot(self) -> Any:
        return self.items

    def restore(self, token: Any) -> None:
        self.items = token

    def fork(self) -> Self:
        return type(self)(self.items)

    def merge(self, view: Self) -> None:
        if self.items is not view.base:
            raise MergeConflict("the items have changed")
        self.items = view.items


def put(shelf: Any, number: int) -> None:
    shelf.items.append(number)


GOOD: dict[str, Any] = {
    "shelf": (Shelf, put, lambda shelf: list(shelf.items)),
    "views": (
        Forking,
        lambda forking, number: setattr(forking, "items", forking.items.insert(number, True)),
        lambda forking: sorted(forking.items),
    ),
    "files": (
        MemoryFilesystem,
        lambda files, number: files.write(f"{number}.txt", "x"),
        lambda files: sorted(files.glob("**")),
    ),
    "inheriting": (
        Inheriting,
        lambda shelf, number: setattr(shelf, "items", (*shelf.items, number)),
        lambda shelf: sorted(shelf.items),
    ),
    "memory": (
        MemoryManager,
        lambda memory, number: memory.write("working", f"{number}", 1),
        lambda memory: sorted(memory.keys("working")),
    ),
}


@pytest.mark.parametrize("case", resource_cases(), ids=str)
@pytest.mark.parametrize("kind", GOOD)
def test_a_resource_that_is_right_passes_every_case(case: Any, kind: str):
    case.check(*GOOD[kind])


def test_a_class_that_inherits_the_contract_must_write_all_but_discard():
    class Unfinished(Forkable):
        def fork(self) -> Self:
            return self

    with pytest.raises(TypeError, match=r"merge.*restore.*snapshot"):
        Unfinished()  # type: ignore[abstract]


class SharedToken(Shelf):
    """Its token changes with it."""

    def snapshot(self) -> Any:
        return self.items

    def restore(self, token: Any) -> None:
        self.items = token


class Forgetful(Shelf):
    """It restores the beginning."""

    def restore(self, token: Any) -> None:
        self.items.clear()


class Alone:
    """It takes no part."""

    def __init__(self) -> None:
        self.items: list[int] = []


class Lossy(Forking):
    """Its merge replaces what others have committed."""

    def merge(self, view: Forking) -> None:
        self.items = HashTrieMap.convert(dict.fromkeys(list(view.items)[:1], True))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (SharedToken, {"failure", "tokens are values", "random histories"}),
        (Forgetful, {"failure", "nested calls", "blocks"}),
        (Alone, {"takes part", "failure", "cancelled"}),
    ],
)
def test_what_is_wrong_is_found(make: Any, names: set[str]):
    found = set[str]()
    for case in resource_cases():
        try:
            case.check(make, put, lambda shelf: list(shelf.items))
        except AssertionError as error:
            found.add(str(error).partition(": ")[0])

    assert names <= found


def test_a_merge_that_loses_is_found():
    (case,) = [case for case in resource_cases() if case.name == "success"]

    with pytest.raises(AssertionError, match=r"success: after two calls: expected \[1, 2\]"):
        case.check(Lossy, *GOOD["views"][1:])


def test_a_change_that_nothing_shows_is_said():
    (case,) = [case for case in resource_cases() if case.name == "takes part"]

    with pytest.raises(AssertionError, match="changed nothing that look"):
        case.check(Shelf, lambda shelf, number: None, lambda shelf: list(shelf.items))
