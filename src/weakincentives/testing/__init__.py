"""For tests of your own tools and adapters: contexts, files, a clock, and checkers.

>>> from weakincentives.testing import make_context_with_files
>>> context = make_context_with_files({"a.txt": "hello"})
>>> context.filesystem.read("a.txt")
'hello'

Call a handler with such a context to test its logic. Call the ``Tool`` to test what a model sees,
with validation, rollback and the record in the session. Report reads and writes to a ``History`` to
test that concurrent calls come out as if they had run one after the other. Run ``adapter_cases``
over your own adapter to test that it keeps an agent's promises, and ``resource_cases`` over your
own resource to test that it is rolled back.

May know: `adapters`, `core`, `errors`, `filesystem`, `prompt`, `resources`, `runtime`, `session`.
Must not go here: helpers that only our own tests need; they belong in ``tests/``.
"""

from typing import TYPE_CHECKING

from weakincentives.core.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.core.clock import FakeClock as FakeClock
    from weakincentives.testing.conformance import AdapterCase as AdapterCase
    from weakincentives.testing.conformance import Asked as Asked
    from weakincentives.testing.conformance import MakeAdapter as MakeAdapter
    from weakincentives.testing.conformance import Played as Played
    from weakincentives.testing.conformance import Served as Served
    from weakincentives.testing.conformance import adapter_cases as adapter_cases
    from weakincentives.testing.contexts import make_context as make_context
    from weakincentives.testing.contexts import make_context_with_files as make_context_with_files
    from weakincentives.testing.contexts import make_session as make_session
    from weakincentives.testing.contexts import make_vfs as make_vfs
    from weakincentives.testing.history import Anomaly as Anomaly
    from weakincentives.testing.history import History as History
    from weakincentives.testing.models import MadeUpAdapter as MadeUpAdapter
    from weakincentives.testing.models import made_up as made_up
    from weakincentives.testing.models import no_model_requests as no_model_requests
    from weakincentives.testing.resources import ResourceCase as ResourceCase
    from weakincentives.testing.resources import resource_cases as resource_cases
