-- The catalog of the server: who may call, and what was set. Rows are marked before they are deleted, so that a reader that
-- was disconnected for a while sees what was deleted. Names are bytes (UTF-8); uniqueness is by digest, so that no
-- length matters.

-- One row. Every writer raises it first and holds the lock until it commits: versions become visible in order.
CREATE TABLE IF NOT EXISTS ratelimit_catalog (
    id      INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    version INTEGER NOT NULL
);

INSERT OR IGNORE INTO ratelimit_catalog (id, version) VALUES (1, 1);

CREATE TABLE IF NOT EXISTS ratelimit_workspaces (
    id                BLOB    NOT NULL PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 2048),
    name              BLOB    NOT NULL CHECK (length(name) <= 2048),
    enabled           INTEGER NOT NULL,
    quota             INTEGER,
    quota_duration_ms INTEGER,
    version           INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS ratelimit_workspaces_by_version ON ratelimit_workspaces (version);

CREATE TABLE IF NOT EXISTS ratelimit_keys (
    id            BLOB    NOT NULL PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 64),
    workspace_id  BLOB    NOT NULL REFERENCES ratelimit_workspaces (id),
    digest        BLOB    NOT NULL UNIQUE CHECK (length(digest) = 32),
    name          BLOB    NOT NULL CHECK (length(name) <= 2048),
    hint          BLOB    NOT NULL CHECK (length(hint) <= 64),
    permissions   BLOB    NOT NULL,
    created_at    INTEGER NOT NULL,
    expires_at    INTEGER,
    enabled       INTEGER NOT NULL,
    revoked_at    INTEGER,
    version       INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS ratelimit_keys_by_version ON ratelimit_keys (version);

CREATE TABLE IF NOT EXISTS ratelimit_namespaces (
    id           BLOB    NOT NULL PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 64),
    name_digest  BLOB    NOT NULL UNIQUE CHECK (length(name_digest) = 16),
    workspace_id BLOB    NOT NULL CHECK (length(workspace_id) <= 2048),
    name         BLOB    NOT NULL CHECK (length(name) <= 2048),
    created_at   INTEGER NOT NULL,
    deleted_at   INTEGER,
    version      INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS ratelimit_namespaces_by_version ON ratelimit_namespaces (version);

CREATE TABLE IF NOT EXISTS ratelimit_overrides (
    id                BLOB    NOT NULL PRIMARY KEY CHECK (length(id) BETWEEN 1 AND 64),
    identifier_digest BLOB    NOT NULL UNIQUE CHECK (length(identifier_digest) = 16),
    namespace_id      BLOB    NOT NULL CHECK (length(namespace_id) <= 64),
    identifier        BLOB    NOT NULL CHECK (length(identifier) <= 2048),
    quota             INTEGER NOT NULL CHECK (quota >= 0),
    duration_ms       INTEGER NOT NULL CHECK (duration_ms >= 1000),
    deleted_at        INTEGER,
    version           INTEGER NOT NULL
) WITHOUT ROWID;

CREATE INDEX IF NOT EXISTS ratelimit_overrides_by_version ON ratelimit_overrides (version);
