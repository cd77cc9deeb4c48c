"""What the model is offered: tools, their results, policies, sections and prompts."""

from weakincentives.prompt.decorator import tool
from weakincentives.prompt.policies import (
    PolicyDecision,
    PolicyState,
    QuotaPolicy,
    RateLimitPolicy,
    ReadBeforeWritePolicy,
    SequentialDependencyPolicy,
    ToolPolicy,
)
from weakincentives.prompt.prompt import Prompt, PromptResources, PromptTemplate, RenderedPrompt
from weakincentives.prompt.section import MarkdownSection, Section
from weakincentives.prompt.tool import (
    Reach,
    Tool,
    ToolContext,
    ToolExample,
    ToolHandler,
    Writes,
)
from weakincentives.prompt.tool_result import ToolError, ToolMetadata, ToolResult

__all__ = [
    "MarkdownSection",
    "PolicyDecision",
    "PolicyState",
    "Prompt",
    "PromptResources",
    "PromptTemplate",
    "QuotaPolicy",
    "RateLimitPolicy",
    "Reach",
    "ReadBeforeWritePolicy",
    "RenderedPrompt",
    "Section",
    "SequentialDependencyPolicy",
    "Tool",
    "ToolContext",
    "ToolError",
    "ToolExample",
    "ToolHandler",
    "ToolMetadata",
    "ToolPolicy",
    "ToolResult",
    "Writes",
    "tool",
]
