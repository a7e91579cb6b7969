-- The catalog of the server: who may call, and what was set. Rows are marked before they are deleted, so that a reader that
-- was disconnected for a while sees what was deleted. Names are bytes (UTF-8); uniqueness is by digest, so that no
-- length matters.

-- One row. Every writer raises it first and holds the lock until it commits: versions become visible in order.
CREATE TABLE IF NOT EXISTS ratelimit_catalog (
    id      INTEGER NOT NULL PRIMARY KEY CHECK (id = 1),
    version BIGINT  NOT NULL
) WITH (fillfactor = 50);

INSERT INTO ratelimit_catalog (id, version) VALUES (1, 1) ON CONFLICT (id) DO NOTHING;

CREATE TABLE IF NOT EXISTS ratelimit_workspaces (
    id                BYTEA    NOT NULL PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 2048),
    name              BYTEA    NOT NULL CHECK (octet_length(name) <= 2048),
    enabled           SMALLINT NOT NULL,
    quota             BIGINT,
    quota_duration_ms BIGINT,
    version           BIGINT   NOT NULL
);

CREATE INDEX IF NOT EXISTS ratelimit_workspaces_by_version ON ratelimit_workspaces (version);

CREATE TABLE IF NOT EXISTS ratelimit_keys (
    id            BYTEA    NOT NULL PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 64),
    workspace_id  BYTEA    NOT NULL REFERENCES ratelimit_workspaces (id),
    digest        BYTEA    NOT NULL UNIQUE CHECK (octet_length(digest) = 32),
    name          BYTEA    NOT NULL CHECK (octet_length(name) <= 2048),
    hint          BYTEA    NOT NULL CHECK (octet_length(hint) <= 64),
    permissions   BYTEA    NOT NULL,
    created_at    BIGINT   NOT NULL,
    expires_at    BIGINT,
    enabled       SMALLINT NOT NULL,
    revoked_at    BIGINT,
    version       BIGINT   NOT NULL
);

CREATE INDEX IF NOT EXISTS ratelimit_keys_by_version ON ratelimit_keys (version);

CREATE TABLE IF NOT EXISTS ratelimit_namespaces (
    id           BYTEA  NOT NULL PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 64),
    name_digest  BYTEA  NOT NULL UNIQUE CHECK (octet_length(name_digest) = 16),
    workspace_id BYTEA  NOT NULL CHECK (octet_length(workspace_id) <= 2048),
    name         BYTEA  NOT NULL CHECK (octet_length(name) <= 2048),
    created_at   BIGINT NOT NULL,
    deleted_at   BIGINT,
    version      BIGINT NOT NULL
);

CREATE INDEX IF NOT EXISTS ratelimit_namespaces_by_version ON ratelimit_namespaces (version);

CREATE TABLE IF NOT EXISTS ratelimit_overrides (
    id                BYTEA  NOT NULL PRIMARY KEY CHECK (octet_length(id) BETWEEN 1 AND 64),
    identifier_digest BYTEA  NOT NULL UNIQUE CHECK (octet_length(identifier_digest) = 16),
    namespace_id      BYTEA  NOT NULL CHECK (octet_length(namespace_id) <= 64),
    identifier        BYTEA  NOT NULL CHECK (octet_length(identifier) <= 2048),
    quota             BIGINT NOT NULL CHECK (quota >= 0),
    duration_ms       BIGINT NOT NULL CHECK (duration_ms >= 1000),
    deleted_at        BIGINT,
    version           BIGINT NOT NULL
);

CREATE INDEX IF NOT EXISTS ratelimit_overrides_by_version ON ratelimit_overrides (version);
