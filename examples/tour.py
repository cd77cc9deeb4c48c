"""A tour: a call that commits, one that is denied, one that rolls back. Run it with `make demo`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import weakincentives as wink
from weakincentives.prompt import ReadBeforeWritePolicy, SequentialDependencyPolicy
from weakincentives.runtime import Slice, ToolInvoked

# State: a slice of the session, changed by events.


@dataclass(frozen=True)
class Plan:
    steps: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepDone:
    step: str


def add_step(plans: Slice[Plan], event: StepDone) -> Slice[Plan]:
    plan = plans.latest() or Plan()
    return plans.replace(replace(plan, steps=(*plan.steps, event.step)))


# Tools: typed functions. What they change is undone when they fail.


@wink.tool(reach="read")
def read_file(path: str, *, context: wink.ToolContext) -> str:
    """Read a file."""
    return context.filesystem.read(path)


@wink.tool(reach="reversible")
def write_file(path: str, content: str, *, context: wink.ToolContext) -> str:
    """Write a file."""
    context.filesystem.write(path, content)
    context.session.dispatch(StepDone(f"wrote {path}"))
    return f"Wrote {len(content)} characters to {path}"


def check_syntax(files: wink.Filesystem) -> None:
    for path in files.glob("**/*.py"):
        try:
            compile(files.read(path), path, "exec")
        except SyntaxError as error:
            raise ValueError(f"{path} would not be valid Python: {error}") from error


@wink.tool(reach="reversible")
def rename(old: str, new: str, *, context: wink.ToolContext) -> str:
    """Rename a symbol in every Python file."""
    files = context.filesystem
    for path in files.glob("**/*.py"):
        files.write(path, files.read(path).replace(old, new))
        context.session.dispatch(StepDone(f"renamed in {path}"))
    check_syntax(files)  # raises: every file is as it was, and so is the plan
    return f"Renamed {old} to {new}"


@wink.tool(reach="reversible")
def run_tests(*, context: wink.ToolContext) -> str:
    """Run the project's tests."""
    namespace: dict[str, object] = {}
    exec(context.filesystem.read("shapes.py"), namespace)
    exec(context.filesystem.read("test_shapes.py"), namespace)
    return "1 passed"


@wink.tool(reach="irreversible")
def deploy() -> str:
    """Put the project into production."""
    return "Deployed"


PROJECT = {
    "shapes.py": "def area(w, h):\n    return w * h\n",
    "test_shapes.py": "assert area(2, 3) == 6\n",
}


def main() -> None:
    files = wink.MemoryFilesystem(PROJECT)
    session = wink.Session()
    session[Plan].register(StepDone, add_step)
    prompt = wink.Prompt(
        wink.PromptTemplate(
            sections=[
                wink.MarkdownSection(
                    title="Files",
                    template="Read a file before you change it.",
                    tools=[read_file, write_file, rename],
                    policies=[ReadBeforeWritePolicy()],
                ),
                wink.MarkdownSection(
                    title="Release",
                    template="Deploy only what is tested.",
                    tools=[run_tests, deploy],
                    policies=[SequentialDependencyPolicy(dependencies={"deploy": {"run_tests"}})],
                ),
            ]
        )
    ).bind(resources={wink.Filesystem: files})
    prompt.render(session)

    def call(why: str, name: str, **params: object) -> None:
        before = dict(project())
        result = wink.execute_tool(wink.ToolCall(name, params), session=session)
        arguments = ", ".join(f"{k}={v!r}" for k, v in params.items())
        ran = session[ToolInvoked].latest().ran
        outcome = "committed" if result.success else "rolled back" if ran else "refused"
        print(f"\n# {why}\n> {name}({arguments})")
        for line in result.render().splitlines():
            print(f"    {line}")
        changed = [path for path, text in project() if before.get(path) != text]
        print(f"  {outcome}; files changed: {', '.join(changed) or 'none'}")

    def project() -> list[tuple[str, str]]:
        return [(path, files.read(path)) for path in files.glob("**/*")]

    print("WINK runs an agent's tools as transactions. Here is what that means.")
    call("The model guesses: a wrong type, an unknown field", "write_file", path=7, text="x")
    call("It writes before it reads: a policy says no", "write_file", path="shapes.py", content="")
    call("It reads first", "read_file", path="shapes.py")
    call(
        "It renames to a keyword: both files were written, then...",
        "rename",
        old="area",
        new="class",
    )
    call("It renames to something that works", "rename", old="area", new="surface")
    call("It deploys untested code", "deploy")
    call("It runs the tests", "run_tests")
    call("And may deploy now", "deploy")

    print("\nWhat the session remembers of the work that was kept:")
    for step in session[Plan].latest().steps:
        print(f"  - {step}")
    print("\nAnd of every call, kept or not:")
    for number, record in enumerate(session[ToolInvoked].all(), 1):
        mark = "ok" if record.success else "--"
        print(f"  {number}. {mark} {record.tool_name:<11} {record.duration * 1e6:6.0f} µs")
    print("\nNext: README.md builds this up in eight steps.")


if __name__ == "__main__":
    main()
