-- Whether a run may start. Its columns never change: a wider row is a new type.
CREATE TYPE quota.run_decision AS (
    granted boolean,
    run text,
    replayed boolean,
    expires_at timestamptz,
    start_after_s numeric,
    max_tokens bigint,
    reason text,
    limit_subject text,
    limit_name text,
    unit text,
    capacity numeric,
    available numeric,
    promised numeric,
    requested numeric,
    retry_after_s numeric
);
