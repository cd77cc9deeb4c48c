"""Clients of models. Each translates one provider's format; none executes a tool."""

from typing import TYPE_CHECKING

from weakincentives.lazy import lazy_names

if TYPE_CHECKING:
    from weakincentives.adapters.base import Adapter
    from weakincentives.adapters.claude import ClaudeAgentSDKAdapter
    from weakincentives.adapters.litellm import LiteLLMAdapter
    from weakincentives.adapters.local import LocalAdapter, LocalModel
    from weakincentives.adapters.openai import OpenAIAdapter
    from weakincentives.adapters.recording import Divergence, ReplayAdapter, record, replay
    from weakincentives.adapters.scripted import ScriptedAdapter, calls, says
    from weakincentives.runtime.conversation import (
        Message,
        ModelRequest,
        ModelTurn,
        PromptResponse,
        Retrying,
        RunEvent,
        SentBack,
        StopReason,
        TextDelta,
        ToolEnded,
        ToolStarted,
        TurnEnded,
        TurnStarted,
    )
    from weakincentives.runtime.evaluation import RunConfig, RunOptions

__all__ = [
    "Adapter",
    "ClaudeAgentSDKAdapter",
    "Divergence",
    "LiteLLMAdapter",
    "LocalAdapter",
    "LocalModel",
    "Message",
    "ModelRequest",
    "ModelTurn",
    "OpenAIAdapter",
    "PromptResponse",
    "ReplayAdapter",
    "Retrying",
    "RunConfig",
    "RunEvent",
    "RunOptions",
    "ScriptedAdapter",
    "SentBack",
    "StopReason",
    "TextDelta",
    "ToolEnded",
    "ToolStarted",
    "TurnEnded",
    "TurnStarted",
    "calls",
    "record",
    "replay",
    "says",
]

if not TYPE_CHECKING:  # a type checker shall still find a misspelled name
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "base": ["Adapter"],
            "claude": ["ClaudeAgentSDKAdapter"],
            "litellm": ["LiteLLMAdapter"],
            "local": ["LocalAdapter", "LocalModel"],
            "openai": ["OpenAIAdapter"],
            "recording": ["Divergence", "ReplayAdapter", "record", "replay"],
            "scripted": ["ScriptedAdapter", "calls", "says"],
            ".runtime.conversation": [
                "Message",
                "ModelRequest",
                "ModelTurn",
                "PromptResponse",
                "Retrying",
                "RunEvent",
                "SentBack",
                "StopReason",
                "TextDelta",
                "ToolEnded",
                "ToolStarted",
                "TurnEnded",
                "TurnStarted",
            ],
            ".runtime.evaluation": ["RunConfig", "RunOptions"],
        },
    )
