"""What the model is offered, as a developer declares it: tools, sections, policies, prompts.

May know: `core`, `errors`, `filesystem`, `resources`, `retry`, `serde`, `session`, `tool_result`.
Must not go here: anything that executes a call, but for the one hand-over in ``Tool.__call__``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__, "tool")

if TYPE_CHECKING:
    from weakincentives.prompt.approval import Approval as Approval
    from weakincentives.prompt.approval import ApprovalAsked as ApprovalAsked
    from weakincentives.prompt.approval import ApprovalPolicy as ApprovalPolicy
    from weakincentives.prompt.approval import ApprovalRequest as ApprovalRequest
    from weakincentives.prompt.approval import ApprovalRule as ApprovalRule
    from weakincentives.prompt.approval import CallPreview as CallPreview
    from weakincentives.prompt.approval import StandingApproval as StandingApproval
    from weakincentives.prompt.caller import Caller as Caller
    from weakincentives.prompt.caller import NotAnswered as NotAnswered
    from weakincentives.prompt.caller import Root as Root
    from weakincentives.prompt.caller import Sample as Sample
    from weakincentives.prompt.caller import SampleRequest as SampleRequest
    from weakincentives.prompt.completion import AllOf as AllOf
    from weakincentives.prompt.completion import AnyOf as AnyOf
    from weakincentives.prompt.completion import CompletionResult as CompletionResult
    from weakincentives.prompt.completion import Custom as Custom
    from weakincentives.prompt.completion import FilesExist as FilesExist
    from weakincentives.prompt.completion import PlanDone as PlanDone
    from weakincentives.prompt.completion import TaskCompletionChecker as TaskCompletionChecker
    from weakincentives.prompt.completion import check_completion as check_completion
    from weakincentives.prompt.context import ToolContext as ToolContext
    from weakincentives.prompt.contracts import CascadeEffect as CascadeEffect
    from weakincentives.prompt.contracts import CustomPrecondition as CustomPrecondition
    from weakincentives.prompt.contracts import DependencyPrecondition as DependencyPrecondition
    from weakincentives.prompt.contracts import Effect as Effect
    from weakincentives.prompt.contracts import MemoryEffect as MemoryEffect
    from weakincentives.prompt.contracts import NotificationEffect as NotificationEffect
    from weakincentives.prompt.contracts import PermissionPrecondition as PermissionPrecondition
    from weakincentives.prompt.contracts import Precondition as Precondition
    from weakincentives.prompt.contracts import PreconditionCheck as PreconditionCheck
    from weakincentives.prompt.contracts import PreconditionResult as PreconditionResult
    from weakincentives.prompt.contracts import ResourcePrecondition as ResourcePrecondition
    from weakincentives.prompt.contracts import StateChangeEffect as StateChangeEffect
    from weakincentives.prompt.contracts import StatePrecondition as StatePrecondition
    from weakincentives.prompt.contracts import validate_preconditions as validate_preconditions
    from weakincentives.prompt.feedback import After as After
    from weakincentives.prompt.feedback import CallCountFeedback as CallCountFeedback
    from weakincentives.prompt.feedback import DeadlineFeedback as DeadlineFeedback
    from weakincentives.prompt.feedback import DeadlineNear as DeadlineNear
    from weakincentives.prompt.feedback import EveryCalls as EveryCalls
    from weakincentives.prompt.feedback import Feedback as Feedback
    from weakincentives.prompt.feedback import FeedbackMoment as FeedbackMoment
    from weakincentives.prompt.feedback import FeedbackProvider as FeedbackProvider
    from weakincentives.prompt.feedback import FeedbackState as FeedbackState
    from weakincentives.prompt.feedback import FeedbackTrigger as FeedbackTrigger
    from weakincentives.prompt.feedback import NoProgress as NoProgress
    from weakincentives.prompt.feedback import collect_feedback as collect_feedback
    from weakincentives.prompt.feedback import with_feedback as with_feedback
    from weakincentives.prompt.overrides import ExampleData as ExampleData
    from weakincentives.prompt.overrides import ExamplesOverride as ExamplesOverride
    from weakincentives.prompt.overrides import PromptDescriptor as PromptDescriptor
    from weakincentives.prompt.overrides import PromptOverrides as PromptOverrides
    from weakincentives.prompt.overrides import PromptOverridesStore as PromptOverridesStore
    from weakincentives.prompt.overrides import SectionOverride as SectionOverride
    from weakincentives.prompt.overrides import TextOverride as TextOverride
    from weakincentives.prompt.overrides import ToolOverride as ToolOverride
    from weakincentives.prompt.overrides import describe as describe
    from weakincentives.prompt.policies import AnyPolicy as AnyPolicy
    from weakincentives.prompt.policies import PolicyDecision as PolicyDecision
    from weakincentives.prompt.policies import PolicyState as PolicyState
    from weakincentives.prompt.policies import ProtectedPathsPolicy as ProtectedPathsPolicy
    from weakincentives.prompt.policies import QuotaPolicy as QuotaPolicy
    from weakincentives.prompt.policies import RateLimitPolicy as RateLimitPolicy
    from weakincentives.prompt.policies import ReadBeforeWritePolicy as ReadBeforeWritePolicy
    from weakincentives.prompt.policies import (
        SequentialDependencyPolicy as SequentialDependencyPolicy,
    )
    from weakincentives.prompt.policies import ToolPolicy as ToolPolicy
    from weakincentives.prompt.policies import if_offered as if_offered
    from weakincentives.prompt.prompt import Prompt as Prompt
    from weakincentives.prompt.prompt import PromptResources as PromptResources
    from weakincentives.prompt.prompt import PromptTemplate as PromptTemplate
    from weakincentives.prompt.prompt import RenderedPrompt as RenderedPrompt
    from weakincentives.prompt.section import MarkdownSection as MarkdownSection
    from weakincentives.prompt.section import Section as Section
    from weakincentives.prompt.section import SectionVisibility as SectionVisibility
    from weakincentives.prompt.section import TaskExample as TaskExample
    from weakincentives.prompt.section import TaskExamplesSection as TaskExamplesSection
    from weakincentives.prompt.section import TaskStep as TaskStep
    from weakincentives.prompt.section import VisibilityState as VisibilityState
    from weakincentives.prompt.section import expand as expand
    from weakincentives.prompt.section import set_visibility as set_visibility
    from weakincentives.prompt.structured_output import output_instructions as output_instructions
    from weakincentives.prompt.structured_output import output_schema as output_schema
    from weakincentives.prompt.structured_output import (
        parse_structured_output as parse_structured_output,
    )
    from weakincentives.prompt.tool import FunctionTool as FunctionTool
    from weakincentives.prompt.tool import Reach as Reach
    from weakincentives.prompt.tool import Tool as Tool
    from weakincentives.prompt.tool import ToolExample as ToolExample
    from weakincentives.prompt.tool import ToolHandler as ToolHandler
    from weakincentives.prompt.tool import Writes as Writes
    from weakincentives.prompt.tool import tool as tool
    from weakincentives.tool_result import ToolError as ToolError
    from weakincentives.tool_result import ToolMetadata as ToolMetadata
    from weakincentives.tool_result import ToolResult as ToolResult
