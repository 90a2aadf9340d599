-- Rows of quota.reserve_in_turn. A type in use cannot be replaced: a wider row is a new type.

-- A decision, and what becomes of whoever waits for a better one. Its columns never change.
CREATE TYPE quota.turn AS (
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
    ahead bigint,            -- others who wait for the binding limit and come first
    look_after_s numeric     -- ask again within so many seconds, the place is kept; null: there is no place to keep
);

-- The account on which others come first and leave no room, as it will read when they have been served.
CREATE TYPE quota_internal.queued AS (
    standing quota_internal.standing,
    ahead bigint,
    alone_s numeric,         -- the wait if nobody were ahead
    look_after_s numeric
);
