from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import ATTACKS, BYPASS, ESCAPES, NUMPY, PRIVILEGED, SECRET, Host

import weakincentives as wink
from ordinary_user import OrdinaryUser
from weakincentives.contrib.tools import AstevalConfig, AstevalSection, asteval
from weakincentives.contrib.tools.asteval import Evaluation
from weakincentives.contrib.tools.sandbox import seccomp
from weakincentives.core.deadlines import Deadline
from weakincentives.errors import DeadlineExceededError, MissingExtra
from weakincentives.filesystem import Filesystem, HostFilesystem, MemoryFilesystem
from weakincentives.prompt import ReadBeforeWritePolicy
from weakincentives.runtime import ToolInvoked, execute_tools
from weakincentives.testing import make_context

pytestmark = [
    pytest.mark.sampled,
    pytest.mark.skipif(
        importlib.util.find_spec("asteval") is None, reason="needs the extra 'asteval'"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="scripts are locked up on Linux only"),
]

PATIENT = AstevalConfig(timeout=600)
"""For scripts that are not about time: the machine may be busy, or stand still."""
FILES = {"a.txt": "one\ntwo\n", "data/b.csv": "x,y\n1,2\n3,4\n", "logo.png": b"\x89PNG\xff"}
HAS_NUMPY = importlib.util.find_spec("numpy") is not None


class Agent:
    """Calls of ``evaluate_python`` over a workspace."""

    def __init__(self, fs: Filesystem | None = None, **options: object) -> None:
        self.fs = MemoryFilesystem(FILES) if fs is None else fs
        config = AstevalConfig(**{"timeout": 600.0, **options})
        (self.tool,) = AstevalSection(config=config).tools
        self.context = make_context(fs=self.fs)

    def __call__(self, code: str, **fields: object) -> wink.ToolResult[Evaluation]:
        context = replace(self.context, **fields) if fields else self.context
        return self.tool(code=textwrap.dedent(code), context=context)


@pytest.fixture
def agent() -> Agent:
    return Agent()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.close()


# What it is for


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("1 + 1", "2"),
        ("x = 3\ny = x * 2\n(x, y)", "(3, 6)"),
        ("def f(n):\n    return n if n < 2 else f(n - 1) + f(n - 2)\nf(12)", "144"),
        ("import json\njson.dumps({'a': [1, None]})", "'{\"a\": [1, null]}'"),
        ("from statistics import mean as m\nm([1, 2, 6])", "3"),
        ("import datetime\ndatetime.datetime.strptime('2024-02-29', '%Y-%m-%d').day", "29"),
        ("import re\n[m for m in re.findall('[a-z]+', 'a1bc')]", "['a', 'bc']"),
        ("'\\N{SNOWMAN}'.encode('utf-16-le')", "b'\\x03&'"),
        ("sum(x * x for x in range(4) if x)", "14"),
        ("x: int = 3\nx", "3"),
        ("try:\n    1 / 0\nexcept (KeyError, ZeroDivisionError):\n    x = 'caught'\nx", "'caught'"),
        ("None", ""),
        ("x = 1", ""),
    ],
)
def test_the_last_expression_is_the_value(agent: Agent, code: str, value: str):
    result = agent(code)

    assert result.success, result.message
    assert result.value == Evaluation(value)


def test_what_the_interpreter_takes_it_runs_as_python_does():
    """As it comes, asteval lets some errors pass in silence, and gets some syntax wrong."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("snippets.py"))],
        capture_output=True,
        text=True,
        check=True,
    )

    outcome = json.loads(done.stdout)
    assert outcome["differing"] == []
    assert outcome["tried"] > 80


def test_a_function_does_not_see_the_variables_of_the_one_around_it(agent: Agent):
    code = "def outer(n):\n    def inner():\n        return n\n    return inner\nouter(3)()"

    assert "NameError: name 'n' is not defined" in agent(code).message


def test_what_is_printed_comes_before_the_value(agent: Agent):
    result = agent("print('a', 'b', sep='-', end='!')\nprint()\n7")

    assert result.value == Evaluation("7", "a-b!\n")
    assert result.render() == "a-b!\n=> 7"


def test_variables_do_not_live_on(agent: Agent):
    agent("x = 1")

    assert "name 'x' is not defined" in agent("x").message


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("x = 1\ny = x / 0", "Line 2: ZeroDivisionError: division by zero\n2 | y = x / 0"),
        (
            "def f(a):\n    return a.index('c')\n\nf('b')",
            "Line 2: ValueError: substring not found\n2 |     return a.index('c')",
        ),
        ("x = (", "Line 1: SyntaxError: '(' was never closed\n1 | x = ("),
        ("a = 1\nraise ValueError('no good')", "Line 2: ValueError: no good\n2 | raise ValueErr"),
        ("assert 1 == 2, 'they differ'", "Line 1: AssertionError: they differ"),
        ("x = 1\nclass A:\n    pass", "Line 2: SyntaxError: a class is not supported here"),
        ("print(*[1])", "Line 1: SyntaxError: * before a value is not supported here"),
        ("{**{}}", "Line 1: SyntaxError: ** in a dict is not supported here"),
        ("def f(*, a):\n    return a", "SyntaxError: * or / among parameters is not supported"),
        ("@print\ndef f():\n    return 1", "Line 2: SyntaxError: a decorator is not supported"),
        ("raise", "Line 1: SyntaxError: raise without an exception is not supported here"),
        ("raise 3", "Line 1: TypeError: exceptions must derive from Exception"),
        ("try:\n    1\nexcept Mine:\n    2", "Line 3: SyntaxError: except with an exception that"),
        ("import os", "Line 1: ImportError: 'os' cannot be imported here"),
    ],
)
def test_an_error_names_its_line(agent: Agent, code: str, message: str):
    result = agent(code)

    assert result.failure is not None
    assert result.failure.code == "SCRIPT_FAILED"
    assert result.message.startswith(message)


def test_a_script_that_fails_says_what_it_had_printed(agent: Agent):
    result = agent("print('so far')\n1 / 0")

    assert result.message.endswith("Output before that:\nso far\n")


# The workspace


def test_a_script_reads_and_lists_the_workspace(agent: Agent):
    result = agent(
        """
        total = 0
        with open('data/b.csv') as file:
            file.readline()
            for line in file:
                total += int(line.split(',')[1])
        (total, read_file('/workspace/a.txt'), glob_files('**/*.csv'), file_exists('no'),
         list_directory(), open('logo.png', 'rb').read())
        """
    )

    assert result.value is not None
    assert result.value.value == repr(
        (
            6,
            "one\ntwo\n",
            ["data/b.csv"],
            False,
            [("a.txt", "file", 8), ("data", "directory", 0), ("logo.png", "file", 5)],
            b"\x89PNG\xff",
        )
    )


def test_a_script_changes_the_workspace(agent: Agent):
    result = agent(
        """
        with open('new/report.txt', 'w') as file:
            file.write('ä = 1\\n')
        left_open = open('left.txt', 'w')
        left_open.write('closed for it')
        with open('a.txt', 'a') as file:
            print('three', file=file)
        write_file('raw.bin', b'\\xff')
        delete_file('logo.png')
        """
    )

    assert result.success, result.message
    assert agent.fs.read("new/report.txt") == "ä = 1\n"
    assert agent.fs.read("left.txt") == "closed for it"
    assert agent.fs.read("a.txt") == "one\ntwo\nthree\n"
    assert agent.fs.read_bytes("raw.bin") == b"\xff"
    assert not agent.fs.exists("logo.png")


@pytest.mark.parametrize(
    "end", ["1 / 0", "while True:\n    pass", "[0] * 10**10", "f = lambda: f()\nf()", "open('no')"]
)
def test_a_script_that_fails_or_is_killed_changes_nothing(end: str):
    agent = Agent(timeout=0.5)

    result = agent(f"write_file('a.txt', 'half')\nwrite_file('b.txt', 'new')\n{end}")

    assert not result.success
    assert "Filesystem" in " ".join(result.metadata.undone)
    assert agent.fs.read("a.txt") == "one\ntwo\n"
    assert not agent.fs.exists("b.txt")


def test_a_directory_on_disk_is_rolled_back_too(tmp_path: Path):
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "a.txt").write_text("one")
    with HostFilesystem(tmp_path / "w") as fs:
        agent = Agent(fs)

        assert agent("write_file('b.txt', read_file('a.txt') + '!')").success
        assert not agent("write_file('a.txt', 'two')\ndelete_file('b.txt')\n1 / 0").success

    assert (tmp_path / "w" / "a.txt").read_text() == "one"
    assert (tmp_path / "w" / "b.txt").read_text() == "one!"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("open('no.txt')", "FileNotFoundError: No such file or directory: no.txt"),
        ("open('data')", "IsADirectoryError: data is a directory"),
        ("open('../x')", "PermissionError: ../x is outside the root"),
        ("open('a.txt', 'x')", "FileExistsError: a.txt exists"),
        ("open('a.txt', 'r+')", "ValueError: mode must be r, w, a or x"),
        ("read_file('logo.png')", "ValueError: logo.png is not utf-8 text: use open(path, 'rb')"),
        ("list_directory('a.txt')", "NotADirectoryError: a.txt is a file"),
        ("write_file('x', '\\ud800')", "surrogates not allowed"),
        ("open(1)", "The script broke the interpreter and was stopped"),
    ],
)
def test_what_cannot_be_done_with_a_file_is_said(agent: Agent, code: str, message: str):
    assert message in agent(code).message


def test_what_was_refused_and_caught_is_not_tried_again(agent: Agent):
    agent.fs.set_readonly("a.txt")

    result = agent(
        """
        try:
            with open('a.txt', 'w') as file:
                file.write('x')
        except PermissionError:
            print('left alone')
        """
    )

    assert result.value == Evaluation("", "left alone\n")


def test_a_script_can_catch_what_goes_wrong_with_a_file(agent: Agent):
    result = agent(
        """
        try:
            read_file('no.txt')
        except FileNotFoundError:
            found = 'nothing'
        found
        """
    )

    assert result.value == Evaluation("'nothing'")


def test_a_script_is_no_way_round_the_policy_on_unread_files():
    @wink.tool(reach="reversible")
    def write_file(path: str, content: str, *, context: wink.ToolContext) -> str:
        """Write a file."""
        context.filesystem.write(path, content)
        return "written"

    files = wink.MarkdownSection(
        title="Files",
        tools=[write_file],
        policies=[ReadBeforeWritePolicy()],
        resources={Filesystem: MemoryFilesystem(FILES)},
    )
    session = wink.Session()
    wink.Prompt(wink.PromptTemplate(sections=[files, AstevalSection(config=PATIENT)])).render(
        session
    )

    def call(name: str, **params: str) -> wink.ToolResult[object]:
        return wink.execute_tool(wink.ToolCall(name, params), session=session)

    denied = call("evaluate_python", code="write_file('a.txt', 'x')")
    assert "Cannot write to a.txt without reading it first" in denied.message
    assert not call("write_file", path="a.txt", content="x").success
    assert call("evaluate_python", code="write_file('mine.txt', 'x')").success
    assert call("write_file", path="mine.txt", content="y").success
    failed = call("evaluate_python", code="read_file('a.txt')\n1 / 0")
    assert not failed.success
    assert not call("write_file", path="a.txt", content="x").success  # it was never read
    assert call("evaluate_python", code="read_file('a.txt')").success
    assert call("write_file", path="a.txt", content="x").success


def test_scripts_of_one_turn_do_not_lose_each_others_changes():
    fs = MemoryFilesystem({"count.txt": "0"})
    section = AstevalSection(resources={Filesystem: fs})
    session = wink.Session()
    wink.Prompt(wink.PromptTemplate(sections=[section])).render(session)
    code = "write_file('count.txt', str(int(read_file('count.txt')) + 1))"

    results = execute_tools([wink.ToolCall("evaluate_python", {"code": code})] * 3, session=session)

    assert all(result.success for result in results)
    assert fs.read("count.txt") == "3"


# Limits


def test_an_endless_loop_is_killed():
    result = Agent(timeout=0.3)("while True:\n    pass")

    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"
    assert result.message.startswith("The script took longer than 0.3 s and was stopped")


def test_a_script_ends_with_the_deadline_of_its_call(agent: Agent):
    with pytest.raises(DeadlineExceededError):
        agent("while True:\n    pass", deadline=Deadline.after(0.5))

    (record,) = agent.context.session[ToolInvoked].all()
    assert not record.success


def test_a_script_that_nobody_waits_for_is_ended():
    """It asks for a file, so that we know it is running; then the caller gives up."""

    class Watched(MemoryFilesystem):
        def exists(self, path: str) -> bool:
            running.set()
            return False

    running = threading.Event()
    agent = Agent(Watched())
    signal = wink.ToolContext(session=wink.Session()).signal
    handler = agent.tool.handler
    assert handler is not None
    context = replace(agent.context, signal=signal)
    params = asteval.AstevalParams("file_exists('x')\nwhile True:\n    pass")
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(handler(params, context=context)))
    thread.start()
    assert running.wait(240)
    signal.cancel()
    thread.join(240)

    (result,) = results
    assert isinstance(result, wink.ToolResult)
    assert result.failure is not None
    assert result.failure.code == "CANCELLED"


def test_nothing_is_left_of_a_script(agent: Agent):
    before = ours()
    for code in ("1", "1 / 0", "[0] * 10**10"):
        agent(code)
    Agent(timeout=0.2)("while True:\n    pass")

    assert ours() <= before  # what an earlier test has left may end meanwhile


def ours() -> set[str]:
    """Return what leads to other processes, and the processes that this thread has started."""
    found = set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing itself
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {each for each in found if each.isdigit() or each.startswith(("socket:", "pipe:"))}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("[0] * 10**9", "MemoryError"),
        ("x = [1]\nwhile True:\n    x = x + x", "MemoryError"),
        ("bytearray(10**10)", "MemoryError"),
        ("f = lambda n: f(n + 1)\nf(0)", "RecursionError"),
        ("(" * 5000, "SyntaxError"),
        ("x = []\nfor i in range(20000):\n    x = [x]\nx", "RecursionError"),
        ("9 ** 9 ** 9", "Invalid exponent"),
    ],
)
def test_what_asks_for_too_much_fails_by_itself(agent: Agent, code: str, message: str):
    result = agent(code)

    assert not result.success
    assert message in result.message


def test_long_output_and_long_values_are_cut():
    agent = Agent(output_limit=100)

    printed = agent("for i in range(1000):\n    print('x' * 1000)").value
    value = agent("list(range(100000))").value

    assert printed is not None
    assert printed.stdout == "x" * 100 + "\n[Truncated: the first 100 of 1001000 characters]"
    assert value is not None
    assert value.value.startswith("[0, 1, 2,")
    assert value.value.endswith(
        f"[Truncated: the first 100 of {len(repr(list(range(100000))))} characters]"
    )


def test_a_long_error_is_cut():
    result = Agent(output_limit=100)("raise ValueError(str(list(range(100000))))")

    assert result.failure is not None
    assert result.failure.code == "SCRIPT_FAILED"
    assert len(result.message) < 400


def test_a_script_may_use_so_many_bytes_of_files_in_all():
    agent = Agent(file_bytes=1000)

    reading = agent("for i in range(200):\n    read_file('a.txt')")
    writing = agent("for i in range(20):\n    write_file(str(i), 'x' * 100)")

    assert "Cannot read a.txt: it has 8 bytes, and the script may read" in reading.message
    assert "Cannot write 10: it has 100 bytes" in writing.message
    assert len(agent.fs.glob("**/*")) == len(FILES)


def test_a_file_larger_than_all_that_may_be_written_ends_the_script():
    result = Agent(file_bytes=1000)("write_file('big', 'x' * 1001)")

    assert result.failure is not None
    assert result.failure.code == "LIMIT_EXCEEDED"
    assert "it may write 1000 bytes, and big is larger" in result.message


def test_a_script_may_use_files_so_often():
    result = Agent(file_operations=10)("for i in range(11):\n    file_exists('x')")

    assert result.failure is not None
    assert result.failure.code == "LIMIT_EXCEEDED"


# Escapes


@pytest.mark.parametrize("name", ESCAPES)
def test_known_escapes_lead_nowhere(host: Host, name: str):
    agent = Agent()
    names = "".join(f"{name} = {value!r}\n" for name, value in host.names().items())

    result = agent(names + ESCAPES[name].strip())

    assert host.damage(result.render()) == []
    assert not result.success or not agent.fs.exists(str(host.marker))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """Runs plain Python in the process that is meant for scripts: no interpreter in between."""
    child = Path(asteval.__file__).with_name("_asteval_child.py")
    program = f"""
import sys
from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("child", {str(child)!r})
child = module_from_spec(spec)
spec.loader.exec_module(child)

# All that attacks import, so that it is not for want of a module that they fail.
import ctypes, importlib.machinery, multiprocessing, os, resource, shutil, signal, socket, stat
import subprocess, threading, traceback


def prepare(modules, numpy, output):
    def run(code):
        printed = child.Printed(output)
        sys.stdout = sys.stderr = printed
        try:
            exec(code, {{"child": child}})
            error = None
        except BaseException as raised:
            error = {{"type": type(raised).__name__, "message": str(raised), "line": None}}
        return {{"value": "", "value_chars": 0, "stdout": "".join(printed.parts),
                "stdout_chars": printed.length, "error": error}}
    return run


child.prepare = prepare
child.main()
"""
    monkeypatch.setattr(asteval, "_CHILD", program)
    return Agent()


ALL_ATTACKS = {**ATTACKS, **PRIVILEGED}


def test_the_process_holds_when_the_interpreter_does_not(plain: Agent, host: Host):
    """All attacks after one another; the one that got through is the last that is named."""
    result = plain(
        f"""
        for name, attack in {ALL_ATTACKS!r}.items():
            print(name)
            try:
                exec(attack, {host.names()!r} | {{"__builtins__": __builtins__}})
            except BaseException as error:
                print(type(error))
        print("all tried")
        """
    )

    assert host.damage(result.render()) == []
    assert result.render().endswith("all tried")


@pytest.mark.heavy
@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_each_attack_alone_leads_nowhere(plain: Agent, host: Host, name: str):
    names = "".join(f"{name} = {value!r}\n" for name, value in host.names().items())

    result = plain(names + ALL_ATTACKS[name].strip())

    assert host.damage(result.render()) == []


@pytest.mark.heavy
@pytest.mark.parametrize("name", ALL_ATTACKS)
def test_the_same_attack_does_harm_elsewhere(host: Host, name: str):
    """So that the tests above can fail."""
    if name in PRIVILEGED and os.geteuid() != 0:
        pytest.skip("takes root")
    names = "".join(f"{name} = {value!r}\n" for name, value in host.names().items())

    done = subprocess.run(
        [sys.executable, "-c", names + ALL_ATTACKS[name].strip()],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )

    if name in ("io_uring", "ptrace", "memory of another process", "mount", "namespace") and (
        "ESCAPED" not in done.stdout
    ):
        pytest.skip("this machine does not allow it to anybody")
    assert host.damage(done.stdout + done.stderr, patience=240) != []


def test_an_escape_from_the_interpreter_ends_in_the_same_process(host: Host):
    """The interpreter is left for good, by way of a module that it offers, and it is no use."""
    agent = Agent()
    names = "".join(f"{name} = {value!r}\n" for name, value in host.names().items())

    proof = agent(f"PLAIN = 'raise KeyError(__builtins__.keys())'\n{BYPASS}")
    attack = agent(f"PLAIN = {(names + ATTACKS['open'])!r}\n{BYPASS}")

    assert "__import__" in proof.message
    assert "Operation not permitted" in attack.message
    assert host.damage(attack.render()) == []


def test_a_fork_bomb_starts_nothing(plain: Agent):
    result = plain("import os\nwhile True:\n    os.fork()")

    assert "Operation not permitted" in result.message


def test_the_numbers_of_the_system_calls_are_those_of_the_kernel():
    """A wrong one would allow something else."""
    places = {
        Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"): 0,
        Path("/usr/include/asm-generic/unistd.h"): 1,
    }
    found = {header: column for header, column in places.items() if header.exists()}
    if not found:
        pytest.skip("the kernel's headers are not installed")
    for header, column in found.items():
        defined = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
        numbers = {name: int(number) for name, number in defined}

        assert {name: numbers[name] for name in seccomp.COMPUTING} == {
            name: pair[column] for name, pair in seccomp.COMPUTING.items()
        }


def test_the_environment_of_the_host_is_not_inherited(
    plain: Agent, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WINK_TOKEN", SECRET)

    result = plain("import os, sys\nprint(dict(os.environ), sys.argv)")

    assert result.success
    assert SECRET not in result.render()
    assert str(Path.home()) not in str(result.value and result.value.stdout.split("}")[0])


def test_descriptors_of_the_host_are_not_inherited(plain: Agent, host: Host):
    with host.secret.open() as secret:
        os.set_inheritable(secret.fileno(), True)
        result = plain(
            """
            import os
            found = []
            for fd in range(1, 4096):
                try:
                    os.read(fd, 1)
                    found.append(fd)
                except OSError:
                    pass
            print(found)
            """
        )

    assert result.render() == "[]"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="machine code of x86-64")
def test_system_calls_of_another_kind_are_no_way_round(plain: Agent):
    """32-bit calls have other numbers: the filter must not mistake one for another."""
    result = plain(
        """
        import ctypes, mmap
        page = mmap.mmap(-1, 4096, prot=7)
        page.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20 (getpid); int 0x80; ret
        call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))
        print('ESCAPED', call())
        """
    )

    assert not result.success
    assert "ESCAPED" not in result.render()


@pytest.mark.parametrize(
    "code",
    [
        "child.send({'operation': 'read', 'argument': ['/etc/passwd']})\nchild.receive()",
        "child.send({'operation': 'run', 'argument': 'id'})\nchild.receive()",
        "child.send({'operation': ['read'], 'argument': None})\nchild.receive()",
        "child.send({'operation': 'read'})\nchild.receive()",
        "child.send({'value': 1})\nchild.receive()",
        "child.send({'value': '', 'value_chars': '9', 'stdout': '', 'stdout_chars': 0})\n"
        "child.receive()",
        "import os\nos.write(0, b'\\xff\\xff\\xff\\xff')\nchild.receive()",
        "import os\nos.write(0, b'\\x00\\x00\\x00\\x03abc')\nchild.receive()",
        "import os\ntext = b'[' * 100000\nos.write(0, len(text).to_bytes(4, 'big') + text)\n"
        "child.receive()",
        "import os\nos._exit(0)",
        "import ctypes\nctypes.string_at(0)",
    ],
)
def test_a_process_that_talks_nonsense_is_ended(plain: Agent, code: str):
    result = plain(code)

    assert result.failure is not None
    assert result.failure.code == "SCRIPT_ENDED"


def test_a_process_that_does_not_listen_is_ended(plain: Agent):
    """What we send it has no room any more, and still the time runs out."""
    (plain.tool,) = AstevalSection(config=AstevalConfig(timeout=1.0)).tools
    plain.fs.write("big.txt", "x" * 4_000_000)

    result = plain(
        """
        for _ in range(3):
            child.send({'operation': 'read', 'argument': 'big.txt'})
        while True:
            pass
        """
    )

    assert result.failure is not None
    assert result.failure.code == "TIMEOUT"


def test_a_forged_answer_is_the_answer_of_the_script(plain: Agent):
    """It may say what it likes; it cannot be longer or of another kind than an answer is."""
    result = plain(
        "child.send({'value': 'x' * 90000, 'value_chars': 1, 'stdout': '\\ud800',"
        " 'stdout_chars': 1, 'error': None})"
    )

    assert result.value is not None
    assert result.value.value.endswith("[Truncated: the first 20000 of 90000 characters]")
    assert result.value.stdout == "?"


# Where it can run

ELSEWHERE = SimpleNamespace(platform="darwin", executable=sys.executable)


def test_without_a_filter_it_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asteval, "sys", ELSEWHERE)

    result = Agent()("1 + 1")

    assert result.failure is not None
    assert (result.failure.code, result.failure.recoverable) == ("NO_ISOLATION", False)
    assert "there is no seccomp on darwin" in result.message
    assert "AstevalConfig(isolation='none')" in result.message


def test_a_filter_that_cannot_be_set_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(seccomp, "MACHINES", {"vax": (0, 0)})

    result = Agent()("1 + 1")

    assert result.failure is not None
    assert result.failure.code == "NO_ISOLATION"
    assert f"the system calls of {platform.machine()} are not known" in result.message


def test_a_filter_that_the_kernel_does_not_take_is_a_refusal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asteval, "computing_program", lambda: bytes(8))

    result = Agent()("1 + 1")

    assert result.failure is not None
    assert result.failure.code == "NO_ISOLATION"
    assert "the kernel refuses the seccomp filter" in result.message


def test_without_isolation_it_runs_when_asked_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asteval, "sys", ELSEWHERE)
    agent = Agent(isolation="none")

    assert agent("read_file('a.txt')").success
    assert "cannot be imported" in agent("import json").message
    assert (
        "`import` works for: nothing."
        in AstevalSection(config=AstevalConfig(isolation="none")).template
    )


def test_without_isolation_the_limits_hold():
    endless = Agent(isolation="none", timeout=1.0)("while True:\n    pass")

    assert "MemoryError" in Agent(isolation="none")("[0] * 10**9").message
    assert endless.failure is not None
    assert endless.failure.code == "TIMEOUT"


def test_a_process_that_cannot_be_started_is_said():
    result = Agent(memory_bytes=8_000_000)("1 + 1")

    assert result.failure is not None
    assert result.failure.code == "NOT_STARTED"
    assert not result.failure.recoverable


@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user already")
def test_it_works_the_same_for_an_ordinary_user(
    host: Host, ordinary_user: OrdinaryUser, home: Path
):
    program = """
import json, sys
from weakincentives.contrib.tools import AstevalConfig, AstevalSection
from weakincentives.testing import make_context_with_files

(tool,) = AstevalSection(config=AstevalConfig(timeout=600)).tools
context = make_context_with_files({"a.txt": "one"})
for code in json.load(sys.stdin):
    print(tool(code=code, context=context).render())
"""
    secret = shutil.copy(host.secret, home / "secret")
    os.chmod(secret, 0o644)
    bypass = f"PLAIN = {ATTACKS['open'].replace('SECRET_PATH', repr(str(secret)))!r}\n{BYPASS}"

    done = ordinary_user.run(
        "-c", program, home=home, stdin=json.dumps(["1 + 1", "read_file('a.txt')", bypass])
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("=> 2\n=> 'one'\n")
    assert host.damage(done.stdout) == []


def test_a_machine_with_lower_limits_keeps_them():
    """A hard limit that is lower than ours cannot be raised, and need not be."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (120, 120))\n"
        "from weakincentives.contrib.tools import AstevalConfig, AstevalSection\n"
        "from weakincentives.testing import make_context\n"
        "(tool,) = AstevalSection(config=AstevalConfig(timeout=600)).tools\n"
        "print(tool(code='1 + 1', context=make_context()).render())\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert resource.getrlimit(resource.RLIMIT_CPU)[1] != 120
    assert done.stdout == "=> 2\n", done.stderr


# numpy


def test_numpy_is_not_offered_unless_asked_for(agent: Agent):
    assert "cannot be imported" in agent("import numpy").message
    assert "name 'linspace' is not defined" in agent("linspace(0, 1, 3)").message


@pytest.mark.skipif(HAS_NUMPY, reason="numpy is installed")
def test_numpy_that_is_missing_is_said_when_it_is_asked_for():
    with pytest.raises(MissingExtra, match="numpy is not installed"):
        AstevalSection(config=AstevalConfig(numpy=True))


@pytest.mark.skipif(not HAS_NUMPY, reason="numpy is not installed")
def test_numpy_computes():
    agent = Agent(numpy=True)

    assert agent("float(linspace(0, 1, 5).sum())").value == Evaluation("2.5")
    result = agent("import numpy as np\nround(float(np.linalg.det(np.eye(3) * 2)), 6)")
    assert result.value == Evaluation("8.0"), result.message
    assert agent("(sum(x for x in [1, 2]), any([[]]), round(2.5))").value == Evaluation(
        "(3, False, 2)"
    )


@pytest.mark.heavy
@pytest.mark.skipif(not HAS_NUMPY, reason="numpy is not installed")
@pytest.mark.parametrize("name", NUMPY)
def test_numpy_opens_no_files(host: Host, name: str):
    names = "".join(f"{name} = {value!r}\n" for name, value in host.names().items())

    result = Agent(numpy=True)(names + NUMPY[name])

    assert not result.success
    assert host.damage(result.render()) == []


# How it is used


def test_a_missing_asteval_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asteval, "find_spec", lambda name: None)

    with pytest.raises(MissingExtra, match=r"pip install .*\[asteval\]"):
        AstevalSection()


@pytest.mark.parametrize(
    "options",
    [{"timeout": 0}, {"memory_bytes": -1}, {"output_limit": 0}, {"isolation": "chroot"}],
)
def test_a_configuration_that_makes_no_sense_is_refused(options: dict[str, object]):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        AstevalConfig(**options)


def test_the_section_tells_the_model_what_it_has():
    section = AstevalSection(config=AstevalConfig(timeout=3))
    prompt = wink.Prompt(wink.PromptTemplate(sections=[section]))

    rendered = prompt.render()

    assert [tool.name for tool in rendered.tools] == ["evaluate_python"]
    assert "`read_file(path)`" in rendered.text
    assert "It may take 3 seconds." in rendered.text
    assert "datetime" in rendered.text


def test_an_agent_goes_on_after_a_script_that_failed():
    fs = MemoryFilesystem(FILES)
    session = wink.Session()
    section = AstevalSection(resources={Filesystem: fs})
    wink.Prompt(wink.PromptTemplate(sections=[section])).render(session)
    scripts = [
        "write_file('sum.txt', str(sum(1, 2)))",
        "write_file('sum.txt', str(sum([1, 2])))",
    ]

    results = [
        wink.execute_tool(wink.ToolCall("evaluate_python", {"code": code}), session=session)
        for code in scripts
    ]

    assert [result.success for result in results] == [False, True]
    assert fs.read("sum.txt") == "3"
    assert [each.success for each in session[ToolInvoked].all()] == [False, True]
