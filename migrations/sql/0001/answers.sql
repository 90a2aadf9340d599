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

-- Fills an answer's limit columns. A new grant shows every account with the hold added to what was judged. Then: on a grant from the tightest limit (the least share of its capacity left), on a refusal from
-- the binding one. Standings come in lock order, which settles ties.
CREATE OR REPLACE FUNCTION quota_internal.conclude(d quota.decision, standings quota_internal.standing[]) RETURNS quota.decision
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s quota_internal.standing;
    chosen quota_internal.standing;
    share numeric;
    least_share numeric;
    rank integer;
    best_rank integer;
    hopeless boolean := false;
BEGIN
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
            IF chosen IS NULL OR share < coalesce(least_share, share + 1) THEN
                chosen := s;
                least_share := share;
            END IF;
        ELSIF s.reason IS NOT NULL THEN
            d.violations := d.violations || quota_internal.as_json(s);
            rank := quota_internal.precedence(s.reason);
            IF chosen IS NULL OR rank < best_rank
                OR rank = best_rank AND chosen.retry_after_s IS NOT NULL
                    AND (s.retry_after_s IS NULL OR s.retry_after_s > chosen.retry_after_s)
            THEN
                chosen := s;
                best_rank := rank;
            END IF;
            hopeless := hopeless OR s.retry_after_s IS NULL;
            d.retry_after_s := greatest(d.retry_after_s, s.retry_after_s);
        END IF;
    END LOOP;
    IF hopeless THEN
        d.retry_after_s := NULL;
    END IF;
    d.reason := chosen.reason;
    d.limit_subject := chosen.subject;
    d.limit_name := chosen.limit_name;
    d.unit := chosen.unit;
    d.capacity := chosen.capacity;
    d.spent := chosen.spent;
    d.reserved := chosen.reserved;
    d.requested := chosen.requested;
    RETURN d;
END
$$;
