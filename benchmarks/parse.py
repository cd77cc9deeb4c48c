"""Parse six fields, strictly and with every problem told; beside pydantic without all that."""

import json
from dataclasses import dataclass
from typing import Literal

from pydantic import TypeAdapter

from timing import compare, emit, is_quick
from weakincentives.serde import parse


@dataclass(frozen=True, slots=True)
class Search:
    query: str
    limit: int = 10
    case_sensitive: bool = False
    file_types: tuple[str, ...] = ()
    ratio: float = 0.5
    env: Literal["dev", "prod"] = "dev"


DATA = {
    "query": "abc",
    "limit": 5,
    "case_sensitive": True,
    "file_types": ["py", "md"],
    "ratio": 0.1,
    "env": "prod",
}


if __name__ == "__main__":
    text, adapter = json.dumps(DATA), TypeAdapter(Search)
    assert parse(Search, DATA) == parse(Search, text) == adapter.validate_python(DATA)
    samples = compare(
        {
            "dict": lambda: parse(Search, DATA),
            "json": lambda: parse(Search, text),
            "pydantic dict": lambda: adapter.validate_python(DATA),
            "pydantic json": lambda: adapter.validate_json(text),
        },
        times=200,
        batches=30 if is_quick() else 300,
    )
    figures = {name: taken.figures() for name, taken in samples.items()}
    for form in ("dict", "json"):
        ours, plain = figures[form], figures[f"pydantic {form}"]
        emit(
            f"parse {form}",
            parse=ours,
            pydantic=plain,
            ratio=round(ours["cpu"] / plain["cpu"], 1),
        )
