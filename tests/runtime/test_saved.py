"""A session in a file: what is read back is what was saved, wherever the writing broke off."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import weakincentives as wink
from weakincentives.adapters import Message, ModelRequest, ModelTurn, ScriptedAdapter, calls
from weakincentives.errors import SessionError, SessionInUse, SnapshotError
from weakincentives.filesystem import Filesystem, HostFilesystem, adopt_store
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, ToolResult
from weakincentives.runtime import (
    SavedSession,
    SavedSessionData,
    Session,
    Slice,
    SlicePolicy,
    ToolInvoked,
    replace_latest,
    slice_policy,
    upsert_by,
)


@dataclass(frozen=True)
class Note:
    """A STATE slice that grows."""

    text: str


@dataclass(frozen=True)
class Plan:
    """A STATE slice of one value."""

    steps: tuple[str, ...]


@dataclass(frozen=True)
class Price:
    """A STATE slice with a value a key."""

    name: str
    cents: int


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Seen:
    text: str


@slice_policy(SlicePolicy.LOG)
@dataclass(frozen=True)
class Held:
    """A LOG slice of something that may have no JSON form."""

    value: object


def new_session() -> Session:
    session = Session(tags={"of": "a test"})
    session[Plan].register(Plan, replace_latest)
    session[Price].register(Price, upsert_by(lambda price: price.name))
    return session


KINDS = (Note, Plan, Price, Seen)


def content(session: Session) -> dict[type, tuple[Any, ...]]:
    return {kind: session[kind].all() for kind in KINDS}


def test_a_session_is_read_back_as_it_was(tmp_path: Path):
    session = new_session()
    session.dispatch(Note("before"))
    with SavedSession.create(tmp_path / "a.jsonl", session, about={"task": "fix ü"}):
        session.dispatch(Seen("after"))

    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert content(again.session) == content(session)
        assert again.about == {"task": "fix ü"}
        assert again.session.session_id == session.session_id
        assert again.session.tags == {"of": "a test"}


def test_nothing_is_written_where_nothing_changed_and_only_what_is_new_otherwise(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    session = new_session()
    with SavedSession.create(path, session) as saved:
        for n in range(1000):
            session.dispatch(Note(f"note {n}"))
            session.dispatch(Seen(f"seen {n}"))
        saved.save()
        size = path.stat().st_size
        saved.save()
        assert path.stat().st_size == size

        session.dispatch(Note("one more"))
        saved.save()
        assert path.stat().st_size - size < 300


def test_only_the_owner_can_read_the_file(tmp_path: Path):
    SavedSession.create(tmp_path / "runs" / "a.jsonl", Session()).close()

    assert stat.S_IMODE((tmp_path / "runs" / "a.jsonl").stat().st_mode) == 0o600


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("mine")

    with pytest.raises(FileExistsError):
        SavedSession.create(tmp_path / "a.jsonl", Session())
    assert (tmp_path / "a.jsonl").read_text() == "mine"


def test_what_is_not_the_file_of_a_session_is_refused(tmp_path: Path):
    for text in ("", "{}\n", "[1]\n", "hello\n", '{"wink_session": 2}\n', '{"wink_session": 1'):
        (tmp_path / "a.jsonl").write_text(text)

        with pytest.raises(SnapshotError, match=r"a\.jsonl"):
            SavedSession.open(tmp_path / "a.jsonl")


def test_one_at_a_time_keeps_a_session_in_a_file(tmp_path: Path):
    first = SavedSession.create(tmp_path / "a.jsonl", Session())

    with pytest.raises(SessionInUse, match=r"a\.jsonl is in use by another process"):
        SavedSession.open(tmp_path / "a.jsonl")

    first.close()
    SavedSession.open(tmp_path / "a.jsonl").close()


OPENS = """
import sys
from weakincentives.runtime import SavedSession
SavedSession.open(sys.argv[1])
"""


def test_another_process_is_refused_too(tmp_path: Path):
    with SavedSession.create(tmp_path / "a.jsonl", Session()):
        command = [sys.executable, "-c", OPENS, str(tmp_path / "a.jsonl")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "SessionInUse" in done.stderr


def test_anybody_can_look_at_a_session_that_is_under_way(tmp_path: Path):
    session = new_session()
    with SavedSession.create(tmp_path / "a.jsonl", session, about={"task": "t"}) as saved:
        session.dispatch(Seen("now"))
        saved.save()

        data = SavedSessionData.read(tmp_path / "a.jsonl")

    assert data.about == {"task": "t"}
    assert [v["fields"]["text"] for v in data.log[f"{__name__}:Seen"]] == ["now"]


def test_a_closed_file_takes_no_more(tmp_path: Path):
    saved = SavedSession.create(tmp_path / "a.jsonl", Session())
    saved.close()
    saved.close()

    with pytest.raises(SessionError, match="closed"):
        saved.save()


FORKS = """
import os, sys
from weakincentives.errors import SessionError
from weakincentives.runtime import SavedSession, Session
saved = SavedSession.create(sys.argv[1], Session())
saved.session.dispatch("hello")
if os.fork() == 0:
    try:
        saved.save()
    except SessionError:
        os._exit(7)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
saved.close()
"""


def test_a_forked_child_leaves_the_file_to_its_parent(tmp_path: Path):
    path = tmp_path / "a.jsonl"

    subprocess.run([sys.executable, "-c", FORKS, str(path)], check=True)

    with SavedSession.open(path) as again:
        assert again.session[str].all() == ("hello",)


def test_a_save_that_does_not_fit_leaves_the_file_as_it_was_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "a.jsonl"
    session = new_session()
    with SavedSession.create(path, session) as saved:
        before = path.read_bytes()
        session.dispatch(Note("x" * 100))
        whole_write = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: whole_write(fd, data[:20]))
        with pytest.raises(OSError, match="only 20 of"):
            saved.save()
        assert path.read_bytes() == before

        monkeypatch.setattr(os, "write", whole_write)
        saved.save()
    with SavedSession.open(path) as again:
        assert content(again.session) == content(session)


def test_state_that_was_reset_or_cleared_is_empty_when_read_back(tmp_path: Path):
    session = new_session()
    with SavedSession.create(tmp_path / "a.jsonl", session) as saved:
        session.dispatch(Note("a"))
        session.dispatch(Price("b", 1))
        saved.save()
        session[Note].clear()
        saved.save()
        session.reset()
        saved.save()
        session.dispatch(Price("c", 2))
    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert again.session[Note].all() == ()
        assert again.session[Price].all() == (Price("c", 2),)


# Values without a JSON form


def test_a_value_that_cannot_be_saved_costs_itself_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    session = new_session()
    with SavedSession.create(tmp_path / "a.jsonl", session) as saved:
        session.dispatch(Held(1))
        session.dispatch(Held(object()))
        session.dispatch(Note("kept"))
        with caplog.at_level(logging.WARNING):
            saved.save()
        assert "slice of Held is not saved" in caplog.text
        session.dispatch(Held(3))

    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert again.session[Held].all() == (Held(1), Held(3))
        assert again.session[Note].all() == (Note("kept"),)
        again.session.dispatch(Held(4))
    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert again.session[Held].all() == (Held(1), Held(3), Held(4))
        again.session[Held].clear()
    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert again.session[Held].all() == ()


def test_half_a_state_is_not_read_back(tmp_path: Path):
    @dataclass(frozen=True)
    class Bag:
        value: object

    session = new_session()
    with SavedSession.create(tmp_path / "a.jsonl", session):
        session.dispatch(Bag(1))
        session.dispatch(Bag(object()))
    with SavedSession.open(tmp_path / "a.jsonl", types=[Bag]) as again:
        assert again.session[Bag].all() == ()


def test_a_call_with_a_value_that_cannot_be_saved_is_on_record_in_words(tmp_path: Path):
    class Strange:
        def render(self) -> str:
            return "what the model saw"

    record = ToolInvoked(
        tool_name="t",
        params={"p": object()},
        result=ToolResult(message="done", value=Strange(), call_id="c1"),
        success=True,
        timestamp=1.0,
        duration=2.0,
        call_id="c1",
    )
    session = Session()
    with SavedSession.create(tmp_path / "a.jsonl", session):
        session.dispatch(record)
    with SavedSession.open(tmp_path / "a.jsonl") as again:
        (kept,) = again.session[ToolInvoked].all()

    assert kept.call_id == "c1"
    assert kept.result.render() == "done\nwhat the model saw"
    assert "'p'" in str(kept.params)


# Pictures and files

PICTURE = wink.Media(b"GIF89a" + bytes(range(256)) * 40, name="plot.gif")


@wink.tool(reach="read")
def draw() -> wink.Media:
    """Draw."""
    return PICTURE


def test_a_picture_is_saved_once_and_is_there_again_in_a_resumed_run(tmp_path: Path):
    prompt = Prompt(PromptTemplate(sections=[MarkdownSection(title="Draw", tools=[draw])]))
    path = tmp_path / "a.jsonl"
    with SavedSession.create(path, Session()) as saved:
        turns = [calls("draw"), calls("draw"), "Seen."]
        ScriptedAdapter(turns).evaluate(prompt, saved.session, message=["See", PICTURE])

    (file,) = (tmp_path / "a.media").iterdir()
    assert file.read_bytes() == PICTURE.data
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert path.stat().st_size < len(PICTURE.data)

    adapter = ScriptedAdapter(["Still there."])
    with SavedSession.open(path) as saved:
        adapter.evaluate(prompt, saved.session, message="And now?", resume=True)
    assert adapter.last_request is not None
    assert [m.media for m in adapter.last_request.messages if m.media] == [(PICTURE,)] * 3

    assert SavedSession.adopt(path) == 0
    with SavedSession.open(path) as saved:
        assert saved.session[ToolInvoked].latest().result.value == PICTURE


def test_data_that_looks_like_a_picture_is_saved_as_it_is(tmp_path: Path):
    fakes = [
        {"type": "weakincentives.core.media:Media"},
        {"$": "stored", "sha256": "x"},
        "x" * 2000,
    ]
    with SavedSession.create(tmp_path / "a.jsonl", new_session()) as saved:
        saved.session.dispatch(Held(fakes))

    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert again.session[Held].all() == (Held(fakes),)


def test_a_link_in_the_place_of_a_picture_is_replaced_and_one_to_elsewhere_not_followed(
    tmp_path: Path,
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.media").symlink_to("elsewhere")
    (tmp_path / "b.media").mkdir()
    (tmp_path / "b.media" / PICTURE.digest).symlink_to("/etc/passwd")
    for name in "ab":
        saved = SavedSession.create(tmp_path / f"{name}.jsonl", new_session())
        saved.session.dispatch(Held(PICTURE))
        if name == "a":
            with pytest.raises(OSError, match=r"a\.media is a link"):
                saved.close()
        else:
            saved.close()

    assert list((tmp_path / "elsewhere").iterdir()) == []
    with SavedSession.open(tmp_path / "b.jsonl") as again:
        assert again.session[Held].all() == (Held(PICTURE),)


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_a_picture_whose_file_is_gone_or_changed_is_named(tmp_path: Path, damage: str):
    with SavedSession.create(tmp_path / "a.jsonl", new_session()) as saved:
        saved.session.dispatch(Held(PICTURE))
    (file,) = (tmp_path / "a.media").iterdir()
    file.unlink() if damage == "gone" else file.write_bytes(b"GIF89a, but another")

    with pytest.raises(SnapshotError, match=rf"{file.name}.* (No such file|its digest is wrong)"):
        SavedSession.open(tmp_path / "a.jsonl")


def test_a_picture_that_does_not_fit_leaves_nothing_and_is_saved_later(tmp_path: Path):
    directory = tmp_path / "a.media"
    directory.write_text("in the way")
    with SavedSession.create(tmp_path / "a.jsonl", new_session()) as saved:
        saved.session.dispatch(Held(PICTURE))
        before = saved.path.read_bytes()
        with pytest.raises(OSError, match=r"a\.media"):
            saved.save()
        assert saved.path.read_bytes() == before

        directory.unlink()
    with SavedSession.open(tmp_path / "a.jsonl") as again:
        assert again.session[Held].all() == (Held(PICTURE),)


def test_two_classes_of_one_name_are_not_mixed_up(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def made() -> Any:
        @dataclass(frozen=True)
        class Same:
            n: int

        return Same

    first, second = made(), made()
    session = Session()
    with SavedSession.create(tmp_path / "a.jsonl", session):
        session.dispatch(first(1))
        session.dispatch(second(2))
    assert "the same name" in caplog.text
    with SavedSession.open(tmp_path / "a.jsonl", types=[first]) as again:
        assert again.session[first].all() == (first(1),)


# Whatever is done, and wherever it is cut

TEXTS = st.text(max_size=5)
STEPS: st.SearchStrategy[Callable[[Session], object]] = st.one_of(
    TEXTS.map(lambda t: lambda s: s.dispatch(Note(t))),
    TEXTS.map(lambda t: lambda s: s.dispatch(Seen(t))),
    TEXTS.map(lambda t: lambda s: s.dispatch(Plan((t,)))),
    st.tuples(st.sampled_from("abc"), st.integers()).map(
        lambda pair: lambda s: s.dispatch(Price(*pair))
    ),
    st.sampled_from(KINDS).map(lambda kind: lambda s: s[kind].clear()),
    st.just(lambda s: s[Note].clear(lambda note: len(note.text) > 2)),
    st.just(lambda s: s[Seen].update(lambda seen: Slice.of(seen.all()[1:]))),
    st.integers(1, 70).map(lambda n: lambda s: s[Note].seed([Note(str(i)) for i in range(n)])),
    st.just(lambda s: s.reset()),
)
SAVES = st.lists(st.lists(STEPS, max_size=4), max_size=5)


@given(SAVES, st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_file_cut_anywhere_holds_what_one_of_the_saves_wrote(
    saves: list[list[Callable[[Session], object]]], place: float
):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        session = new_session()
        saved = SavedSession.create(path, session)
        states = [(path.stat().st_size, content(session))]
        for steps in saves:
            for step in steps:
                step(session)
            saved.save()
            states.append((path.stat().st_size, content(session)))
        saved.close()
        written = path.read_bytes()

        first = states[0][0]
        cut = first + round(place * (len(written) - first))
        path.write_bytes(written[:cut])
        with SavedSession.open(path) as again:
            whole = [state for size, state in states if size <= cut]
            assert content(again.session) == whole[-1]
            again.session.dispatch(Note("goes on"))
            after = content(again.session)
        with SavedSession.open(path) as again:
            assert content(again.session) == after


# A file that is damaged


reached: list[str] = []
"""The ids of the calls that took effect."""


@wink.tool(reach="irreversible")
def send(text: str, *, context: wink.ToolContext) -> str:
    """Send a text."""
    reached.append(context.call_id)
    context.filesystem.append("sent.txt", f"{text}\n")
    return f"sent {text}"


def _run_with_effects(where: Path, *, resume: bool = False) -> str:
    """A run of four calls that reach outside. Returns the answer."""

    def turn(request: ModelRequest) -> ModelTurn | str:
        answers = sum(message.role == "tool" for message in request.messages)
        if answers >= 4:
            return "Done."
        return calls(*(("send", {"text": text}) for text in "abcd"[answers : answers + 2]))

    section = MarkdownSection(title="Task", template="Send.", tools=[send])
    with HostFilesystem(where / "project", store=where / "store") as files:
        prompt = Prompt(PromptTemplate(sections=[section], resources={Filesystem: files}))
        path = where / "run.jsonl"
        saved = SavedSession.open(path) if resume else SavedSession.create(path, Session())
        with prompt.resources, saved:
            if resume:
                saved.recover(files)
            adapter = ScriptedAdapter([turn] * 4)
            return adapter.evaluate(prompt, saved.session, resume=resume).text or ""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[str, ...]]:
    where = tmp_path_factory.mktemp("finished")
    reached.clear()
    (where / "project").mkdir()
    assert _run_with_effects(where) == "Done."
    assert len(set(reached)) == 4
    return where, tuple(reached)


@pytest.mark.heavy
@given(flip=st.booleans(), place=st.integers(0, 1 << 20), bit=st.integers(0, 7))
def test_a_damaged_file_is_not_gone_on_with_and_no_call_on_record_runs_twice(
    finished: tuple[Path, tuple[str, ...]],
    flip: bool,
    place: int,
    bit: int,
):
    """A file that lost its end is like that of a killed run; all else is refused until adopted."""
    original, before = finished
    name = _name(ToolInvoked)
    with TemporaryDirectory() as folder:
        where = Path(folder) / "copy"
        reached[:] = before
        shutil.copytree(original, where, symlinks=True)
        adopt_store(where / "project", store=where / "store")  # a copy is another directory
        path = where / "run.jsonl"
        whole = SavedSessionData.read(path).log[name]
        data = bytearray(path.read_bytes())
        place %= len(data)
        if flip:
            data[place] ^= 1 << bit
        else:
            del data[place:]
        path.write_bytes(data)

        is_short = not flip or place == len(data) - 1  # without its newline, a line is not whole
        try:
            shown = SavedSessionData.read(path, partly=True)
        except SnapshotError:
            shown = None  # not even whose it is
            with pytest.raises(SnapshotError):
                SavedSession.open(path)
        else:
            records = shown.log.get(name, [])
            assert records == whole[: len(records)]
            assert bool(shown.damage) is not is_short
            if shown.damage:
                with pytest.raises(SnapshotError, match="cannot be resumed"):
                    _run_with_effects(where, resume=True)
        assert reached == list(before)

        if shown is None or shown.damage:
            try:
                SavedSession.adopt(path)
            except SnapshotError:
                return
            assert [each.read_bytes() for each in where.glob("run.jsonl.before-*")] == [data]
        if SavedSessionData.read(path).log:
            assert _run_with_effects(where, resume=True) == "Done."
        assert len(set(reached)) == len(reached)


def test_what_is_adopted_is_what_came_before_the_damage(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with SavedSession.create(path, new_session(), about={"task": "t"}) as saved:
        for text in ("first", "second", "third"):
            saved.session.dispatch(Note(text))
            saved.save()
    damaged = path.read_bytes().replace(b"second", b"zecond")
    path.write_bytes(damaged)
    with pytest.raises(SnapshotError, match=r"line 3 of .*a\.jsonl is damaged"):
        SavedSession.open(path)

    assert SavedSession.adopt(path) == 2

    with SavedSession.open(path) as again:
        assert again.session[Note].all() == (Note("first"),)
        assert again.about == {"task": "t"}
        again.session.dispatch(Note("goes on"))
    with SavedSession.open(path) as again:
        assert again.session[Note].all() == (Note("first"), Note("goes on"))
    (copy,) = tmp_path.glob("a.jsonl.before-*")
    assert copy.read_bytes() == damaged
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600


def test_only_the_file_of_a_session_is_adopted_and_none_that_is_in_use(tmp_path: Path):
    (tmp_path / "b.jsonl").write_text('{"hello": 1}\n')
    with pytest.raises(SnapshotError, match="not the file of a session"):
        SavedSession.adopt(tmp_path / "b.jsonl")
    assert (tmp_path / "b.jsonl").read_text() == '{"hello": 1}\n'

    with SavedSession.create(tmp_path / "a.jsonl", Session()), pytest.raises(SessionInUse):
        SavedSession.adopt(tmp_path / "a.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(OSError, match="symbolic links"):
        SavedSession.adopt(tmp_path / "link")


# A run that is killed


def run_child(where: Path, what: str, kill_at: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(__file__).parent / "saved_child.py"), str(where), what, kill_at],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.heavy
@pytest.mark.parametrize("kill_at", ["a", "b", "c", "d", "A", "B", "D"])
def test_a_run_that_was_killed_in_a_call_is_taken_up_at_that_call(tmp_path: Path, kill_at: str):
    """Every call has its effect once: those on record are not made again, and the one is."""
    (tmp_path / "project").mkdir()

    killed = run_child(tmp_path, "run", kill_at)
    assert killed.returncode == -signal.SIGKILL
    resumed = run_child(tmp_path, "resume")

    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.split("\n")[:3] == ["Done.", "a b c d", "a b c d"]
    assert len(list((tmp_path / "run.media").iterdir())) == 4
    assert (tmp_path / "project" / "notes.txt").read_text() == "a\nb\nc\nd\n"


def test_the_models_turn_is_saved_before_its_calls_are_made(tmp_path: Path):
    """An id is what keeps a call that reaches outside from being made twice."""
    seen: list[list[Any]] = []

    @wink.tool
    def look() -> str:
        """Look at the file."""
        seen.append(SavedSessionData.read(tmp_path / "a.jsonl").log[_name(Message)])
        return "seen"

    section = MarkdownSection(title="Task", template="Look.", tools=[look])
    with SavedSession.create(tmp_path / "a.jsonl", Session()) as saved:
        prompt = Prompt(PromptTemplate(sections=[section]))
        ScriptedAdapter([calls("look"), "Done."]).evaluate(prompt, saved.session)

    assert [message["fields"]["role"] for message in seen[0]] == ["user", "model"]


def test_what_a_call_under_way_has_not_committed_is_not_saved(tmp_path: Path):
    with SavedSession.create(tmp_path / "a.jsonl", new_session()) as saved:

        @wink.tool
        def fails(*, context: wink.ToolContext) -> str:
            """Write and fail."""
            context.session.dispatch(Note("never"))
            saved.save()
            assert _name(Note) not in SavedSessionData.read(saved.path).state
            raise ValueError("no")

        assert not fails(context=wink.ToolContext(session=saved.session)).success
        (record,) = SavedSessionData.read(saved.path).log[_name(ToolInvoked)]
        assert record["fields"]["success"] is False
        assert _name(Note) not in SavedSessionData.read(saved.path).state


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"
