"""See every file and value of a run at every call: in the browser, as a page, as tables.

May know: `adapters`, `contrib`, `core`, `errors`, `filesystem`, `prompt`, `runtime`, `serde`,
`session`.
Must not go here: what an undo, a rewind or a fork does; it shows them and starts them.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.debugger.export import Exported as Exported
    from weakincentives.debugger.export import export_run as export_run
    from weakincentives.debugger.query import Answer as Answer
    from weakincentives.debugger.query import query_run as query_run
    from weakincentives.debugger.server import serve as serve
    from weakincentives.debugger.views import Views as Views
