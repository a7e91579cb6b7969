-- One region's published count for one cell. Names are bytes (UTF-8), so that case, accents, trailing spaces and
-- everything else that a collation would fold stay apart; the key is a digest of them, so that no length matters.
CREATE TABLE IF NOT EXISTS ratelimit_window_counts (
    subject      BINARY(16)      NOT NULL COMMENT 'BLAKE2b-128 of workspace, namespace, identifier, duration',
    sequence     BIGINT          NOT NULL,
    region       VARBINARY(255)  NOT NULL,
    workspace_id VARBINARY(2048) NOT NULL,
    namespace    VARBINARY(2048) NOT NULL,
    identifier   VARBINARY(2048) NOT NULL,
    duration_ms  BIGINT          NOT NULL,
    count        BIGINT          NOT NULL,
    expires_at   BIGINT          NOT NULL COMMENT 'Unix ms: (sequence + 2) * duration_ms',
    updated_at   BIGINT          NOT NULL COMMENT 'the publish that last raised count: see ratelimit_publishes',
    CONSTRAINT ratelimit_window_counts_count CHECK (count >= 0),
    PRIMARY KEY (subject, sequence, region),
    KEY by_change (region, updated_at, subject, sequence),
    KEY by_expiry (expires_at, subject, sequence, region)
) ENGINE = InnoDB ROW_FORMAT = DYNAMIC;

-- The latest publish of each region: Unix ms by the database's clock, made to rise with every publish. A publisher
-- holds its region's row until it commits, so that the rows of a region become visible in the order of updated_at.
CREATE TABLE IF NOT EXISTS ratelimit_publishes (
    region       VARBINARY(255) NOT NULL,
    published_at BIGINT         NOT NULL,
    PRIMARY KEY (region)
) ENGINE = InnoDB;

-- Heartbeats: how many regions are alive. Apart from the publishes, so that neither waits for the other.
CREATE TABLE IF NOT EXISTS ratelimit_regions (
    region  VARBINARY(255) NOT NULL,
    beat_at BIGINT         NOT NULL COMMENT 'Unix ms by the database''s clock',
    PRIMARY KEY (region)
) ENGINE = InnoDB;
