-- An override in shadow mode is counted and reported, and denies nothing. A node of an older version does not look at
-- this column and enforces it: update all nodes before using it.
-- MySQL has no ADD COLUMN IF NOT EXISTS, and commits a change of the schema before the history says that it was made.
SET @tidegate_shadow = IF(
    EXISTS (
        SELECT 1 FROM information_schema.columns
        WHERE table_schema = DATABASE() AND table_name = 'ratelimit_overrides' AND column_name = 'shadow'
    ),
    'DO 0',
    'ALTER TABLE ratelimit_overrides ADD COLUMN shadow TINYINT NOT NULL DEFAULT 0'
);

PREPARE tidegate_shadow FROM @tidegate_shadow;

EXECUTE tidegate_shadow;

DEALLOCATE PREPARE tidegate_shadow;
