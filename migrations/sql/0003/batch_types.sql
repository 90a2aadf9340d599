-- The rows that the batch functions answer: what the single function answers, its place in the batch, or the error of this one
-- request. Their columns never change: a wider answer is a new type.

CREATE TYPE quota.batch_decision AS (
    position integer,        -- of the request in the batch, from 1
    granted boolean,
    reservation uuid,
    state text,
    expires_at timestamptz,
    replayed boolean,
    reason text,
    limit_subject text,
    limit_name text,
    unit text,
    capacity numeric,
    spent numeric,
    reserved numeric,
    requested numeric,
    retry_after_s numeric,
    remaining jsonb,
    violations jsonb,
    error text,              -- its name, such as invalid_amount; null when the request was answered
    error_code text,         -- its SQLSTATE
    error_message text,
    error_remedy text
);

CREATE TYPE quota.batch_settlement AS (
    position integer,
    reservation uuid,
    state text,
    late boolean,
    replayed boolean,
    overage jsonb,
    error text,
    error_code text,
    error_message text,
    error_remedy text
);

CREATE TYPE quota.batch_release AS (
    position integer,
    reservation uuid,
    state text,
    replayed boolean,
    error text,
    error_code text,
    error_message text,
    error_remedy text
);
