"""Where sessions, outcomes and runs are kept: files, SQLite or PostgreSQL."""

from typing import TYPE_CHECKING

from weakincentives.lazy import load_lazily

load_lazily(__name__)

if TYPE_CHECKING:
    from weakincentives.runtime.stores.copies import copy_session as copy_session
    from weakincentives.runtime.stores.database import Database as Database
    from weakincentives.runtime.stores.files import FileStore as FileStore
    from weakincentives.runtime.stores.logs import LeasedLog as LeasedLog
    from weakincentives.runtime.stores.logs import LogPart as LogPart
    from weakincentives.runtime.stores.logs import SavePlace as SavePlace
    from weakincentives.runtime.stores.logs import SessionLog as SessionLog
    from weakincentives.runtime.stores.logs import SessionStore as SessionStore
    from weakincentives.runtime.stores.sql import SqlStore as SqlStore
