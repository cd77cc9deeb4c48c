from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from scripted import scripted_run

import weakincentives as wink
from weakincentives.adapters import calls
from weakincentives.debugger import query_run
from weakincentives.debugger.query import SCHEMA, Column, schema_text
from weakincentives.errors import QueryError
from weakincentives.filesystem import HostFilesystem
from weakincentives.runtime.calls import Run, open_run
from weakincentives.session.slices import SlicePolicy, slice_policy

DOCS = Path(__file__).parents[2] / "docs"


@wink.tool(reach="reversible")
def outer(path: str, *, context: wink.ToolContext) -> str:
    """Write a file by another call."""
    return str(inner(path=path, context=context).value)


@wink.tool(reach="reversible")
def inner(path: str, *, context: wink.ToolContext) -> dict[str, int]:
    """Write a file."""
    context.filesystem.write(path, "inner\n")
    return {"lines": 1}


TURNS = [
    calls(("read_file", {"path": "app.py"}), text="First I read it."),
    calls(
        ("edit_file", {"path": "app.py", "old_string": "80", "new_string": "8080"}),
        ("edit_file", {"path": "app.py", "old_string": "no such", "new_string": "x"}),
        text="Now the port.",
    ),
    calls(
        ("outer", {"path": "new.txt"}),
        ("move_file", {"source": "old.md", "destination": "b.md"}),
    ),
    calls(("nosuch", {})),
    "Done.",
]  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    (project / "app.py").write_text("host = 'a'\nport = 80\n")
    (project / "old.md").write_text("text\n")
    return project


@pytest.fixture
def run(project: Path) -> Run:
    return scripted_run(project, TURNS, message="Set the port", tools=[outer, inner])


def rows(project: Path, sql: str, run: Run | None = None) -> list[tuple[object, ...]]:
    return query_run(project, sql, run=run).rows


# The tables


def test_every_call_has_a_row_with_its_outcome_and_turn(project: Path, run: Run):
    found = rows(project, "select n, name, tool, outcome, turn, nested_in from calls order by n")

    assert found == [
        (1, f"{run.mark}/1", "read_file", "ok", 1, None),
        (2, f"{run.mark}/2", "edit_file", "committed", 2, None),
        (3, f"{run.mark}/3", "edit_file", "rolled back", 2, None),
        (4, f"{run.mark}/4", "inner", "ok", 3, 5),
        (5, f"{run.mark}/5", "outer", "committed", 3, None),
        (6, f"{run.mark}/6", "move_file", "committed", 3, None),
        (7, f"{run.mark}/7", "nosuch", "refused", 4, None),
    ]


def test_arguments_and_values_are_json(project: Path, run: Run):
    sql = """select n from calls where json_extract(arguments, '$.new_string') = '8080'"""

    assert rows(project, sql) == [(2,)]
    assert rows(project, "select output ->> '$.lines' from calls where tool = 'inner'") == [(1,)]
    keys = "select key from calls, json_each(arguments) where n = 3 order by key"
    assert [key for (key,) in rows(project, keys)][:3] == ["new_string", "old_string", "path"]


def test_the_result_is_what_the_model_saw(project: Path, run: Run):
    ((told, code),) = rows(project, "select result, code from calls where n = 3")
    ((answer,),) = rows(
        project,
        "select text from events where role = 'tool' and json_extract(data, '$.call_id') ="
        " (select call_id from calls where n = 3)",
    )

    assert "old_string was not found" in str(told)
    assert told == answer
    assert code


def test_every_changed_file_of_a_call_has_a_row_with_its_patch(project: Path, run: Run):
    found = rows(project, "select n, path, origin, kind, added, removed, binary from changes")

    assert sorted(found) == [
        (2, "app.py", None, "changed", 1, 1, 0),
        (5, "new.txt", None, "added", 1, 0, 0),
        (6, "b.md", "old.md", "added", 0, 0, 0),
    ]
    ((patch,),) = rows(project, "select patch from changes where path = 'app.py'")
    assert "-port = 80\n+port = 8080\n" in str(patch)


def test_the_call_that_wrote_a_line_and_the_text_that_led_to_it_are_one_join_away(
    project: Path, run: Run
):
    sql = """
        select c.name, e.text from changes join calls c using (run, n)
        join events e on e.run = c.run and e.turn = c.turn and e.role = 'model'
        where patch like '%+port = 8080%'
    """

    assert rows(project, sql) == [(f"{run.mark}/2", "Now the port.")]


def test_events_are_in_the_order_in_which_they_happened(project: Path, run: Run):
    found = rows(project, "select kind, role, turn, after_call from events order by n")

    assert ("PromptRendered", None, 0, 0) in found
    assert found[-1][0] == "PromptExecuted"
    assert [each[1:] for each in found if each[1] in ("user", "model")] == [
        ("user", 0, 0), ("model", 1, 0), ("model", 2, 1), ("model", 3, 3), ("model", 4, 6),
        ("model", 5, 7),
    ]  # fmt: skip
    ((text, tools),) = rows(
        project,
        "select text, json_array_length(data, '$.tool_names') from events"
        " where kind = 'PromptRendered'",
    )
    assert "Own tools." in str(text)
    assert isinstance(tools, int)
    assert tools > 3


def test_all_runs_of_a_directory_are_one_table_with_what_was_done_outside_of_them(project: Path):
    first = scripted_run(project, [*TURNS[:2], "Done."])
    second = scripted_run(project, [*TURNS[:1], "Done."])
    with HostFilesystem(project) as files:
        files.undo(files.history()[-1].call_id)

    counts = "select run, count(*) from calls group by run"
    assert dict(rows(project, counts)) == {None: 1, first.id: 3, second.id: 1}
    assert rows(project, counts, second) == [(second.id, 1)]
    assert rows(project, "select outcome from calls where run is null") == [("undo",)]
    assert rows(project, "select count(distinct run) from events") == [(2,)]
    assert rows(project, "select n, path from changes where run is null") == [(None, "app.py")]


def test_a_run_in_progress_can_be_asked_about(project: Path):
    seen: list[object] = []

    @wink.tool(reach="read")
    def look(*, context: wink.ToolContext) -> str:
        """Count the calls so far."""
        seen.extend(rows(project, "select count(*) from calls"))
        return "Counted"

    scripted_run(project, [TURNS[0], calls(("look", {})), "Done."], tools=[look])

    assert seen == [(1,)]


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Message:
    """A type of a user's own, with the name of one of ours."""

    text: tuple[str, ...]
    role: int


def test_events_of_any_type_are_rows(project: Path):
    with open_run(project) as saved:
        saved.session.dispatch(Message(("a", "b"), 7))
        saved.save()

    kind, text, role = rows(project, "select kind, text, role from events")[0]
    assert str(kind).endswith(":Message")
    assert (text, role) == ('["a", "b"]', "7")


def test_names_that_are_not_unicode_are_escaped(project: Path):
    @wink.tool(reach="reversible")
    def odd(*, context: wink.ToolContext) -> str:
        """Return half a character."""
        context.filesystem.write("a.txt", "x\n")
        return "\ud800"

    scripted_run(project, [calls(("odd", {})), "Done."], tools=[odd])

    assert rows(project, "select result from calls") == [("\\ud800",)]


# Only reading


@pytest.mark.parametrize(
    "sql",
    [
        "attach 'x.db' as other",
        "pragma table_info(calls)",
        "select * from pragma_database_list",
        "select load_extension('x')",
        "delete from calls",
        "insert into calls (n) values (1)",
        "update calls set n = 1",
        "create table mine (a)",
        "create temp table mine (a)",
        "create temp view mine as select 1",
        "drop table calls",
        "vacuum into 'x.db'",
        "analyze",
        "begin",
    ],
)
def test_everything_but_reading_is_refused(project: Path, run: Run, sql: str):
    with pytest.raises(QueryError, match=r"^only reading is allowed: one SELECT over calls"):
        rows(project, sql)

    assert not list(project.parent.rglob("x.db"))


@pytest.mark.parametrize("sql", ["select 1; select 2", "select 1; delete from calls"])
def test_a_second_statement_is_refused(project: Path, run: Run, sql: str):
    with pytest.raises(QueryError, match="only one statement is allowed"):
        rows(project, sql)


@pytest.mark.parametrize("sql", ["", "  ", "-- nothing"])
def test_an_empty_statement_is_refused(project: Path, sql: str):
    with pytest.raises(QueryError, match="the statement is empty"):
        rows(project, sql)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("select tol from calls", "no such column: tol; did you mean tool? calls has run, n, "),
        ("select changes.pth from changes", "did you mean path? changes has run, n, name, path, "),
        ("select * from cals", "no such table: cals; did you mean calls? the tables are calls, "),
        ("select * from", "incomplete input; `wink query --schema` prints the tables"),
        ("selct 1", 'near "selct": syntax error; '),
        ("select json_extract('{', '$') from calls", "malformed JSON"),
        ("select 1 \x00", "null character"),
        ("select '\ud800'", "surrogates not allowed"),
    ],
)
def test_an_error_is_one_line_with_a_hint(project: Path, run: Run, sql: str, message: str):
    with pytest.raises(QueryError) as raised:
        rows(project, sql)

    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_statement_that_never_ends_is_stopped(project: Path, run: Run):
    endless = "with recursive t(n) as (select 1 union all select n + 1 from t) select max(n) from t"

    with pytest.raises(QueryError, match=r"takes more than 0\.2 seconds"):
        query_run(project, endless, max_seconds=0.2)


def test_a_value_of_any_length_is_not_built(project: Path, run: Run):
    with pytest.raises(QueryError, match="too big"):
        rows(project, "select zeroblob(900000000)")


def test_rows_beyond_the_limit_are_counted_out(project: Path, run: Run):
    all_rows = query_run(project, "select n from calls", max_rows=7)
    cut = query_run(project, "select n from calls order by n", max_rows=2)

    assert (len(all_rows.rows), all_rows.is_cut) == (7, False)
    assert (cut.rows, cut.is_cut) == ([(1,), (2,)], True)


# The schema


def test_the_documentation_has_the_schema():
    """Copy what `wink query --schema` prints."""
    assert f"```sql\n{schema_text()}```" in (DOCS / "debugger.md").read_text()


def test_a_column_that_nothing_fills_is_noticed(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch
):
    """It must not be NULL in every row without a word."""
    for name, columns in SCHEMA.items():
        more = (*columns, Column("forgotten", "TEXT", "nothing fills it"))
        monkeypatch.setitem(SCHEMA, name, more)

        with pytest.raises(KeyError, match="forgotten"):
            query_run(project, f"select * from {name}")


def test_the_columns_of_the_schema_are_those_of_the_tables(project: Path, run: Run):
    for name, columns in SCHEMA.items():
        answer = query_run(project, f"select * from {name}")

        assert answer.columns == tuple(each.name for each in columns)
        assert answer.rows
        for n, column in enumerate(columns):
            if column.type == "JSON":
                assert all(
                    row[n] is None or json.dumps(json.loads(str(row[n]))) for row in answer.rows
                )
