-- The log of a workspace. Each call that changed something is one operation; what it changed at each
-- path is one row of "change". Rows are added and, by garbage collection, removed; never updated.
-- Only "head" is updated.

CREATE TABLE operation (
    number INTEGER PRIMARY KEY,        -- in order of commit
    id TEXT NOT NULL UNIQUE,           -- random: numbers can be used again after a loss of power
    parent INTEGER NOT NULL,           -- the operation before it on its line; 0: none
    merged INTEGER,                    -- the second parent of a merge
    kind TEXT NOT NULL,                -- call, undo, rewind, merge, edit, event
    session TEXT,                      -- the rest of the call: NULL for an edit
    call_id TEXT,
    tool TEXT,
    arguments TEXT,                    -- JSON
    answer TEXT,                       -- as the model saw it
    outcome TEXT,                      -- committed, failed, denied, suspended, unknown
    started REAL,                      -- seconds since the epoch
    duration REAL,                     -- seconds
    delta TEXT,                        -- JSON: what it changed in the session; NULL: nothing
    undoes TEXT,                       -- JSON: numbers of the operations that it undoes; NULL: none
    undone TEXT,                       -- JSON: the ids of the calls that it undoes; NULL: none
    partly TEXT,                       -- JSON: those of them of which something is left; NULL: none
    times TEXT,                        -- JSON: modification times of directories before it; NULL: none
    size INTEGER NOT NULL,             -- bytes stored so that it can be undone
    moment INTEGER NOT NULL,           -- when, by the clock that files have, in nanoseconds
    redo TEXT,                         -- JSON: what a session's file lacks until it is next saved
    changes INTEGER NOT NULL,          -- how many rows of "change" it has
    checksum INTEGER NOT NULL          -- CRC-32 of this row and of those
);

-- A call id names a call once in its session.
CREATE UNIQUE INDEX operation_call ON operation (session, call_id) WHERE session IS NOT NULL;

CREATE INDEX operation_call_id ON operation (call_id);

CREATE TABLE change (
    path TEXT NOT NULL,                -- relative to the workspace; '': the workspace itself
    number INTEGER NOT NULL REFERENCES operation (number) ON DELETE CASCADE,
    before TEXT,                       -- JSON: kind, mode, size, content ...; NULL: nothing was there
    after TEXT,
    origin TEXT,                       -- the path that it was moved from
    stats TEXT,                        -- JSON: device, inode, change time and links, before and after
    PRIMARY KEY (path, number)
) WITHOUT ROWID;

CREATE INDEX change_number ON change (number);

-- The contents that an operation names; a content that none names is garbage.
CREATE TABLE need (
    digest TEXT NOT NULL,
    number INTEGER NOT NULL REFERENCES operation (number) ON DELETE CASCADE,
    PRIMARY KEY (digest, number)
) WITHOUT ROWID;

CREATE INDEX need_number ON need (number);

-- What removed operations named outside of the database, until that is removed, too: ids of operations
-- and digests. Garbage collection removes nothing else: a loss of power can have cost the row that
-- names a file, and that file can be the only copy.
CREATE TABLE garbage (name TEXT PRIMARY KEY) WITHOUT ROWID;

-- The newest operation of each line: '' is checked out in the directory, the others are branches.
CREATE TABLE head (
    line TEXT PRIMARY KEY,
    number INTEGER NOT NULL
) WITHOUT ROWID;

-- Up to where garbage collection has removed the oldest operations: none after that may be missing.
CREATE TABLE removed (
    line TEXT PRIMARY KEY,
    number INTEGER NOT NULL
) WITHOUT ROWID;

-- Small contents and manifests of directories; larger contents are files beside the database.
CREATE TABLE content (
    digest TEXT PRIMARY KEY,           -- SHA-256
    data BLOB NOT NULL
) WITHOUT ROWID;

-- For people and `wink query`: these keep their names and columns.

CREATE VIEW calls AS
SELECT number, session, call_id, tool, arguments, answer, outcome, started, duration, changes
FROM operation WHERE call_id IS NOT NULL;

CREATE VIEW file_changes AS
SELECT
    change.number,
    operation.kind AS operation,
    operation.tool,
    change.path,
    change.origin,
    json_extract(change.before, '$.kind') AS kind_before,
    json_extract(change.after, '$.kind') AS kind_after,
    json_extract(change.before, '$.size') AS size_before,
    json_extract(change.after, '$.size') AS size_after,
    json_extract(change.before, '$.content') AS content_before,
    json_extract(change.after, '$.content') AS content_after
FROM change JOIN operation USING (number);
