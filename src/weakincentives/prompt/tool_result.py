"""``ToolResult``, its error and its metadata, under the name of the runtime specification.

They are defined in ``weakincentives.tool_result``, below this package: events and retries, which
prompts are built on, are typed with them.
"""

from weakincentives.tool_result import ToolError as ToolError
from weakincentives.tool_result import ToolMetadata as ToolMetadata
from weakincentives.tool_result import ToolResult as ToolResult
