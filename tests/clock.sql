-- The test clock: quota_internal.clock(), and for views quota_internal.present, read the instant that a test has set, else the real
-- one.
CREATE SCHEMA quota_test;
CREATE TABLE quota_test.clock (at timestamptz);
INSERT INTO quota_test.clock VALUES (NULL);

CREATE OR REPLACE FUNCTION quota_internal.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce((SELECT c.at FROM quota_test.clock c), clock_timestamp())
$$;

CREATE OR REPLACE VIEW quota_internal.present AS
SELECT (SELECT coalesce((SELECT c.at FROM quota_test.clock c), clock_timestamp())) AS at;
