"""Clients for models: each translates one provider's format, and none executes a tool.

May know: `core`, `errors`, `filesystem`, `prompt`, `retry`, `runtime`, `serde`, `session`,
`tool_result`.
Must not go here: policies, transactions, or anything that holds for every model.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.adapters.anthropic import AnthropicAdapter as AnthropicAdapter
    from weakincentives.adapters.base import Adapter as Adapter
    from weakincentives.adapters.claude import ClaudeAgentSDKAdapter as ClaudeAgentSDKAdapter
    from weakincentives.adapters.litellm import LiteLLMAdapter as LiteLLMAdapter
    from weakincentives.adapters.local import LocalAdapter as LocalAdapter
    from weakincentives.adapters.local import LocalModel as LocalModel
    from weakincentives.adapters.openai import OpenAIAdapter as OpenAIAdapter
    from weakincentives.adapters.recording import Divergence as Divergence
    from weakincentives.adapters.recording import ReplayAdapter as ReplayAdapter
    from weakincentives.adapters.recording import record as record
    from weakincentives.adapters.recording import replay as replay
    from weakincentives.adapters.scripted import ScriptedAdapter as ScriptedAdapter
    from weakincentives.adapters.scripted import Turn as Turn
    from weakincentives.adapters.scripted import calls as calls
    from weakincentives.adapters.scripted import says as says
    from weakincentives.runtime.conversation import ContextCompacted as ContextCompacted
    from weakincentives.runtime.conversation import Message as Message
    from weakincentives.runtime.conversation import MessageReceived as MessageReceived
    from weakincentives.runtime.conversation import ModelRequest as ModelRequest
    from weakincentives.runtime.conversation import ModelTurn as ModelTurn
    from weakincentives.runtime.conversation import PartialOutput as PartialOutput
    from weakincentives.runtime.conversation import PromptResponse as PromptResponse
    from weakincentives.runtime.conversation import Retrying as Retrying
    from weakincentives.runtime.conversation import RunEnded as RunEnded
    from weakincentives.runtime.conversation import RunEvent as RunEvent
    from weakincentives.runtime.conversation import SentBack as SentBack
    from weakincentives.runtime.conversation import StopReason as StopReason
    from weakincentives.runtime.conversation import TextDelta as TextDelta
    from weakincentives.runtime.conversation import ToolCommitted as ToolCommitted
    from weakincentives.runtime.conversation import ToolEnded as ToolEnded
    from weakincentives.runtime.conversation import ToolProgress as ToolProgress
    from weakincentives.runtime.conversation import ToolRefused as ToolRefused
    from weakincentives.runtime.conversation import ToolRolledBack as ToolRolledBack
    from weakincentives.runtime.conversation import ToolStarted as ToolStarted
    from weakincentives.runtime.conversation import TurnEnded as TurnEnded
    from weakincentives.runtime.conversation import TurnStarted as TurnStarted
    from weakincentives.runtime.run import RunConfig as RunConfig
    from weakincentives.runtime.run import RunOptions as RunOptions
    from weakincentives.runtime.stream import RunStream as RunStream
