"""The floor: JSON, pydantic and the call, without any framework. Runs beside pydantic-ai."""

import asyncio

from common import JSON_ARGUMENTS, make_add, report, time_async, time_sync
from pydantic import BaseModel


class Arguments(BaseModel):
    a: int
    b: float
    c: str = "x"


add, add_async = make_add("sync"), make_add("async")


def call() -> object:
    given = Arguments.model_validate_json(JSON_ARGUMENTS)
    return add(given.a, given.b, given.c)


async def call_async() -> object:
    given = Arguments.model_validate_json(JSON_ARGUMENTS)
    return await add_async(given.a, given.b, given.c)


report("direct", "sync", time_sync(call, 800), "model_validate_json and the call")
report(
    "direct", "async", asyncio.run(time_async(call_async, 800)), "model_validate_json and the call"
)
