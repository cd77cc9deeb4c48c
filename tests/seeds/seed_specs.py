"""The Runtime spec and the Policy spec."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
from seed_chapter_running import DEPLOY_DENIED, denial, file_model
from seed_names import FILE_TOOLS, noop_tool, tool_of
from seed_scenarios import Model, Run, scenario

from weakincentives.errors import PromptRenderError, PromptValidationError
from weakincentives.filesystem import Filesystem
from weakincentives.prompt import (
    MarkdownSection,
    Prompt,
    PromptTemplate,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    Tool,
)
from weakincentives.runtime import ToolCall
from weakincentives.testing import make_context, make_context_with_files, make_vfs


@dataclass(frozen=True)
class Params:
    topic: str = ""


@dataclass(frozen=True)
class Result:
    text: str = ""


@scenario("Runtime spec", "Tool")
def handler_signature(run: Run) -> None:
    """A handler of this form is accepted for whatever types the tool declares."""
    tool = Tool[Params, Result](name="t", description="d", handler=run().handle)
    assert (tool.params_type, tool.result_type) == (Params, Result)


@scenario("Runtime spec", "Resource Access")
def resource_access(run: Run) -> None:
    """Files are found both ways; a handler that answers nothing is a failure with a reason."""
    seen = run(Params=Params, Result=Result)
    context = make_context_with_files({"a.txt": "a"})
    assert seen.my_handler(Params(), context=context) is None
    assert context.filesystem is context.resources.get(Filesystem)

    result = tool_of(seen.my_handler, "my_tool")({}, context=context)
    assert not result.success
    assert "my_tool" in result.message
    assert "ToolResult" in result.message


@scenario("Runtime spec", "Section Integration")
def section_with_params(run: Run) -> None:
    """Tools come in the order of their declaration; the section needs its parameters."""
    tools: Any = {"lookup_tool": noop_tool("lookup"), "search_tool": FILE_TOOLS["write_file"]}
    seen = run(Params=Params, **tools)
    prompt = Prompt(PromptTemplate(sections=[seen.section]))
    with pytest.raises(PromptRenderError, match="Params"):
        prompt.render()
    other = MarkdownSection(title="Other", tools=[noop_tool("lookup")])
    with pytest.raises(PromptValidationError, match="lookup"):
        PromptTemplate(sections=[seen.section, other])

    fs = make_vfs({"a.txt": "a"})
    model = Model(prompt.bind(Params(), resources={Filesystem: fs}))
    assert "Use tools when needed." in model.rendered.text
    assert [tool.name for tool in model.rendered.tools] == ["lookup", "write_file"]
    assert "without reading" in denial(model.call("write_file", path="a.txt", content=""))


@scenario("Policy spec", "SequentialDependencyPolicy")
def sequential_dependency(run: Run) -> None:
    """Tools must come in the declared order."""
    tools = [noop_tool(name) for name in ("lint", "test", "build", "deploy")]
    model = Model.offered(*tools, policies=[run().policy])
    assert denial(model.call("deploy")) == DEPLOY_DENIED
    assert "missing required tools: lint\n" in denial(model.call("build"))
    for name in ("lint", "test", "build", "deploy"):
        assert model.call(name).success
    # "Isolation: Each session has independent state"
    assert denial(Model(model.prompt).call("deploy")) == DEPLOY_DENIED
    # "State captured with session snapshots", "session.reset() clears policy state"
    shipped = model.session.snapshot()
    model.session.reset()
    assert denial(model.call("deploy")) == DEPLOY_DENIED
    model.session.restore(shipped)
    assert model.call("deploy").success


@scenario("Policy spec", "ReadBeforeWritePolicy")
def read_before_write(run: Run) -> None:
    """The four calls of the comments, in their order, end as they say."""
    model = file_model(run().policy, make_vfs({"config.yaml": "a: 1"}))
    promised = re.findall(r'# (\w+)\("(.+)"\) +→ (OK|DENIED)', run.text)
    assert len(promised) == 4
    for name, path, outcome in promised:
        content = {"content": "a: 2"} if name == "write_file" else {}
        assert model.call(name, path=path, **content).success is (outcome == "OK")


@scenario("Policy spec", "Prompt Integration")
def policies_of_a_prompt(run: Run) -> None:
    """A section's policies govern its tools, the prompt's govern all; sections need no names."""
    names: Any = {name: noop_tool(name) for name in ("lint", "test", "build", "deploy")}
    seen = run(
        elisions={
            "dependencies={...}": 'dependencies={"deploy": {"test", "build"}}',
            "policies=[...]": "policies=[QuotaPolicy(max_calls=4)]",
        },
        **names,
    )
    fs = make_vfs({"a.txt": "a"})
    model = Model(Prompt(seen.template).bind(resources={Filesystem: fs}))

    assert "without reading" in denial(model.call("write_file", path="a.txt", content=""))
    assert denial(model.call("deploy")) == DEPLOY_DENIED
    for name in ("lint", "test", "build", "deploy"):
        assert model.call(name).success
    assert denial(model.call("lint")) == "Quota exceeded: 4/4 calls used"


@scenario("Policy spec", "Execution Flow")
def execution_flow(run: Run) -> None:
    """The sketch of dispatch, run against our policies and tools, answers as our pipeline does."""
    section = MarkdownSection(
        title="Ship",
        tools=[noop_tool(name) for name in ("test", "build", "deploy")],
        policies=[SequentialDependencyPolicy(dependencies={"deploy": {"test", "build"}})],
    )
    template = PromptTemplate(sections=[section], policies=[ReadBeforeWritePolicy()])
    ours = Model(Prompt(template))
    prompt = Prompt(template)
    tools = {tool.name: tool for tool in prompt.render().tools}

    def resolve_and_parse(call: ToolCall) -> tuple[Tool[Any, Any], object]:
        return tools[call.name], tools[call.name].parse(call.params)

    seen = run(resolve_and_parse=resolve_and_parse, section=section, prompt=prompt)
    context = make_context()
    for name in ("deploy", "test", "deploy", "build", "deploy"):
        sketched = seen.execute_tool(ToolCall(name), context=context)
        real = ours.call(name)
        assert (sketched.success, sketched.message) == (real.success, real.message)
