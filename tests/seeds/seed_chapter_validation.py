"""The Chapter's part on validation and error handling, tests of handlers included."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
from seed_names import (
    FILE_TOOLS,
    FileContents,
    Plan,
    ReadFileParams,
    SearchParams,
    SearchResult,
    WriteFileResult,
    noop_tool,
    tool_of,
)
from seed_scenarios import Model, Run, run_tests, scenario

from weakincentives.adapters import ModelRequest, ModelTurn, ScriptedAdapter, calls
from weakincentives.filesystem import Filesystem, MemoryFilesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    RateLimitPolicy,
    ToolContext,
    ToolResult,
)
from weakincentives.runtime import Session, ToolInvoked
from weakincentives.testing import make_context, make_context_with_files, make_vfs

# Input validation


@scenario("Chapter", "Stage 1: Automatic Schema Validation")
def schema_validation(run: Run) -> None:
    """Wrong types never reach the handler; the model learns of every one of them."""
    seen = run()
    received: list[Any] = []

    def search(params: Any, *, context: ToolContext) -> ToolResult[None]:
        received.append(params)
        return ToolResult.ok()

    tool = tool_of(search, "search_files", seen.SearchParams, None)

    def details(**arguments: object) -> dict[str, str]:
        result = tool(arguments, context=make_context())
        assert not result.success
        return json.loads(result.message)["details"]

    refused = tool({"query": "x", "limit": "10"}, context=make_context())
    assert json.loads(refused.message) == {
        "error": "Invalid parameters for tool 'search_files'",
        "details": {"limit": "Expected type integer, got string '10'"},
    }
    assert details(query=None).keys() == details(query=7).keys() == {"query"}
    assert details(query="x", limit=3.7).keys() == {"limit"}
    assert details(query="x", case_sensitive="true").keys() == {"case_sensitive"}
    assert details(query="x", file_types="py").keys() == {"file_types"}
    assert details(limit="10", case_sensitive="true", extra=1).keys() == {
        "query",
        "limit",
        "case_sensitive",
        "extra",
    }
    assert received == []
    assert tool({"query": "x", "file_types": ["py", "md"]}, context=make_context()).success
    assert received == [seen.SearchParams("x", file_types=("py", "md"))]

    described = {name: part["description"] for name, part in tool.parameters["properties"].items()}
    assert described == {
        "query": "Search query (required).",
        "limit": "Maximum results to return (1-100).",
        "case_sensitive": "Whether search is case-sensitive.",
        "file_types": "File extensions to filter (e.g., ('py', 'md')).",
    }


@scenario("Chapter", "Stage 2: Value Validation with DbC")
def value_validation(run: Run) -> None:
    """Values that fit the type but not the contract are refused in the contract's words."""
    tool = tool_of(run().search_handler, "search_files")
    context = make_context_with_files(["test.py", "other.py"])

    refused = tool({"query": "", "limit": 10}, context=context)
    assert not refused.success
    assert refused.message == "Precondition failed: query cannot be empty"
    assert tool({"query": "test", "limit": 500}, context=context).message == (
        "Precondition failed: limit must be between 1 and 100"
    )
    found = tool({"query": "test", "limit": 10}, context=context)
    assert found.message == "Found 1 matches"
    assert found.value.matches == ("test.py",)


@scenario("Chapter", "Stage 2: Value Validation with DbC", 2)
def failing_preconditions(run: Run) -> None:
    """Each call that the comments name has the result that they name."""
    run()
    tool = tool_of(run.block_before().search_handler, "search_files")
    context = make_context()
    promised = re.findall(r"# Model calls: (.*)\n# Result: (.*)", run.text)
    assert len(promised) == 2
    for call, result in promised:
        expected = eval(result, {"ToolResult": ToolResult})
        got = eval(call, {"search_files": lambda **arguments: tool(arguments, context=context)})
        assert (got.message, got.success, got.value) == (expected.message, False, None)


@scenario("Chapter", "Stage 3: Custom Business Rule Validation")
def business_rules(run: Run) -> None:
    """The handler's own refusals reach the model word for word; a write that passes happens."""
    tool = tool_of(run().write_file_handler, "write_file")
    fs = make_vfs({"old.txt": "old"})
    context = make_context(fs=fs)

    def write(path: str, content: str = "new", **arguments: object) -> ToolResult[Any]:
        return tool({"path": path, "content": content, **arguments}, context=context)

    assert write("/etc/passwd").message == (
        "Cannot write outside workspace: /etc/passwd\nAll paths must start with /workspace/"
    )
    assert write("/workspace/a.txt", "x" * (10 * 1024 * 1024 + 1)).message == (
        "File too large: 10485761 bytes\nMaximum size is 10MB (10,485,760 bytes)"
    )
    assert write("/workspace/old.txt").message == (
        "File already exists: /workspace/old.txt\nSet overwrite=true to replace existing file"
    )
    assert fs.read("old.txt") == "old"

    written = write("/workspace/old.txt", overwrite=True)
    assert written.success
    assert written.message == "Wrote 3 bytes to /workspace/old.txt"
    assert written.value == WriteFileResult("/workspace/old.txt", 3)
    assert fs.read("old.txt") == "new"


@scenario("Chapter", "Validation Error Message Design")
def vague_messages(run: Run) -> None:
    assert failures(run().returned) == [
        "Invalid path",
        "ValueError: path validation failed",
        "Error code 42",
    ]


@scenario("Chapter", "Validation Error Message Design", 2)
def helpful_messages(run: Run) -> None:
    assert failures(run(existing_size=42).returned) == [
        "Cannot write to /workspace/config.json - path must start with /workspace/\n"
        "Example valid paths: /workspace/output.txt, /workspace/data/results.json",
        "File /workspace/config.json already exists (42 bytes)\n"
        "To overwrite, call write_file again with overwrite=true",
        "Query 'notes' returned no results\nTry a broader search term or check spelling",
    ]


@scenario("Chapter", "Enum Validation")
def enum_validation(run: Run) -> None:
    """A value that is not among the choices is refused, and the choices are listed."""
    seen = run()
    strategies: list[str] = []

    def deploy(params: Any, *, context: ToolContext) -> ToolResult[None]:
        strategies.append(params.strategy)
        return ToolResult.ok()

    tool = tool_of(deploy, "deploy", seen.DeployParams, None)
    refused = tool({"environment": "prod"}, context=make_context())
    assert not refused.success
    details = json.loads(refused.message)["details"]
    assert details["environment"].startswith(
        "environment must be one of: development, staging, production"
    )
    assert tool({"environment": "staging"}, context=make_context()).success
    assert strategies == ["rolling"]
    assert tool.parameters["properties"]["strategy"]["enum"] == ["rolling", "blue-green", "canary"]


@scenario("Chapter", "Validation with External Systems")
def checks_against_files(run: Run) -> None:
    """A missing file and a read-only one are refused; any other is deleted."""

    @dataclass(frozen=True)
    class DeleteFileParams:
        path: str

    seen = run(DeleteFileParams=DeleteFileParams, DeleteFileResult=DeleteFileParams)
    tool = tool_of(seen.delete_file_handler, "delete_file", DeleteFileParams, DeleteFileParams)
    fs = MemoryFilesystem({"a.txt": "a", "fixed.txt": "f"}, readonly=["fixed.txt"])
    context = make_context(fs=fs)

    assert tool({"path": "b.txt"}, context=context).message == (
        "Cannot delete b.txt - file does not exist\nUse list_directory to see available files"
    )
    assert tool({"path": "fixed.txt"}, context=context).message == (
        "Cannot delete fixed.txt - file is read-only\n"
        "This file is managed externally and cannot be modified"
    )
    assert tool({"path": "a.txt"}, context=context).message == "Deleted a.txt"
    assert not fs.exists("a.txt")
    assert fs.exists("fixed.txt")


# Output validation


@scenario("Chapter", "Success with No Results")
def success_without_results(run: Run) -> None:
    """Nothing found is a success that says so."""
    tool = tool_of(run().search_handler, "search_files")
    context = make_context_with_files(["notes.md", "more-notes.md"])

    none = tool({"query": "xyz"}, context=context)
    assert none.success
    assert none.message == "No files match 'xyz'"
    assert none.value == SearchResult((), 0)
    some = tool({"query": "notes"}, context=context)
    assert some.success
    assert some.message == "Found 2 files matching 'notes'"


@scenario("Chapter", "Validating Output Values")
def validated_output(run: Run) -> None:
    """A result that contradicts itself is a failed call, in the words of its own check."""
    seen = run()

    def search(params: SearchParams, *, context: ToolContext) -> Any:
        return ToolResult.ok(seen.SearchResult(("a", "b"), total_count=params.limit))

    tool = tool_of(search, "search", SearchParams, seen.SearchResult)
    context = make_context()
    assert tool({"query": "x", "limit": 2}, context=context).render() == (
        "Found 2 total matches:\n1. a\n2. b"
    )
    broken = tool({"query": "x", "limit": 1}, context=context)
    assert not broken.success
    assert broken.message == "Invalid result: 2 matches but total_count=1"
    with pytest.raises(ValueError, match="Invalid result: 0 matches but total_count=-1"):
        seen.SearchResult((), -1)


@scenario("Chapter", "Output Transformation and Normalization")
def normalized_output(run: Run) -> None:
    """Line ends come out as one kind, however the file has them."""
    seen = run()
    context = make_context_with_files({"data/a.txt": "one\r\ntwo\rthree\n"})
    result = tool_of(seen.read_file_handler, "read_file")({"path": "data/a.txt"}, context=context)

    assert result.value == FileContents("one\ntwo\nthree\n", path="data/a.txt", size=15)
    assert result.message == "Read 15 bytes from data/a.txt"


@scenario("Chapter", "Structured Output Constraints")
def output_contract(run: Run) -> None:
    """A result that keeps the contract passes; one that breaks it becomes an error."""

    @dataclass(frozen=True)
    class MyResult:
        anything: object

    seen = run(MyParams=SearchParams, MyResult=MyResult)
    tool = tool_of(seen.validated_handler)
    assert tool({"query": "x"}, context=make_context()).message == "Done"

    @seen.ensure(
        lambda result: result.success or result.value is None, "Failed results must have value=None"
    )
    @seen.ensure(lambda result: len(result.message) > 0, "Result must include a message")
    def breaking(params: SearchParams, *, context: ToolContext) -> ToolResult[MyResult]:
        context.filesystem.write("trace.txt", "was here")
        return ToolResult(message=params.query, value=MyResult(1), success=params.limit > 0)

    tool = tool_of(breaking, "breaking", SearchParams, MyResult)
    context = make_context()
    silent = tool({"query": ""}, context=context)
    assert silent.message == "Postcondition failed: Result must include a message"
    failed = tool({"query": "no", "limit": 0}, context=context)
    assert failed.message == "Postcondition failed: Failed results must have value=None"
    assert (failed.success, failed.value) == (False, None)
    assert not context.filesystem.exists("trace.txt")


# Error handling


@scenario("Chapter", "ToolResult.error() for Expected Failures")
def expected_failures(run: Run) -> None:
    """Each failure that git is known for has its own advice."""

    class GitError(Exception):
        def __init__(self, message: str = "") -> None:
            self.message = message

    class GitAuthError(GitError): ...

    class GitConflictError(GitError): ...

    class GitNetworkError(GitError): ...

    class GitClient:
        problem: Exception | None = None

        def push(self, remote: str, branch: str) -> SimpleNamespace:
            if self.problem is not None:
                raise self.problem
            return SimpleNamespace(sha="abc123")

    @dataclass(frozen=True)
    class GitPushParams:
        remote: str
        branch: str

    @dataclass(frozen=True)
    class GitPushResult:
        sha: str
        remote: str

    errors = (GitAuthError, GitConflictError, GitNetworkError)
    names: Any = {each.__name__: each for each in errors}
    seen = run(
        GitClient=GitClient, GitPushParams=GitPushParams, GitPushResult=GitPushResult, **names
    )
    tool = tool_of(seen.git_push_handler, "git_push")
    git = GitClient()
    context = make_context(resources={GitClient: git})

    def push(problem: Exception | None) -> ToolResult[Any]:
        git.problem = problem
        return tool({"remote": "origin", "branch": "main"}, context=context)

    assert push(None).message == "Pushed abc123 to origin/main"
    with TestCase().assertNoLogs("weakincentives", "WARNING"):
        refused = failures([push(error("down")) for error in errors])
    assert refused == [
        "Authentication failed for origin\nConfigure credentials with: git_configure_auth tool",
        "Push rejected - remote has new commits\n"
        "Pull latest changes with: git_pull tool, then retry push",
        "Network error: down\nCheck connectivity and retry",
    ]


@scenario("Chapter", "Exceptions for Unexpected Failures")
def unexpected_failures(run: Run) -> None:
    """What cannot be foreseen is an internal error, and nothing of it stays."""

    @dataclass(frozen=True)
    class ProcessDataParams:
        input_path: str
        output_path: str = "out.txt"

    @dataclass(frozen=True)
    class ProcessDataResult:
        input_path: str
        output_path: str
        bytes_processed: int

    class Huge(str):
        def __len__(self) -> int:
            return 2 * 1024**3

    class HugeFiles:
        def exists(self, path: str) -> bool:
            return True

        def read(self, path: str) -> str:
            return Huge()

    names: Any = {"ProcessDataParams": ProcessDataParams, "ProcessDataResult": ProcessDataResult}
    tool = tool_of(run(process=str.upper, **names).process_data_handler, "process_data")
    fs = make_vfs({"in.txt": "abc", "empty.txt": ""})
    context = make_context(fs=fs)

    assert tool({"input_path": "none.txt"}, context=context).message == (
        "Input file not found: none.txt\nUse list_directory to see available files"
    )
    assert tool({"input_path": "empty.txt"}, context=context).message == (
        "Internal error: read() returned empty data for existing file"
    )
    huge = make_context(resources={Filesystem: HugeFiles()})
    assert tool({"input_path": "huge.txt"}, context=huge).message == (
        "Internal error: File too large: 2147483648 bytes"
    )
    assert not fs.exists("out.txt")
    assert tool({"input_path": "in.txt"}, context=context).message == "Processed 3 bytes to out.txt"
    assert fs.read("out.txt") == "ABC"


@scenario("Chapter", "Exceptions for Unexpected Failures", 2)
def what_exceptions_become(run: Run) -> None:
    """The pipeline answers an exception with just this result."""
    (expected,) = run(exception_message="disk full").shown

    def fail(params: None, *, context: ToolContext) -> ToolResult[None]:
        context.filesystem.write("trace.txt", "was here")
        raise OSError("disk full")

    context = make_context()
    with TestCase().assertLogs("weakincentives", "ERROR") as logged:
        result = tool_of(fail, "fail", None, None)(context=context)
    assert "OSError: disk full" in logged.output[0]
    assert (result.message, result.value, result.success) == (
        expected.message,
        expected.value,
        expected.success,
    )
    assert result.message == "Internal error: disk full"
    assert not context.filesystem.exists("trace.txt")

    # To the letter, whatever the exception makes of its message, in every way to run a handler.
    for error in (KeyError("x"), KeyError("a", 1), StopIteration("x"), OSError(2, "none", "f")):
        (expected,) = run(exception_message=str(error)).shown

        def broken(params: None, *, context: ToolContext, e: Any = error) -> ToolResult[None]:
            raise e

        for options in ({}, {"timeout": 60.0}):
            tool = tool_of(broken, "broken", None, None).replace(**options)
            assert tool(context=make_context()).message == expected.message


@scenario("Chapter", "Error Message Design for Model Recovery")
def next_steps_in_messages(run: Run) -> None:
    vague, actionable = failures(run().returned)
    assert vague == "Permission denied"
    assert actionable == (
        "Permission denied: cannot write to /workspace/config.json\n"
        "This file is read-only. To modify it:\n"
        "1. Copy to a new location with copy_file\n"
        "2. Make changes to the copy\n"
        "3. Use the copy as your working file"
    )


@scenario("Chapter", "Error Message Design for Model Recovery", 2)
def other_tools_in_messages(run: Run) -> None:
    dead_end, alternative = failures(run().returned)
    assert dead_end == "Cannot search by content"
    assert alternative.endswith("  grep_files(pattern='notes', path='/workspace')")


@scenario("Chapter", "Error Message Design for Model Recovery", 3)
def examples_in_messages(run: Run) -> None:
    unclear, shown = failures(run().returned)
    assert unclear == "Invalid date format"
    assert shown.splitlines()[0] == "Invalid date: '01/15/2025'"
    assert shown.splitlines()[-1] == "  - 2025-12-31"


@scenario("Chapter", "Transaction Rollback on Errors")
def rollback_of_several_steps(run: Run) -> None:
    """A failure at the last step takes back the first two; a success keeps them."""

    @dataclass(frozen=True)
    class UpdateProgress:
        step: int
        total: int

    @dataclass(frozen=True)
    class MultiStepResult:
        steps_completed: int

    for is_valid in (False, True):
        seen = run(
            MultiStepParams=ReadFileParams,
            MultiStepResult=MultiStepResult,
            UpdateProgress=UpdateProgress,
            validate_intermediate=lambda is_valid=is_valid: is_valid,
        )
        context = make_context()
        result = tool_of(seen.multi_step_handler)({"path": "."}, context=context)
        session, fs = context.session, context.filesystem

        assert result.success is is_valid
        assert fs.exists("/workspace/temp.txt") is is_valid
        assert len(session[UpdateProgress]) == is_valid
        assert [each.success for each in session[ToolInvoked].all()] == [is_valid]
        assert result.message == (
            "All steps completed successfully"
            if is_valid
            else "Validation failed at step 3\nIntermediate changes rolled back"
        )


@scenario("Chapter", "Retry vs No-Retry Situations")
def retryable_errors(run: Run) -> None:
    wrong, prerequisite, missing = failures(run().returned)
    assert wrong == "limit must be between 1 and 100 (got 500)"
    assert prerequisite.endswith("Call run_tests first, then retry deploy")
    assert missing.startswith("File not found: /workspace/config.json\n")


@scenario("Chapter", "Retry vs No-Retry Situations", 2)
def terminal_errors(run: Run) -> None:
    memory, credentials, blocked = failures(run(size=700).returned)
    assert memory.startswith("Out of memory: cannot process 700 MB file\n")
    assert memory.endswith("requires human intervention")
    assert credentials.startswith("No credentials configured for mail\n")
    assert blocked.startswith("Cannot delete production database\n")


# What the model reads


@scenario("Chapter", "Error-Correction Patterns in Prompts")
def recovery_guidance(run: Run) -> None:
    """The guidance arrives whole, the fence in it included, with the tools it is about."""
    fs = make_vfs({"output.txt": "ten bytes!"})
    model = Model.given(run().section, resources={Filesystem: fs})
    assert [tool.name for tool in model.rendered.tools] == [
        "read_file",
        "write_file",
        "list_directory",
    ]
    fenced = model.rendered.text.split("````")
    assert len(fenced) == 3
    assert fenced[0].rstrip().endswith("## Example Recovery Flow")
    assert 'write_file(path="output.txt", content="data", overwrite=true)' in fenced[1]
    assert fenced[2] == ""
    assert '- **"File not found"** → Use list_directory' in fenced[0]

    # The example's calls, as a model makes them, go as its comments say.
    played = [
        eval(line, {name: partial(model.call, name) for name in FILE_TOOLS} | {"true": True})
        for line in fenced[1].splitlines()
        if line.startswith(("read_file(", "write_file("))
    ]
    exists, read, written = played
    assert "overwrite=true" in failures([exists])[0]
    assert "ten bytes!" in read.render()
    assert written.success
    assert fs.read("output.txt") == "data"
    assert "output.txt" in model.call("list_directory").render()


@scenario("Chapter", "Conversation Flow After Errors")
def conversation_after_errors(run: Run) -> None:
    """The three turns of the comments: the failed one is in the history and changed nothing."""
    run()
    fs = make_vfs({"config.json": "{}"})
    tools = FILE_TOOLS["read_file"], FILE_TOOLS["write_file"]
    model = Model.offered(*tools, resources={Filesystem: fs})
    assert model.call("read_file", path="config.json").success
    second = model.call("write_file", path="config.json", content="[1]")
    assert not second.success
    assert "overwrite=true" in second.message.lower()
    assert fs.read("config.json") == "{}"
    assert model.call("write_file", path="config.json", content="[1]", overwrite=True).success
    assert fs.read("config.json") == "[1]"

    history = model.session[ToolInvoked].all()
    assert [(each.tool_name, each.success) for each in history] == [
        ("read_file", True),
        ("write_file", False),
        ("write_file", True),
    ]
    assert history[1].result.message == second.message


# Validation patterns


@scenario("Chapter", "Fail-Fast Validation")
def fail_fast(run: Run) -> None:
    """All problems come at once, and before anything is changed."""

    @dataclass(frozen=True)
    class ComplexParams:
        input_path: str
        output_path: str
        overwrite: bool = False
        max_size: int = 4096

    @dataclass(frozen=True)
    class ComplexResult:
        bytes_processed: int

    seen = run(
        ComplexParams=ComplexParams,
        ComplexResult=ComplexResult,
        process=lambda data, max_size: data[:max_size].upper(),
    )
    tool = tool_of(seen.complex_operation_handler)
    fs = make_vfs({"in.txt": "abc", "out.txt": "old"})
    context = make_context(fs=fs)

    wrong = {"input_path": "none.txt", "output_path": "out.txt", "max_size": 10}
    refused = tool(wrong, context=context)
    assert not refused.success
    assert refused.message == (
        "Validation failed:\n"
        "  - input_path must start with /workspace/ (got none.txt)\n"
        "  - output_path must start with /workspace/ (got out.txt)\n"
        "  - input_path does not exist: none.txt\n"
        "  - output_path exists: out.txt (set overwrite=true)\n"
        "  - max_size too small: 10 (minimum 1024 bytes)"
    )
    assert fs.read("out.txt") == "old"
    paths = {"input_path": "/workspace/in.txt", "output_path": "/workspace/new.txt"}
    assert tool(paths, context=context).message == "Processed 3 bytes"
    assert fs.read("new.txt") == "ABC"


@scenario("Chapter", "Multi-Stage Validation")
def multi_stage(run: Run) -> None:
    """Cheap checks first, then the history in the session, then the world outside."""

    class NetworkError(Exception):
        pass

    class Deployer:
        status: Any = NetworkError()

        def check_environment(self, environment: str) -> Any:
            if isinstance(self.status, Exception):
                raise self.status
            return self.status

        def deploy(self, environment: str, version: str) -> None:
            deployed.append((environment, version))

    @dataclass(frozen=True)
    class DeployParams:
        environment: str
        version: str = "1.0"

    deployed: list[tuple[str, str]] = []
    names: Any = {"Deployer": Deployer, "DeployParams": DeployParams, "DeployResult": DeployParams}
    seen = run(NetworkError=NetworkError, **names)
    deployer = Deployer()
    model = Model.offered(
        tool_of(seen.deploy_handler, "deploy"),
        noop_tool("run_tests"),
        resources={Deployer: deployer},
    )

    def deploy(environment: str = "staging") -> str:
        return model.call("deploy", environment=environment).message

    assert deploy("prod") == (
        "Invalid environment: prod\nMust be one of: development, staging, production"
    )
    assert deploy() == (
        "Cannot deploy without running tests\nCall run_tests first, then retry deploy"
    )
    assert model.call("run_tests").success
    assert deploy() == ("Cannot reach staging environment\nCheck network connectivity and retry")
    deployer.status = SimpleNamespace(healthy=False, reason="disk full")
    assert deploy() == (
        "staging environment is unhealthy: disk full\nWait for health checks to pass, then retry"
    )
    assert deployed == []
    deployer.status = SimpleNamespace(healthy=True)
    assert deploy() == "Deployed 1.0 to staging"
    assert deployed == [("staging", "1.0")]


@scenario("Chapter", "Validation with External Systems", 2)
def checks_against_an_api(run: Run) -> None:
    """Valid, invalid, timed out and broken each have an answer of their own."""

    class APIError(Exception):
        message = "500"

    class APITimeoutError(APIError):
        pass

    class APIClient:
        answer: Any = None

        def validate_token(self, token: str) -> Any:
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    @dataclass(frozen=True)
    class ValidateCredentialsParams:
        token: str

    @dataclass(frozen=True)
    class ValidateCredentialsResult:
        valid: bool
        expires_at: str

    types: Any = {
        each.__name__: each
        for each in (APIError, APITimeoutError, APIClient, ValidateCredentialsParams)
    }
    seen = run(ValidateCredentialsResult=ValidateCredentialsResult, **types)
    api = APIClient()
    context = make_context(resources={APIClient: api})
    tool = tool_of(seen.validate_credentials_handler)

    def validate(answer: Any) -> ToolResult[Any]:
        api.answer = answer
        return tool({"token": "t"}, context=context)

    valid = validate(SimpleNamespace(valid=True, expires_at="2026-01-01"))
    assert valid.success
    assert valid.message == "Token valid until 2026-01-01"
    invalid = SimpleNamespace(valid=False, reason="revoked")
    assert failures([validate(a) for a in (invalid, APITimeoutError(), APIError())]) == [
        "Token invalid: revoked\nGenerate a new token with: create_token tool",
        "Validation service timeout\nThis is likely temporary - retry in a few seconds",
        "Validation service error: 500\n"
        "Cannot validate credentials at this time\n"
        "Contact administrator if this persists",
    ]


@scenario("Chapter", "Idempotency Checks")
def idempotency(run: Run) -> None:
    """The second call succeeds as well, changes nothing, and says so."""

    @dataclass(frozen=True)
    class InitializeWorkspaceParams:
        config: str

    @dataclass(frozen=True)
    class InitializeWorkspaceResult:
        already_initialized: bool
        config: str

    seen = run(
        InitializeWorkspaceParams=InitializeWorkspaceParams,
        InitializeWorkspaceResult=InitializeWorkspaceResult,
    )
    tool = tool_of(seen.initialize_workspace_handler)
    fs = make_vfs()
    context = make_context(fs=fs)

    first = tool({"config": "one"}, context=context)
    assert first.message == "Workspace initialized successfully"
    assert [entry.path for entry in fs.list()] == [".initialized", "src", "tests"]
    again = tool({"config": "two"}, context=context)
    assert again.success
    assert again.message == "Workspace already initialized (no changes made)"
    assert again.value == InitializeWorkspaceResult(already_initialized=True, config="one")
    assert fs.read(".initialized") == "one"


@scenario("Chapter", "Rate Limiting and Quotas")
def rate_limiting(run: Run) -> None:
    """Ten calls a minute pass and the next is denied; the built-in policy says the same."""
    seen = run(api_call_tool=noop_tool("api_call"))
    built_in = Model.offered(noop_tool("api_call"), policies=[RateLimitPolicy(10)])
    for model in (Model.given(seen.section), built_in):
        for _ in range(10):
            assert model.call("api_call").success
        denied = model.call("api_call")
        assert not denied.success
        assert denied.message == (
            "Rate limit exceeded: 10 calls to api_call in last minute\n"
            "Maximum: 10 calls per minute\n"
            "Wait 60 seconds before retrying"
        )


# Tests of handlers


@scenario("Chapter", "Testing Happy Paths vs Error Paths")
def test_of_the_happy_path(run: Run) -> None:
    seen = run(make_context=lambda: make_context_with_files(["test.py"]))
    assert run_tests(seen) == 1


@scenario("Chapter", "Testing Happy Paths vs Error Paths", 2)
def tests_of_both_paths(run: Run) -> None:
    assert run_tests(run()) == 3


@scenario("Chapter", "Parameterized Tests for Validation Rules")
def parametrised_tests(run: Run) -> None:
    assert run_tests(run()) == 4 + 3


@scenario("Chapter", "Testing Error Message Quality")
def test_of_error_messages(run: Run) -> None:
    assert run_tests(run()) == 1


@scenario("Chapter", "Testing Transaction Rollback")
def tests_of_rollback(run: Run) -> None:
    """A tool that is called like its handler runs as a transaction, and leaves a record."""

    @dataclass(frozen=True)
    class ProcessParams:
        valid_field: bool = False
        invalid_field: bool = False

    def process(params: ProcessParams, *, context: ToolContext) -> ToolResult[None]:
        plan = context.session[Plan].latest()
        assert plan is not None
        context.session[Plan].seed(Plan(steps=(*plan.steps, "step2")))
        context.filesystem.write("temp.txt", "half done")
        if params.invalid_field:
            return ToolResult.error("invalid_field must not be set")
        context.filesystem.move("temp.txt", "output.txt")
        return ToolResult.ok(message="Processed")

    process_handler = tool_of(process, "process", ProcessParams, None)
    assert run_tests(run(ProcessParams=ProcessParams, process_handler=process_handler)) == 2


@scenario("Chapter", "Integration Tests with Model Behavior")
def test_of_a_model_that_recovers(run: Run) -> None:
    """Reads with ``step`` in place of ``evaluate``: one turn of the model at a time."""

    section = MarkdownSection(
        title="Files", template="Write files.", tools=[FILE_TOOLS["write_file"]]
    )
    template = PromptTemplate(
        sections=[section], resources={Filesystem: make_vfs({"a.txt": "old"})}
    )
    prompt = Prompt(template)
    params: dict[str, object] = {"path": "a.txt", "content": "new"}
    answers: list[str] = []

    def again(request: ModelRequest) -> ModelTurn:
        answers.append(request.messages[-1].text)
        return calls(("write_file", {**params, "overwrite": True}))

    model = ScriptedAdapter([calls(("write_file", params)), again])
    (test,) = run(make_prompt_with_write_file_tool=lambda: prompt).defined.values()
    test[0](adapter=SimpleNamespace(evaluate=model.step), session=Session())

    (answer,) = answers
    assert answer.startswith("File already exists: a.txt")
    assert "Set overwrite=true" in answer
    assert prompt.resources.get(Filesystem).read("a.txt") == "new"


@scenario("Chapter", "Fuzzing Validation Logic")
def fuzzing(run: Run) -> None:
    assert run_tests(run()) == 1


def failures(results: list[Any]) -> list[str]:
    """Return the messages of results that must all be plain failures."""
    for result in results:
        assert isinstance(result, ToolResult)
        assert (result.success, result.value) == (False, None)
    return [result.message for result in results]
