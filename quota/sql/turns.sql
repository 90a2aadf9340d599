-- reserve_in_turn: reserve for callers who can wait. Whoever is refused takes a place in the queue of the limit that binds, and
-- is judged from then on as if everybody before it had been served: waiters are spread over the refill, the first come first,
-- and nobody who comes later takes what the first one waits for. Only waiters write, and only here; reserve knows nothing of it.
--
-- The order is by headroom, then by the first ask: who leaves nothing to others goes before who does. A place is kept by asking
-- again in time; one that was left, or whose owner died, stands in nobody's way for long. The queue decides who asks; what is
-- granted is decided by reserve, so that no cap depends on any of this.

-- Among the accounts of a request the one with the longest wait, if it is one where those ahead leave no room; null when it is not,
-- and when the answer will be that waiting does not help: then reserve decides.
CREATE OR REPLACE FUNCTION quota_internal.queued_behind(
    tenant text, subjects text[], costs quota_internal.costs, mine quota_internal.waiters, at timestamptz
) RETURNS quota_internal.queued
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    polling_hint_s numeric;
    lineage text[];
    one record;
    s quota_internal.standing;
    waits_s numeric;
    look_after_s numeric;
    alone_s numeric := 0;
    short numeric;
    longest quota_internal.queued;
BEGIN
    IF NOT EXISTS (SELECT FROM quota_internal.waiters w WHERE w.tenant = queued_behind.tenant AND w.id <> mine.id) THEN
        RETURN NULL;
    END IF;
    polling_hint_s := (SELECT t.polling_hint_s FROM quota_internal.tenants t WHERE t.name = queued_behind.tenant);
    lineage := ARRAY(
        SELECT DISTINCT unnest(s.lineage) FROM quota_internal.subjects s
        WHERE s.tenant = queued_behind.tenant AND s.name = ANY (subjects));
    IF EXISTS (
        SELECT FROM quota_internal.subjects f
        WHERE f.tenant = queued_behind.tenant AND f.name = ANY (lineage) AND f.frozen IS NOT NULL)
    THEN
        RETURN NULL;
    END IF;
    FOR one IN
        SELECT a AS account, q.ahead, q.amount, (q.first).ahead AS moved, (q.first).since AS moved_since
        FROM quota_internal.accounts a
        CROSS JOIN LATERAL (
            SELECT count(*) AS ahead, coalesce(sum(w.amount), 0) AS amount,
                (array_agg(w ORDER BY w.headroom, w.since, w.id))[1] AS first
            FROM quota_internal.waiters w
            WHERE w.tenant = a.tenant AND w.account = a.id AND w.expires_at > at
                AND (w.headroom, w.since, w.id) < (mine.headroom, mine.since, mine.id)
        ) q
        WHERE a.tenant = queued_behind.tenant AND a.subject = ANY (lineage) AND a.in_force AND a.capacity IS NOT NULL
            AND a.unit = ANY (costs.units || '{requests,concurrency}'::text[])
        ORDER BY a.subject, a.limit_name
    LOOP
        s := quota_internal.stand(
            one.account, quota_internal.requested(one.account, costs), mine.headroom, at, polling_hint_s);
        CONTINUE WHEN s.requested = 0;
        IF s.reason IS NOT NULL AND s.retry_after_s IS NULL THEN
            RETURN NULL;
        END IF;
        short := one.amount + s.requested - CASE
            WHEN s.kind = 'bucket' THEN s.level - s.capacity + quota_internal.usable(s.kind, s.capacity, mine.headroom)
            ELSE quota_internal.usable(s.kind, s.capacity, mine.headroom) - s.spent - s.reserved
        END;
        CONTINUE WHEN short <= 0;
        IF s.kind = 'bucket' THEN
            alone_s := greatest(alone_s, s.retry_after_s);
            waits_s := quota_internal.refill_time_s(short, (one.account).refill_per_s);
            look_after_s := waits_s;
        ELSIF s.reason = 'exhausted' THEN
            alone_s := greatest(alone_s, s.retry_after_s);
            waits_s := s.retry_after_s;
            -- A window opens for all at once; they come a hundredth of a second apart.
            look_after_s := waits_s + one.ahead * 0.01;
        ELSE
            waits_s := polling_hint_s;
            -- What others return, they return unannounced. The further behind, the more seldom it is worth a look: all of
            -- them together ask no more often than a few would.
            look_after_s := waits_s * (one.ahead + 1);
        END IF;
        IF s.reason IS DISTINCT FROM 'exhausted' AND one.moved > 0 THEN
            -- So many were ahead of the first one when it came, and have gone since: faster, perhaps, than they would have if
            -- everybody used what they hold.
            look_after_s := least(look_after_s, greatest(polling_hint_s / 4,
                one.ahead * extract(epoch FROM (at - one.moved_since)) / one.moved));
        END IF;
        IF longest.ahead IS NULL OR look_after_s > longest.look_after_s THEN
            s.reason := coalesce(s.reason, CASE s.kind WHEN 'bucket' THEN 'rate' WHEN 'budget' THEN 'held' ELSE s.kind END);
            s.retry_after_s := waits_s;
            longest := ROW(s, one.ahead, alone_s, look_after_s)::quota_internal.queued;
        END IF;
    END LOOP;
    IF longest.ahead = 0 THEN
        RETURN NULL;
    END IF;
    longest.alone_s := alone_s;
    RETURN longest;
END
$$;

-- Takes or keeps a place. Whoever comes too late finds it again for a minute; then it is swept by others of the same queue.
CREATE OR REPLACE FUNCTION quota_internal.keep_place(mine quota_internal.waiters, at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO quota_internal.waiters AS w SELECT mine.*
    ON CONFLICT ON CONSTRAINT waiters_pkey DO UPDATE
    SET account = excluded.account, amount = excluded.amount, headroom = excluded.headroom, expires_at = excluded.expires_at,
        ahead = CASE WHEN w.account = excluded.account THEN w.ahead ELSE excluded.ahead END;
    DELETE FROM quota_internal.waiters w
    WHERE (w.tenant, w.id) IN (
        SELECT x.tenant, x.id FROM quota_internal.waiters x
        WHERE x.tenant = mine.tenant AND x.account = mine.account AND x.expires_at < at - interval '1 minute'
        FOR UPDATE SKIP LOCKED);
END
$$;

CREATE OR REPLACE FUNCTION quota.reserve_in_turn(
    subject text,
    costs jsonb,
    id uuid,
    patience interval DEFAULT '30 seconds',
    ttl interval DEFAULT '10 minutes',
    also text[] DEFAULT '{}',
    headroom numeric DEFAULT 0,
    on_expiry text DEFAULT NULL,
    details jsonb DEFAULT '{}',
    tenant text DEFAULT 'default'
) RETURNS quota.turn
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    parsed quota_internal.costs;
    subjects text[];
    at timestamptz := quota_internal.clock();
    mine quota_internal.waiters;
    has_place boolean;
    queued quota_internal.queued;
    d quota.decision;
    answer quota.turn;
BEGIN
    IF reserve_in_turn.id IS NULL OR NOT coalesce(patience >= '0' AND patience <= '1 day', false) THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('id %s with a patience of %s', coalesce(reserve_in_turn.id::text, 'null'), coalesce(patience::text, 'null')),
            'Pass an id of your own, the same for every ask, and a patience of 0 to 1 day.');
    END IF;
    PERFORM quota_internal.require_hold_arguments(ttl, headroom, on_expiry, details);
    parsed := quota_internal.parse_costs(costs);
    subjects := ARRAY[subject] || CASE WHEN also = '{}' THEN also ELSE quota_internal.others(also, subject) END;
    SELECT * INTO mine FROM quota_internal.waiters w WHERE w.tenant = reserve_in_turn.tenant AND w.id = reserve_in_turn.id;
    has_place := FOUND;
    IF NOT has_place THEN
        mine.tenant := tenant;
        mine.id := id;
        mine.since := at;
    END IF;
    mine.headroom := headroom;
    -- What is known already is answered again, whoever waits.
    IF NOT EXISTS (
        SELECT FROM quota_internal.reservations r
        WHERE r.tenant = reserve_in_turn.tenant AND r.id = reserve_in_turn.id)
    THEN
        queued := quota_internal.queued_behind(tenant, subjects, parsed, mine, at);
    END IF;
    IF queued.ahead IS NULL THEN
        d := quota.reserve(subject, costs, ttl, id, also, headroom, on_expiry, details, tenant);
        IF NOT d.granted AND d.retry_after_s IS NOT NULL THEN
            queued.ahead := 0;
            queued.look_after_s := d.retry_after_s;
            queued.alone_s := CASE WHEN d.reason IN ('rate', 'exhausted') THEN d.retry_after_s ELSE 0 END;
        END IF;
    ELSE
        PERFORM quota_internal.require_subjects(tenant, subjects);
        d := quota_internal.refusal(ARRAY[queued.standing]);
    END IF;
    IF queued.look_after_s IS NULL OR patience = '0' OR queued.alone_s > extract(epoch FROM patience) THEN
        queued.look_after_s := NULL;
        IF has_place THEN
            DELETE FROM quota_internal.waiters w WHERE w.tenant = reserve_in_turn.tenant AND w.id = reserve_in_turn.id;
        END IF;
    ELSE
        queued.look_after_s := least(queued.look_after_s, 10);
        mine.account := (
            SELECT a.id FROM quota_internal.accounts a
            WHERE a.tenant = reserve_in_turn.tenant AND a.subject = d.limit_subject AND a.limit_name = d.limit_name AND a.in_force);
        mine.amount := d.requested;
        mine.ahead := queued.ahead;
        mine.expires_at := at + (queued.look_after_s + 5) * interval '1 second';
        PERFORM quota_internal.keep_place(mine, at);
    END IF;
    SELECT (d).*, coalesce(queued.ahead, 0), trim_scale(queued.look_after_s) INTO answer;
    RETURN answer;
END
$$;
COMMENT ON FUNCTION quota.reserve_in_turn(text, jsonb, uuid, interval, interval, text[], numeric, text, jsonb, text) IS
    'reserve for callers who can wait: who is refused keeps a place in the queue by asking again, with the same id, within look_after_s.';

CREATE OR REPLACE VIEW quota.waiting AS
SELECT w.tenant, a.subject, a.limit_name, a.unit, count(*) AS waiting, trim_scale(sum(w.amount)) AS amount, min(w.since) AS since
FROM quota_internal.waiters w
JOIN quota_internal.accounts a ON a.tenant = w.tenant AND a.id = w.account
JOIN quota_internal.visible_tenants v ON v.tenant = w.tenant
CROSS JOIN quota_internal.present p
WHERE w.expires_at > p.at
GROUP BY w.tenant, a.subject, a.limit_name, a.unit;
COMMENT ON VIEW quota.waiting IS 'Limits that somebody waits for in turn: how many, for how much, since when.';
