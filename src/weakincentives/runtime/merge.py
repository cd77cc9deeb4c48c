"""Merge a branch into its workspace, as a call of a session: recorded, and undoable like any other.

A merge that conflicts has changed nothing. ``rebased`` then moves the branch onto the workspace and
tells the model what it has to do again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from weakincentives.core.call import ToolCall
from weakincentives.core.text import harmless
from weakincentives.filesystem import Branch, FileChange, Filesystem, HostFilesystem
from weakincentives.filesystem.merging import Merge, Prefer
from weakincentives.filesystem.paths import join_path
from weakincentives.prompt import MarkdownSection, Prompt, PromptTemplate, Tool, ToolContext
from weakincentives.prompt.policies import AnyPolicy
from weakincentives.runtime.tool_call import execute_tool
from weakincentives.session.session import Session
from weakincentives.tool_result import ToolResult

MERGE = "merge"
"""The name of the call in the log."""

_MOST_TOLD = 6_000
"""Characters of a diff in a message to the model."""
_MOST_FILES = 50


@dataclass(frozen=True, slots=True)
class MergeParams:
    branch: str


def merge_branch(
    branch: Branch,
    files: HostFilesystem,
    session: Session,
    *,
    mark: str = "",
    prefer: Prefer | None = None,
    policies: Sequence[AnyPolicy] = (),
    check: Callable[[], object] | None = None,
) -> ToolResult[None]:
    """Merge a branch into the workspace in one call; a conflict is a failed result.

    Files that the branch read and others have changed since are conflicts, too: the outcome is as
    if its calls had been made now, one after the other.

    Args:
        files: The workspace.
        mark: Of the run: see ``SavedSession.mark``. The call's id begins with it.
        prefer: Whose version of a conflicting path to take.
        policies: Are told of the call.
        check: Called when the workspace is ours and has not been changed; may raise.
    """

    def merge(params: MergeParams, *, context: ToolContext) -> ToolResult[None]:
        workspace = context.filesystem
        assert isinstance(workspace, HostFilesystem)
        if check is not None:
            check()
        paths = branch.merge_into(workspace, strict=prefer is None, prefer=prefer)
        count = f"{len(paths)} path{'' if len(paths) == 1 else 's'}"
        return ToolResult.ok(None, f"Merged {count} into the workspace")

    tool = Tool[MergeParams, None](
        name=MERGE,
        description="Merge a branch into the workspace.",
        handler=merge,
        reach="reversible",
    )
    template = PromptTemplate(
        ns="wink",
        key=MERGE,
        name="Merge",
        sections=[MarkdownSection(title="Merge", tools=[tool])],
        policies=policies,
        resources={Filesystem: files},
    )
    call = ToolCall(MERGE, {"branch": branch.name}, f"{mark}:merge_{os.urandom(4).hex()}")
    prompt = Prompt(template)
    with prompt.resources:
        return execute_tool(call, session=session, prompt=prompt)


def rebased(branch: Branch) -> str:
    """Move a branch onto the workspace as it is now; returns what the model must know.

    Where both changed the same places, the workspace's version is taken: the model gets its own
    changes there as a diff, to make them again.
    """
    told: list[str] = []
    branch.rebase(strict=True, prefer="workspace", tell=lambda plan: told.append(_about(plan)))
    return "".join(told)


def _about(plan: Merge) -> str:
    reasons = sorted((join_path(parts), why) for parts, why in plan.conflicts.items())
    own, others = plan.conflicting_changes()
    parts = [
        "Your changes are not in the workspace yet: meanwhile others have changed files that you"
        " have changed or read.",
        *(f"- {harmless(path)} {why}" for path, why in reasons[:_MOST_FILES]),
        *([f"- and {len(reasons) - _MOST_FILES} more"] if len(reasons) > _MOST_FILES else []),
        "What others have changed there:",
        _bounded(others),
    ]
    if own:
        parts += [
            "There you now see the version of the others. Your own changes there, which are not in"
            " place any more, were:",
            _bounded(own),
        ]
    parts.append(
        "All your other changes are in place. Read these files again, make what is still needed of"
        " your changes, test them, and finish. Then they are merged again."
    )
    return "\n".join(parts)


def _bounded(changes: Iterable[FileChange]) -> str:
    text = "".join(each.text or f"{each.path}: {each.note}\n" for each in changes)
    return text if len(text) <= _MOST_TOLD else f"{text[:_MOST_TOLD]}\n... (cut)"
