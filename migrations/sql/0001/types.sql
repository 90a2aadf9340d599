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
    window_end timestamptz
);

-- Whom a request charges: all subjects of the lineages, and the tenant's settings.
CREATE TYPE quota_internal.resolution AS (
    config_version bigint,
    polling_hint_s numeric,
    ttl_maximum interval,
    lineage text[],
    frozen boolean,
    unbound boolean,         -- some account does not carry the definition in force yet
    bound boolean            -- this call has bound accounts, and so holds their locks
);

-- All accounts of a request, judged at one instant, in lock order; their lines side by side; and what was seen on the way.
CREATE TYPE quota_internal.judgement AS (
    config_version bigint,
    at timestamptz,
    standings quota_internal.standing[],
    refused boolean,
    stale boolean,           -- some account may have overdue holds
    frozen boolean,
    bound boolean,           -- the call holds account locks already
    ids bigint[],
    windows timestamptz[],
    amounts numeric[],
    charged boolean[],
    covered text[],          -- units with a limit, and the two that need none
    polling_hint_s numeric,
    next_expiry timestamptz  -- no search for overdue holds is needed before
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
