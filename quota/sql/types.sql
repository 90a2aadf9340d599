-- The composite types, public rows first. A type in use cannot be replaced: a wider row is a new type.

-- The public row. Its columns never change: a wider answer is a new type.
CREATE TYPE quota.decision AS (
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
    violations jsonb
);

-- One account as a decision sees it: what it reads at the instant of the decision, what is asked of it, and the verdict.
CREATE TYPE quota_internal.standing AS (
    account bigint,
    subject text,
    limit_name text,
    unit text,
    kind text,
    capacity numeric,
    spent numeric,
    reserved numeric,
    level numeric,
    requested numeric,
    reason text,
    retry_after_s numeric,
    window_start timestamptz,
    window_end timestamptz,
    charge_on_expiry boolean
);

-- All accounts of a request, judged at one instant, in lock order; and what was seen on the way to them.
CREATE TYPE quota_internal.judgement AS (
    at timestamptz,
    standings quota_internal.standing[],
    ids bigint[],
    covered text[],          -- units with a limit, and the two that need none
    named text[],            -- subjects of the lineages
    unbound boolean,         -- some account does not carry the definition in force yet
    frozen boolean,
    refused boolean,
    stale boolean,           -- some account may have overdue holds
    ttl_maximum interval,
    polling_hint_s numeric
);

-- A cost map, taken apart: its units and amounts side by side, and the map once more with every amount as a JSON number.
CREATE TYPE quota_internal.costs AS (
    units text[],
    amounts numeric[],
    by_value jsonb
);

-- A named row: an argument and a result column have the same name. Its columns never change.
CREATE TYPE quota.balance_row AS (
    subject text,
    limit_name text,
    unit text,
    kind text,
    capacity numeric,
    spent numeric,
    reserved numeric,
    level numeric,
    available numeric,
    window_start timestamptz,
    window_end timestamptz,
    full_after_s numeric
);

CREATE TYPE quota.violation AS (
    tenant text,
    invariant text,
    subject text,
    limit_name text,
    expected text,
    found text
);

-- One limit as its definition, validated: what set_limit and set_tier_limit have in common.
CREATE TYPE quota_internal.definition AS (
    name text, unit text, kind text, capacity numeric, refill_per_s numeric, period text, time_zone text
);
