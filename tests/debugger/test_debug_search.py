"""Search finds what the model wrote, what calls got and gave, and what files had at any time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from run_world import Work, opened

from weakincentives.debugger import Views


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    with opened(tmp_path) as work:
        yield work


def found(work: Work, text: str, **options: str) -> list[dict[str, Any]]:
    query = {"q": text, **options}
    return Views(work.files.root).get(f"runs/{work.run.id}/search", query)["hits"]


def test_the_words_of_user_and_model_are_found(work: Work) -> None:
    work.say("Please LOOK around", ("look", {}))

    (hit,) = found(work, "look around", **{"in": "text"})

    assert (hit["call"], hit["where"]) == (1, "text")
    assert hit["excerpt"][hit["at"] :] == "LOOK around"


def test_arguments_and_results_are_found(work: Work) -> None:
    work.say("go", ("write", {"name": "a", "text": "needle"}), ("fail", {"text": "oops"}))

    assert [(hit["where"], hit["call"]) for hit in found(work, "needle")] == [
        ("arguments", 1),
        ("file", None),
    ]
    assert [hit["where"] for hit in found(work, "Failed oops", **{"in": "results"})] == ["result"]


def test_a_version_that_was_replaced_is_found_at_its_call(work: Work) -> None:
    work.say("go", ("write", {"name": "a", "text": "one\nneedle in it\ntwo\n"}))
    work.write("a now without")

    (hit,) = found(work, "needle", **{"in": "files"})

    assert (hit["path"], hit["call"], hit["serial"]) == ("a", 1, 1)
    assert hit["excerpt"] == "needle in it"


def test_files_that_no_call_changed_are_found(work: Work) -> None:
    (work.files.root / "notes.txt").write_text("a needle\n")
    work.write("a1")

    (hit,) = found(work, "needle")

    assert (hit["path"], hit["call"], hit["where"]) == ("notes.txt", None, "file")


def test_many_hits_are_cut(work: Work) -> None:
    work.say("go", *(("note", {"text": f"needle{n}"}) for n in range(80)))
    views = Views(work.files.root)

    answer = views.get(f"runs/{work.run.id}/search", {"q": "needle"})

    assert answer["truncated"] is True
    assert len(answer["hits"]) == 200


def test_an_unknown_kind_is_refused(work: Work) -> None:
    work.write("a1")

    with pytest.raises(ValueError, match="in= takes text, arguments, results, files"):
        found(work, "x", **{"in": "everything"})


def test_a_pattern_is_plain_text(work: Work) -> None:
    work.say("go (.*)+$", ("look", {}))

    assert [hit["excerpt"] for hit in found(work, "(.*)+$")] == ["go (.*)+$"]
