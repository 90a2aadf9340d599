-- What reserve and adjust answer, and how an answer is put together from where its accounts stand.

-- Amounts travel as strings: a JSON number turns into a binary float in most languages.
CREATE OR REPLACE FUNCTION quota_internal.as_json(s quota_internal.standing) RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'subject', s.subject, 'limit_name', s.limit_name, 'unit', s.unit, 'kind', s.kind,
        'capacity', trim_scale(s.capacity)::text, 'spent', trim_scale(s.spent)::text,
        'reserved', trim_scale(s.reserved)::text, 'level', trim_scale(s.level)::text,
        'available', trim_scale(quota_internal.available(s.kind, s.capacity, s.spent, s.reserved, s.level))::text,
        'reason', s.reason, 'retry_after_s', trim_scale(s.retry_after_s)::text)
$$;

-- Fills an answer's limit columns. A new grant shows every account with the hold added to what was judged; the columns come from
-- the tightest limit (the least share of its capacity left), on a refusal from the binding one. Standings are in lock order,
-- which settles ties.
CREATE OR REPLACE FUNCTION quota_internal.conclude(d quota.decision, standings quota_internal.standing[]) RETURNS quota.decision
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s quota_internal.standing := standings[1];
    chosen quota_internal.standing;
    least_share numeric;
    share numeric;
    retry_after_s numeric;
    hopeless boolean := false;
BEGIN
    IF cardinality(standings) = 1 THEN
        -- One account, the usual case, in one expression: each costs more to prepare than to compute.
        IF d.granted AND NOT d.replayed THEN
            s.reserved := s.reserved + s.requested;
            s.level := s.level - s.requested;
        END IF;
        d.remaining := jsonb_build_array(quota_internal.as_json(s));
        RETURN ROW(d.granted, d.reservation, d.state, d.expires_at, d.replayed, s.reason, s.subject, s.limit_name, s.unit,
            s.capacity, s.spent, s.reserved, s.requested, s.retry_after_s, d.remaining,
            CASE WHEN d.granted THEN '[]'::jsonb ELSE d.remaining END)::quota.decision;
    END IF;
    d.remaining := '[]';
    d.violations := '[]';
    FOREACH s IN ARRAY standings LOOP
        IF d.granted AND NOT d.replayed THEN
            s.reserved := s.reserved + s.requested;
            s.level := s.level - s.requested;
        END IF;
        d.remaining := d.remaining || quota_internal.as_json(s);
        IF d.granted THEN
            -- An unlimited account has no share; it is shown only when there is nothing tighter.
            share := CASE
                WHEN s.capacity = 0 THEN 0
                ELSE quota_internal.available(s.kind, s.capacity, s.spent, s.reserved, s.level) / s.capacity
            END;
            IF chosen.account IS NULL OR share < coalesce(least_share, share + 1) THEN
                chosen := s;
                least_share := share;
            END IF;
        ELSIF s.reason IS NOT NULL THEN
            d.violations := d.violations || quota_internal.as_json(s);
            IF chosen.account IS NULL OR quota_internal.binds_before(s, chosen) THEN
                chosen := s;
            END IF;
            hopeless := hopeless OR s.retry_after_s IS NULL;
            retry_after_s := greatest(retry_after_s, s.retry_after_s);
        END IF;
    END LOOP;
    RETURN ROW(d.granted, d.reservation, d.state, d.expires_at, d.replayed, chosen.reason, chosen.subject, chosen.limit_name,
        chosen.unit, chosen.capacity, chosen.spent, chosen.reserved, chosen.requested,
        CASE WHEN NOT hopeless THEN retry_after_s END, d.remaining, d.violations)::quota.decision;
END
$$;

-- Among violations the first reason by precedence binds; among equal reasons the longest wait, and never is the longest.
CREATE OR REPLACE FUNCTION quota_internal.binds_before(s quota_internal.standing, other quota_internal.standing) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT quota_internal.precedence(s.reason) < quota_internal.precedence(other.reason)
        OR s.reason = other.reason AND other.retry_after_s IS NOT NULL
            AND (s.retry_after_s IS NULL OR s.retry_after_s > other.retry_after_s)
$$;
