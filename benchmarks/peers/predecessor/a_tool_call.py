"""Calls on a fresh session and on one with a history of dataclass results.

Histories are seeded, not made by calls: making 10,000 takes minutes. This release ships no files
in memory, so no filesystem is bound; that is less work than ours does.
"""

from datetime import UTC, datetime
from functools import partial

from common import VERSION, Desk, Found, Params, Samples, ToolResult, emit, plain

from weakincentives.prompt import ReadBeforeWritePolicy, SequentialDependencyPolicy
from weakincentives.runtime import ToolInvoked

ARGUMENTS = {
    "path": "a.txt",
    "limit": 3,
    "recursive": True,
    "ratio": 1.5,
    "kinds": ["py"],
    "note": "x",
}


def earlier_call() -> ToolInvoked:
    return ToolInvoked(
        prompt_name="bench",
        adapter="bench",
        name="look_up",
        params=Params("a.txt"),
        result=ToolResult.ok(Found(3), message="done"),
        session_id=None,
        created_at=datetime.now(UTC),
    )


def measure(earlier: int, sessions: int, calls: int) -> None:
    bare, piped = Samples(), Samples()
    params = Params(**{**ARGUMENTS, "kinds": ("py",)})
    for _ in range(sessions):
        desk = Desk(
            policies=(
                SequentialDependencyPolicy(dependencies={"write_file": frozenset({"read_file"})}),
                ReadBeforeWritePolicy(),
            )
        )
        with desk.prompt.resources:
            call, heard = desk.bridge(), []
            desk.session.dispatcher.subscribe(ToolInvoked, heard.append)
            call(ARGUMENTS)
            if earlier:
                events = tuple(earlier_call() for _ in range(earlier))
                desk.session[ToolInvoked].seed(events)
                desk.session[Found].seed(tuple(event.result.value for event in events))
            bare.batch(lambda: plain(params, context=None), 200)
            piped.batch(partial(call, ARGUMENTS), calls)
            assert len(heard) == calls + 1
    figures, alone = piped.figures(), bare.figures()
    emit(
        "call plain",
        version=VERSION,
        earlier=earlier,
        call=figures,
        bare=alone,
        over_bare=round(figures["cpu"] - alone["cpu"], 3),
        over_bare_wall=round(figures["wall"] - alone["wall"], 3),
        ratio=round(figures["cpu"] / alone["cpu"], 1),
    )


measure(0, 50, 20)
measure(1_000, 9, 5)
measure(10_000, 5, 3)
measure(100_000, 3, 1)
