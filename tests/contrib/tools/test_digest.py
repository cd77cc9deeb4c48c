from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import weakincentives as wink
from weakincentives.contrib.tools import DigestConfig, WorkspaceDigest, WorkspaceDigestSection
from weakincentives.contrib.tools.digest import BigFile, Folder, HowTo
from weakincentives.errors import MissingExtra, VisibilityExpansionRequired
from weakincentives.filesystem import FileStat, Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import SectionVisibility, expand
from weakincentives.resources import Binding
from weakincentives.runtime import Session, Snapshot

needs_pathspec = pytest.mark.skipif(
    importlib.util.find_spec("pathspec") is None, reason="needs the extra 'files'"
)

PROJECT = {
    "README.md": "# Shop\n\nSells things\nto people.\n\nMore text.\n",
    "pyproject.toml": '[project]\nname = "shop"\n[project.scripts]\nshop = "shop.cli:main"\n'
    "[build-system]\nrequires = []\n[tool.pytest.ini_options]\n[tool.ruff]\n",
    "Makefile": "VAR := 1\ntest: build\n\tpytest\nbuild:\n\ttrue\n.PHONY: test\n",
    "src/shop/__init__.py": "",
    "src/shop/__main__.py": "print('hi')\n",
    "src/shop/cli.py": "def main():\n    return 0\n",
    "src/shop/tool.py": "x = 1\n\nif __name__ == '__main__':\n    print(x)\n",
    "tests/test_cli.py": "if __name__ == '__main__':\n    pass\n",
    "data/orders.csv": "a,b\n" * 100_000,
    "LICENSE": "MIT",
}


class Counting(MemoryFilesystem):
    """Knows what was read and listed."""

    def __init__(self, *args: object, **options: object) -> None:
        self.reads: Counter[str] = Counter()
        self.lists: Counter[str] = Counter()
        super().__init__(*args, **options)  # pyright: ignore[reportArgumentType]

    def read_bytes(self, path: str) -> bytes:
        self.reads[path] += 1
        return super().read_bytes(path)

    def list(self, path: str = ".") -> tuple[FileStat, ...]:
        self.lists[path] += 1
        return super().list(path)

    def forget(self) -> None:
        self.reads.clear()
        self.lists.clear()


class CountingHost(HostFilesystem):
    """The same on disk."""

    reads: Counter[str]

    def read_bytes(self, path: str) -> bytes:
        self.reads[path] += 1
        return super().read_bytes(path)


class Agent:
    """A prompt whose only section is the digest of a workspace."""

    def __init__(self, fs: Filesystem, *, is_open: bool = True, **config: object) -> None:
        self.fs = fs
        self.section = WorkspaceDigestSection(
            filesystem=fs,
            config=DigestConfig(**config),  # pyright: ignore[reportArgumentType]
            resources={Filesystem: fs},
            visibility=SectionVisibility.FULL if is_open else SectionVisibility.SUMMARY,
        )
        self.session = Session()
        self.prompt = wink.Prompt(wink.PromptTemplate(sections=[self.section]))

    def render(self) -> str:
        return self.prompt.render(self.session).text

    @property
    def digest(self) -> WorkspaceDigest:
        """The slice, after a rendering."""
        self.render()
        (digest,) = self.session[WorkspaceDigest].all()
        return digest

    def call(self, name: str, **params: object) -> wink.ToolResult[object]:
        return wink.execute_tool(wink.ToolCall(name, params), session=self.session)

    def note(self, topic: str, text: str, *rests_on: str) -> wink.ToolResult[object]:
        return self.call("update_digest", topic=topic, text=text, rests_on=list(rests_on))


@pytest.fixture
def agent() -> Agent:
    return Agent(MemoryFilesystem(PROJECT))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for path, content in PROJECT.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)
    return root


@pytest.fixture
def disk(directory: Path) -> Iterator[CountingHost]:
    with CountingHost(directory) as fs:
        fs.reads = Counter()
        yield fs


# What is found


def test_a_digest_says_what_a_workspace_holds(agent: Agent):
    digest = agent.digest

    assert digest.about == "Sells things to people."
    assert (digest.files, digest.directories) == (10, 4)
    assert digest.size == sum(len(content) for content in PROJECT.values())
    assert Folder("src", 4) in digest.folders
    assert Folder("src/shop", 4) in digest.folders
    assert digest.top_files == ("LICENSE", "Makefile", "README.md", "pyproject.toml")
    assert digest.entry_points == ("shop (pyproject.toml)", "src/shop/__main__.py")
    assert digest.how_to == (
        HowTo("test", "make test", "Makefile"),
        HowTo("build", "make build", "Makefile"),
        HowTo("test", "python -m pytest", "pyproject.toml"),
        HowTo("build", "python -m build", "pyproject.toml"),
        HowTo("lint", "ruff check", "pyproject.toml"),
    )
    assert digest.big_files == (BigFile("data/orders.csv", 400_000),)
    assert not digest.is_cut


def test_the_same_is_found_on_disk(agent: Agent, disk: HostFilesystem):
    assert Agent(disk).digest == agent.digest


@pytest.mark.parametrize(
    ("path", "content", "commands"),
    [
        (
            "package.json",
            '{"scripts": {"test": "jest", "build": "tsc", "lint": "eslint", "start": "node ."}}',
            ["test npm test", "build npm run build", "lint npm run lint", "run npm start"],
        ),
        ("Cargo.toml", '[package]\nname = "a"\n', ["test cargo test", "build cargo build"]),
        ("go.mod", "module a\n", ["test go test ./...", "build go build ./..."]),
        ("pom.xml", "<project/>", ["test mvn test", "build mvn package"]),
        ("build.gradle", "", ["test gradle test", "build gradle build"]),
        ("CMakeLists.txt", "", ["build cmake -B build && cmake --build build"]),
        ("justfile", "test:\n  x\nlint: test\n  y\n", ["test just test", "lint just lint"]),
        ("tox.ini", "", ["test tox"]),
        ("Makefile", "A = 1\nB := 2\nother:\n\ttrue\n", []),
        ("pyproject.toml", "[broken", []),
        ("package.json", "[1, 2]", []),
        ("package.json", '{"scripts": ["test"], "main": 3, "bin": "x"}', []),
        ("pyproject.toml", 'project = 3\ntool = "x"\n', []),
    ],
)
def test_manifests_tell_how_to_test_and_build(path: str, content: str, commands: list[str]):
    digest = Agent(MemoryFilesystem({path: content})).digest

    assert [f"{each.purpose} {each.command}" for each in digest.how_to] == commands


@pytest.mark.parametrize(
    ("path", "content", "starts"),
    [
        ("till/__main__.py", "", ["till/__main__.py"]),
        ("manage.py", "", ["manage.py"]),
        ("package.json", '{"main": "a.js", "bin": {"do": "b.js"}}',
         ["a.js (package.json)", "do (package.json)"]),
        ("lib.py", "def main(): ...\n", []),
    ],
)  # fmt: skip
def test_entry_points_are_found(path: str, content: str, starts: list[str]):
    assert list(Agent(MemoryFilesystem({path: content})).digest.entry_points) == starts


def test_the_description_nearest_to_the_root_counts():
    files = {
        "README.md": "# Title only\n",
        "web/package.json": '{"description": "the web part"}',
    }
    assert Agent(MemoryFilesystem(files)).digest.about == "Title only"
    files["package.json"] = '{"description": "all of it"}'
    assert Agent(MemoryFilesystem(files)).digest.about == "all of it"


def test_an_empty_workspace_has_a_digest():
    assert Agent(MemoryFilesystem()).digest == WorkspaceDigest()


def test_binary_and_odd_files_do_no_harm():
    files = {
        "a.py": b"\x00\x01" * 100,
        "b.py": b"\xff\xfe latin \xe4\n",
        "c.json": b"",
        "ü \n.md": "x",
        "package.json": "[" * 100_000,
    }
    digest = Agent(MemoryFilesystem(files)).digest

    assert digest.files == 5
    assert "'\\xfc \\n.md'" in digest.render()


# How it is shown


def test_a_summary_is_shown_until_the_section_is_opened():
    agent = Agent(MemoryFilesystem(PROJECT), is_open=False)

    text = agent.render()
    read = agent.call("read_section", section_key="workspace")
    with pytest.raises(VisibilityExpansionRequired) as caught:
        agent.call("open_sections", section_keys=["workspace"], reason="to see more")
    expand(agent.session, caught.value)
    opened = agent.prompt.render(agent.session)

    assert "Sells things to people.\n10 files in 4 directories, 400.4 kB.\n" in text
    assert "Tests: `make test`." in text
    assert "**Layout**" not in text
    assert "**Layout**" in read.render()
    assert "**Layout**" in opened.text
    assert [tool.name for tool in opened.tools] == ["update_digest"]


def test_a_digest_reads_as_follows(agent: Agent):
    text = agent.render()

    for line in (
        "- `src/`: 4 files",
        "  - `src/shop/`: 4 files",
        "- `data/`: 1 file",
        "`LICENSE`, `Makefile`, `README.md`, `pyproject.toml`",
        "- `src/shop/__main__.py`",
        "- test: `make test` (Makefile)",
        "- `data/orders.csv`: 400 kB",
    ):
        assert f"\n{line}\n" in text


def test_long_parts_are_cut():
    files = {f"d{n:02}/a.py": "" for n in range(30)}

    text = Agent(MemoryFilesystem(files), lines=5).render()

    assert "- `d04/`: 1 file\n- and 25 more\n" in text


def test_commands_in_a_directory_say_where():
    files = {"web/package.json": '{"scripts": {"test": "jest"}}'}

    assert "- test: `npm test` in `web` (package.json)" in Agent(MemoryFilesystem(files)).render()


def test_a_workspace_that_is_opened_later_is_given_as_a_function(directory: Path):
    digest = WorkspaceDigestSection(filesystem=lambda: prompt.resources.get(Filesystem))
    opening = Binding(Filesystem, lambda _: HostFilesystem(directory))
    files = wink.MarkdownSection(title="Files", resources={Filesystem: opening})
    prompt = wink.Prompt(wink.PromptTemplate(sections=[files, digest]))

    with prompt.resources:
        assert "10 files in 4 directories" in prompt.render().text


# What it costs


def test_nothing_is_read_again_while_nothing_changes():
    fs = Counting(PROJECT)
    agent = Agent(fs)
    first = agent.digest
    fs.forget()

    assert agent.digest == first
    assert fs.reads == Counter()
    assert fs.lists == Counter([".", "data", "src", "src/shop", "tests"])


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (lambda fs: fs.write("Makefile", "lint:\n"), "Makefile"),
        (lambda fs: fs.write("src/package.json", "{}"), "src/package.json"),
        (lambda fs: fs.move("Makefile", "src/Makefile"), "src/Makefile"),
        (lambda fs: fs.delete("Makefile"), None),
        (lambda fs: fs.write("src/shop/cli.py", "x = 1\n"), None),
        (lambda fs: fs.write("LICENSE", "none"), None),
        (lambda fs: fs.mkdir("empty"), None),
    ],
)
def test_only_what_changed_is_read_again(change, read: str | None):
    fs = Counting(PROJECT)
    agent = Agent(fs)
    agent.render()
    fs.forget()

    change(fs)
    digest = agent.digest

    assert fs.reads == Counter([read] if read else [])
    assert digest == Agent(fs).digest  # as if found anew


def test_on_disk_only_what_changed_is_read_again(disk: CountingHost, directory: Path):
    agent = Agent(disk)
    agent.render()
    disk.reads.clear()

    (directory / "Makefile").write_text("lint:\n")
    digest = agent.digest

    assert disk.reads == Counter(["Makefile"])
    assert digest.how_to[0] == HowTo("lint", "make lint", "Makefile")


def test_a_failed_call_leaves_the_digest_right():
    @wink.tool(reach="reversible")
    def break_things(*, context: wink.ToolContext) -> str:
        """Delete, then fail."""
        context.filesystem.delete("src", recursive=True)
        context.filesystem.write("Makefile", "lint:\n")
        raise ValueError("no")

    fs = MemoryFilesystem(PROJECT)
    section = WorkspaceDigestSection(
        filesystem=fs, tools=[break_things], visibility=SectionVisibility.FULL
    )
    session = Session()
    prompt = wink.Prompt(wink.PromptTemplate(sections=[section], resources={Filesystem: fs}))
    before = prompt.render(session).text

    result = wink.execute_tool(wink.ToolCall("break_things"), session=session)

    assert not result.success
    assert prompt.render(session).text == before


def test_a_workspace_may_be_larger_than_is_looked_at():
    files = {f"d{n}/deep/f.py": "x\n" for n in range(30)} | {f"top{n}.py": "" for n in range(5)}

    agent = Agent(MemoryFilesystem(files), max_files=50)

    assert agent.digest.is_cut
    assert len(agent.digest.top_files) == 5  # nearest to the root first
    assert agent.digest.files < 35
    assert f"More than {agent.digest.files} files in" in agent.render()


def test_directories_without_files_are_not_looked_through_without_end():
    fs = Counting()
    for n in range(200):
        fs.mkdir(f"a{n}/b/c")

    assert Agent(fs, max_files=50).digest.is_cut
    assert len(fs.lists) < 50


def test_large_files_are_counted_and_not_read():
    fs = Counting({"README.md": "x" * 5000, "Makefile": "test:\n"})
    digest = Agent(fs, max_file_bytes=1000, big_file_bytes=2000).digest

    assert fs.reads == Counter(["Makefile"])
    assert digest.files == 2
    assert digest.big_files == (BigFile("README.md", 5000),)


def test_ten_thousand_files_stay_within_bounds():
    """Each directory is listed once a rendering, and only manifests are read."""
    fs = Counting({f"d{n // 100}/f{n}.py": "x = 1\n" for n in range(10_000)} | {"go.mod": ""})
    agent = Agent(fs)

    agent.render()
    assert fs.reads == Counter(["go.mod"])
    assert len(fs.lists) == 101
    fs.forget()
    fs.write("d5/f500.py", "x = 2\n")
    text = agent.render()

    assert fs.reads.total() == 0
    assert fs.lists.total() == 101
    assert len(text) < 5000


# What is left out


@needs_pathspec
def test_ignored_files_are_left_out():
    fs = Counting(
        {
            ".gitignore": "node_modules/\n*.log\n!keep.log\n/build\n",
            "app.py": "x\n",
            "a.log": "x",
            "keep.log": "x",
            "build/out.py": "x\n",
            "src/build/in.py": "x\n",
            "src/.gitignore": "secret.py\n!*.log\n",
            "src/secret.py": "x\n",
            "src/b.log": "x",
            "node_modules/m/index.js": "x\n",
            ".git/config": "x",
        }
    )
    agent = Agent(fs)

    assert agent.digest.files == 6
    assert [folder.path for folder in agent.digest.folders] == ["src", "src/build"]
    assert "node_modules" not in fs.lists
    assert ".git" not in fs.lists

    fs.write(".gitignore", "src/\n")
    assert "src" not in [folder.path for folder in agent.digest.folders]
    assert "node_modules" in [folder.path for folder in agent.digest.folders]


@needs_pathspec
def test_ignored_files_are_counted_when_asked():
    fs = MemoryFilesystem({".gitignore": "*.py\n", "a.py": "x\n"})

    assert Agent(fs, gitignore=False).digest.files == 2
    assert Agent(fs).digest.files == 1


def test_without_what_reads_gitignore_it_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pathspec", None)
    fs = MemoryFilesystem({".gitignore": "*.py\n"})

    with pytest.raises(MissingExtra, match="pathspec is not installed"):
        Agent(fs).render()
    assert Agent(fs, gitignore=False).digest.files == 1


def test_links_are_not_followed(disk: HostFilesystem, directory: Path, tmp_path: Path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.py").write_text("x\n")
    before = Agent(disk).digest
    os.symlink(".", directory / "loop")
    os.symlink(tmp_path / "outside", directory / "out")
    os.symlink("nowhere", directory / "dangling")
    os.mkfifo(directory / "pipe")

    assert Agent(disk).digest == before


# What a model adds


def test_a_note_is_kept_and_shown(agent: Agent):
    agent.render()

    result = agent.note("Prices", "Prices are in cents.", "src/shop/cli.py", "Makefile")

    assert result.success, result.message
    assert "- **Prices**: Prices are in cents." in agent.render()
    assert "Notes: 1." in agent.render()


def test_a_note_is_marked_once_what_it_rests_on_has_changed(agent: Agent):
    agent.render()
    agent.note("Prices", "In cents.", "src/shop/cli.py", "Makefile")

    agent.fs.write("LICENSE", "other")
    assert agent.digest.notes[0].outdated == ()
    before = agent.fs.read("Makefile")
    agent.fs.write("Makefile", "all:\n")
    text = agent.render()

    assert "- **Prices** (outdated: Makefile changed since): In cents." in text
    assert "Notes: 1, 1 outdated." in text
    agent.fs.write("Makefile", before)  # the same content, at another time
    assert agent.digest.notes[0].outdated == ()
    agent.fs.delete("src/shop/cli.py")
    assert agent.digest.notes[0].outdated == ("src/shop/cli.py",)


def test_a_note_may_rest_on_a_directory_and_on_a_large_file(agent: Agent):
    agent.render()
    agent.note("Code", "Small.", "src")
    agent.note("Data", "Large.", "data/orders.csv")

    agent.fs.write("src/shop/more.py", "x\n")
    assert [note.outdated for note in agent.digest.notes] == [("src",), ()]
    agent.fs.append("data/orders.csv", "x")
    assert [note.outdated for note in agent.digest.notes] == [("src",), ("data/orders.csv",)]


def test_notes_cost_no_reading_while_nothing_changes():
    fs = Counting(PROJECT)
    agent = Agent(fs)
    agent.render()
    agent.note("Prices", "In cents.", "src/shop/cli.py", "src")
    agent.render()
    fs.forget()

    agent.render()

    assert fs.reads == Counter()


def test_a_topic_has_one_note(agent: Agent):
    agent.render()
    agent.note("Prices", "In cents.", "LICENSE")
    agent.note("Taxes", "None.", "LICENSE")
    agent.note("Prices", "In euros.", "/workspace/LICENSE")

    assert [note.text for note in agent.digest.notes] == ["None.", "In euros."]
    assert agent.note("Prices", "", "LICENSE").message == "Note removed"
    assert [note.topic for note in agent.digest.notes] == ["Taxes"]


def test_the_oldest_notes_go_when_there_are_too_many(agent: Agent):
    agent.render()
    for n in range(22):
        agent.note(f"topic {n}", "x", "LICENSE")

    assert [note.topic for note in agent.digest.notes] == [f"topic {n}" for n in range(2, 22)]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"rests_on": ["no.txt"]}, "No such file or directory: no.txt"),
        ({"rests_on": ["../x"]}, "../x is outside the root"),
        ({"rests_on": []}, "rests_on"),
        ({"topic": ""}, "topic"),
        ({"text": "x" * 2001}, "text"),
    ],
)
def test_a_note_that_cannot_be_kept_is_refused(agent: Agent, params: dict, message: str):
    agent.render()

    result = agent.call(
        "update_digest", **{"topic": "a", "text": "b", "rests_on": ["LICENSE"], **params}
    )

    assert not result.success
    assert message in result.message
    assert agent.digest.notes == ()


def test_a_note_can_be_made_before_anything_was_rendered_for_the_session(agent: Agent):
    (tool,) = agent.section.tools
    context = wink.ToolContext(session=Session(), resources={Filesystem: agent.fs})

    result = tool(topic="a", text="b", rests_on=["LICENSE"], context=context)

    assert result.success
    digest = context.session[WorkspaceDigest].latest()
    assert digest is not None
    assert (digest.files, digest.notes[0].text) == (10, "b")


# Where it is kept


def test_notes_belong_to_a_session_and_follow_its_snapshots(agent: Agent):
    agent.render()
    before = agent.session.snapshot()
    agent.note("Prices", "In cents.", "LICENSE")
    other = Session()

    assert "In cents." not in agent.prompt.render(other).text
    agent.session.restore(before)
    assert "In cents." not in agent.render()


def test_a_digest_goes_to_another_process(agent: Agent):
    agent.render()
    agent.note("Prices", "In cents.", "LICENSE")
    digest = agent.digest

    text = agent.session.snapshot().to_json(include_log=False)
    copy = Session.from_snapshot(Snapshot.from_json(text))

    assert copy[WorkspaceDigest].latest() == digest


def test_the_slice_holds_one_digest(agent: Agent):
    agent.render()
    agent.fs.write("new.py", "x\n")
    agent.render()

    (digest,) = agent.session[WorkspaceDigest].all()
    assert digest.files == 11


def test_a_rendering_without_a_session_works(agent: Agent):
    assert "Sells things to people." in agent.prompt.render().text


@pytest.mark.parametrize("name", ["max_files", "max_file_bytes", "big_file_bytes", "lines"])
def test_a_configuration_that_makes_no_sense_is_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        DigestConfig(**{name: 0})


def test_the_example_runs_as_it_says():
    root = Path(__file__).parents[3]

    shown = subprocess.run(
        [sys.executable, str(root / "examples" / "digest_and_evaluate.py")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert "  | 6 files in 2 directories, 218 bytes.\n" in shown
    assert "Line 6: ValueError: invalid literal for int() with base 10: 'n/a'\n" in shown
    assert "  files: sales/monday.csv, sales/tuesday.csv\n" in shown
    assert "A script leaves such rows out: ok\n  | => 620\n" in shown
    assert "/etc/passwd is outside the root" in shown
    assert "The digest knows 8 files by now." in shown


def test_a_byte_order_mark_hides_nothing():
    mark = "\ufeff"
    fs = MemoryFilesystem(
        {
            "README.md": f"{mark}# Shop\n\nSells things.\n",
            "package.json": f'{mark}{{"scripts": {{"test": "x"}}}}',
        }
    )
    digest = WorkspaceDigestSection(filesystem=fs).digest()

    assert digest.about == "Sells things."
    assert [each.command for each in digest.how_to] == ["npm test"]


@needs_pathspec
def test_a_byte_order_mark_is_not_part_of_the_first_rule():
    fs = MemoryFilesystem({".gitignore": "\ufeffout\n", "out/a.py": "", "b.py": ""})

    assert WorkspaceDigestSection(filesystem=fs).digest().files == 2


def test_a_file_that_changes_while_it_is_read_is_read_again():
    class Busy(MemoryFilesystem):
        left = 1

        def read_bytes(self, path: str) -> bytes:
            data = super().read_bytes(path)
            if self.left:
                self.left -= 1
                self.write(path, "test:\nlint:\n")
            return data

    section = WorkspaceDigestSection(filesystem=Busy({"Makefile": "test:\n"}))

    assert [len(section.digest().how_to) for _ in range(2)] == [1, 2]
