-- The catalog of the server: who may call, and what was set. Rows are marked before they are deleted, so that a reader that
-- was disconnected for a while sees what was deleted. Names are bytes (UTF-8); uniqueness is by digest, so that no
-- length matters.

-- One row. Every writer raises it first and holds the lock until it commits: versions become visible in order.
CREATE TABLE IF NOT EXISTS ratelimit_catalog (
    id      INT    NOT NULL,
    version BIGINT NOT NULL,
    PRIMARY KEY (id)
) ENGINE = InnoDB;

INSERT IGNORE INTO ratelimit_catalog (id, version) VALUES (1, 1);

CREATE TABLE IF NOT EXISTS ratelimit_workspaces (
    id                VARBINARY(2048) NOT NULL,
    name              VARBINARY(2048) NOT NULL,
    enabled           SMALLINT        NOT NULL,
    quota             BIGINT,
    quota_duration_ms BIGINT,
    version           BIGINT          NOT NULL,
    PRIMARY KEY (id),
    KEY by_version (version)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS ratelimit_keys (
    id            VARBINARY(64)   NOT NULL,
    workspace_id  VARBINARY(2048) NOT NULL,
    digest        BINARY(32)      NOT NULL,
    name          VARBINARY(2048) NOT NULL,
    hint          VARBINARY(64)   NOT NULL,
    permissions   MEDIUMBLOB      NOT NULL,
    created_at    BIGINT          NOT NULL,
    expires_at    BIGINT,
    enabled       SMALLINT        NOT NULL,
    revoked_at    BIGINT,
    version       BIGINT          NOT NULL,
    PRIMARY KEY (id),
    UNIQUE KEY by_digest (digest),
    KEY by_version (version),
    CONSTRAINT ratelimit_keys_workspace FOREIGN KEY (workspace_id) REFERENCES ratelimit_workspaces (id)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS ratelimit_namespaces (
    id           VARBINARY(64)   NOT NULL,
    name_digest  BINARY(16)      NOT NULL,
    workspace_id VARBINARY(2048) NOT NULL,
    name         VARBINARY(2048) NOT NULL,
    created_at   BIGINT          NOT NULL,
    deleted_at   BIGINT,
    version      BIGINT          NOT NULL,
    PRIMARY KEY (id),
    UNIQUE KEY by_name (name_digest),
    KEY by_version (version)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

CREATE TABLE IF NOT EXISTS ratelimit_overrides (
    id                VARBINARY(64)   NOT NULL,
    identifier_digest BINARY(16)      NOT NULL,
    namespace_id      VARBINARY(64)   NOT NULL,
    identifier        VARBINARY(2048) NOT NULL,
    quota             BIGINT          NOT NULL,
    duration_ms       BIGINT          NOT NULL,
    deleted_at        BIGINT,
    version           BIGINT          NOT NULL,
    PRIMARY KEY (id),
    UNIQUE KEY by_identifier (identifier_digest),
    KEY by_version (version)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;
