"""A LangChain agent whose tool fails halfway, with and without WINK: what is left on disk.

    pip install 'wink-runtime[langchain]'
    python examples/integration_langchain.py

Needs no key and no network: the model says what a script tells it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from langchain.agents import create_agent  # pyright: ignore[reportUnknownVariableType]
from langchain.agents.middleware import AgentMiddleware, ShellToolMiddleware
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from weakincentives.integrations.langchain import WinkMiddleware
from weakincentives.prompt import ApprovalPolicy

SETTINGS = "port = 8080\nworkers = 4\n"


class Scripted(BaseChatModel):
    """Makes the next call of a script, or says "Done."."""

    calls: list[tuple[str, dict[str, Any]]]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Any, **_: Any) -> Any:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        spoken = sum(isinstance(each, AIMessage) for each in messages)
        said = AIMessage("Done.")
        if spoken < len(self.calls):
            name, arguments = self.calls[spoken]
            said = AIMessage("", tool_calls=[{"id": f"c{spoken}", "name": name, "args": arguments}])
        return ChatResult(generations=[ChatGeneration(message=said)])


def run(place: Path, *ours: AgentMiddleware[Any, Any, Any]) -> Any:
    """Run an agent whose tool and whose shell command fail halfway, and return its state."""
    (place / "settings.toml").write_text(SETTINGS)

    @tool
    def set_workers(count: int) -> str:
        """Set the number of workers."""
        (place / "settings.toml").write_text(f"port = 8080\nworkers = {count}\n")
        (place / "restart.log").write_text("restarting\n")
        raise ConnectionError("the service does not answer")

    shell = ShellToolMiddleware(workspace_root=place)
    model = Scripted(
        calls=[
            ("shell", {"command": "rm settings.toml && cp missing.toml settings.toml"}),
            ("set_workers", {"count": 400}),
        ]
    )
    agent: Any = create_agent(model, [set_workers], middleware=[shell, *ours])
    try:
        agent.invoke({"messages": [("user", "Use another settings file, then 400 workers.")]})
    except ConnectionError as error:  # LangChain ends the run with a tool's exception
        print(f"  the run ended: {error}")


def approve(place: Path) -> None:
    """Pause an agent until a person has seen what it wants to change."""
    policy = ApprovalPolicy(tools={"write_file"})
    model = Scripted(
        calls=[
            ("read_file", {"path": "settings.toml"}),
            ("write_file", {"path": "settings.toml", "content": "port = 80\nworkers = 4\n"}),
        ]
    )
    with WinkMiddleware(place, policies=[policy]) as wink:
        agent: Any = create_agent(model, middleware=[wink], checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "settings"}}
        state = agent.invoke({"messages": [("user", "Use port 80.")]}, config)
        print(state["__interrupt__"][0].value["description"])
        no: dict[str, str] = {"type": "reject", "message": "80 needs root", "by": "ann"}
        state = agent.invoke(Command(resume=no), config)
        print(next(str(e.text) for e in state["messages"][::-1] if isinstance(e, ToolMessage)))


def show(place: Path) -> None:
    for path in sorted(place.iterdir()):
        print(f"  {path.name}: {path.read_text()!r}")


def main() -> None:
    with tempfile.TemporaryDirectory() as parent:
        for name in ("without us", "with us"):
            place = Path(parent, name)
            place.mkdir()
            print(f"{name}:")
            if name == "with us":
                with WinkMiddleware(place, tools=[]) as wink:
                    run(place, wink)
            else:
                run(place)
            show(place)
        print()
        approve(place)


if __name__ == "__main__":
    main()
