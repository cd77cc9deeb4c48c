"""Parse six fields; pydantic and msgspec stand beside it in the same run."""

from dataclasses import dataclass
from typing import Literal

import msgspec
from common import VERSION, compare, emit
from pydantic import TypeAdapter

from weakincentives.serde import parse


@dataclass(slots=True, frozen=True)
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

adapter = TypeAdapter(Search)
samples = compare(
    {
        "parse": lambda: parse(Search, DATA, extra="forbid"),
        "pydantic": lambda: adapter.validate_python(DATA),
        "msgspec": lambda: msgspec.convert(DATA, Search),
    },
    times=50,
    batches=60,
)
figures = {name: taken.figures() for name, taken in samples.items()}
emit("parse dict", version=VERSION, **figures)
