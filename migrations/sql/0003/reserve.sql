-- reserve: one hold over many subjects, units and limits, all or nothing.
--
-- The way of every decision: resolve and judge from a plain snapshot (a refusal ends here: no lock, nothing written); close
-- overdue holds that stand in the way; lock the accounts in order; read the clock; judge again by the locked rows; write the
-- hold, by a statement that begins after the locks and finds that no limit, tier, lineage or freeze has changed since
-- (config_version); write the accounts.

-- Who is charged: the lineages of these subjects, and what stands in the way of judging their accounts. Subjects that are missing
-- or retired end here, as does a ttl above the tenant's maximum; accounts that carry old definitions are bound anew.
CREATE OR REPLACE FUNCTION quota_internal.resolve(tenant text, subjects text[], ttl interval) RETURNS quota_internal.resolution
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.resolution;
    bound boolean := false;
BEGIN
    FOR attempt IN 1 .. 100 LOOP
        IF cardinality(subjects) = 1 THEN
            SELECT t.config_version, t.polling_hint_s, t.ttl_maximum, n.lineage, n.frozen IS NOT NULL,
                n.binding_version <> t.binding_version
            INTO r
            FROM quota_internal.tenants t
            JOIN quota_internal.subjects n ON n.tenant = resolve.tenant AND n.name = subjects[1] AND NOT n.retired
            WHERE t.name = resolve.tenant
                AND NOT EXISTS (
                    SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> resolve.tenant);
        END IF;
        IF cardinality(subjects) <> 1 OR cardinality(r.lineage) > 1 THEN
            -- Several subjects, or ancestors whose state counts too; one that lineages share counts once.
            SELECT t.config_version, t.polling_hint_s, t.ttl_maximum, array_agg(s.name), bool_or(s.frozen IS NOT NULL),
                bool_or(s.binding_version <> t.binding_version)
            INTO r
            FROM quota_internal.tenants t
            JOIN quota_internal.subjects s ON s.tenant = resolve.tenant AND s.name = ANY (ARRAY(
                SELECT unnest(n.lineage) FROM quota_internal.subjects n
                WHERE n.tenant = resolve.tenant AND n.name = ANY (subjects) AND NOT n.retired))
            WHERE t.name = resolve.tenant
                AND NOT EXISTS (
                    SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> resolve.tenant)
            GROUP BY t.name;
        END IF;
        IF r.lineage IS NULL OR NOT subjects <@ r.lineage THEN
            PERFORM quota_internal.require_subjects(tenant, subjects);
        ELSIF ttl > r.ttl_maximum THEN
            PERFORM quota_internal.require_ttl(ttl, r.ttl_maximum);
        ELSIF r.unbound THEN
            PERFORM quota_internal.bind(tenant, r.lineage);
            bound := true;
        ELSE
            r.bound := bound;
            RETURN r;
        END IF;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing', tenant),
        HINT = 'Retry with the same id.';
END
$$;

-- Says why a resolution falls short: the tenant, or the subject that is not there.
CREATE OR REPLACE FUNCTION quota_internal.require_subjects(tenant text, subjects text[]) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    missing text;
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    SELECT x.name INTO missing
    FROM unnest(subjects) WITH ORDINALITY x(name, position)
    LEFT JOIN quota_internal.subjects s ON s.tenant = require_subjects.tenant AND s.name = x.name AND NOT s.retired
    WHERE s.name IS NULL
    ORDER BY x.position
    LIMIT 1;
    IF FOUND THEN
        PERFORM quota_internal.require_subject_name(missing);
        PERFORM quota_internal.fail('unknown_subject',
            format('there is no subject "%s" in tenant "%s"', missing, tenant),
            'Create it with quota.create_subject or quota.ensure_subject, or correct the spelling.');
    END IF;
END
$$;

-- Every unit must be covered by a limit: unlimited is declared, never assumed. The two that every reserve counts need none.
CREATE OR REPLACE FUNCTION quota_internal.require_covered(subject text, units text[], covered text[]) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    unit text;
BEGIN
    FOREACH unit IN ARRAY units LOOP
        IF unit <> ALL (covered || ARRAY['requests', 'concurrency']) THEN
            PERFORM quota_internal.require_unit(unit);
            PERFORM quota_internal.fail('no_limit', format('no limit of unit "%s" covers "%s"', unit, subject),
                'Set one with quota.set_limit on the subject, an ancestor or the kind; capacity null declares it unlimited.');
        END IF;
    END LOOP;
END
$$;

-- Where an account stands at an instant, and whether what is asked of it fits.
CREATE OR REPLACE FUNCTION quota_internal.stand(
    a quota_internal.accounts, requested numeric, headroom numeric, at timestamptz, polling_hint_s numeric
) RETURNS quota_internal.standing
LANGUAGE plpgsql STABLE AS $$
DECLARE
    usable numeric := quota_internal.usable(a.kind, a.capacity, headroom);
    level numeric;
    reason text;
    wait_s numeric;
    opened record;
BEGIN
    IF a.kind = 'bucket' THEN
        level := quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at);
    ELSIF a.window_end <= at OR a.period IS NOT NULL AND a.window_end IS NULL THEN
        SELECT * INTO opened FROM quota_internal.window_at(a.period, a.time_zone, at);
        a.spent := 0;
        a.reserved := 0;
        a.window_start := opened.window_start;
        a.window_end := opened.window_end;
    END IF;
    reason := quota_internal.verdict(a.kind, a.capacity, usable, requested, a.spent, a.reserved, level);
    IF reason IS NOT NULL THEN
        wait_s := quota_internal.wait_s(reason, a.capacity, usable, requested, level, a.refill_per_s, a.level_at, a.window_end,
            at, polling_hint_s);
    END IF;
    RETURN ROW(a.id, a.subject, a.limit_name, a.unit, a.kind, a.capacity, CASE WHEN a.kind <> 'bucket' THEN a.spent END,
        a.reserved, level, requested, reason, wait_s, a.window_start, a.window_end)::quota_internal.standing;
END
$$;

-- What a request asks of an account: the amount of its unit, or 1 of the two units that count by themselves.
CREATE OR REPLACE FUNCTION quota_internal.requested(a quota_internal.accounts, costs quota_internal.costs) RETURNS numeric
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    amount numeric := coalesce(costs.amounts[array_position(costs.units, a.unit)],
        CASE WHEN a.unit IN ('requests', 'concurrency') THEN 1 END);
BEGIN
    IF amount IS NULL THEN
        PERFORM quota_internal.fail('unit_missing',
            format('limit "%s" of "%s" requires an amount of "%s"', a.limit_name, a.subject, a.unit),
            'Add the unit to the costs; 0 is allowed.');
    ELSIF a.kind = 'concurrency' AND amount <> trunc(amount) THEN
        PERFORM quota_internal.fail('invalid_amount', format('%s of "%s" is not a whole number of slots', amount, a.unit),
            'Concurrency is counted in whole slots.');
    END IF;
    RETURN amount;
END
$$;

-- Judges a request by one snapshot: every account of the lineages whose unit is asked for, required, or counts by itself.
CREATE OR REPLACE FUNCTION quota_internal.judge(
    tenant text, subjects text[], ttl interval, costs quota_internal.costs, headroom numeric, charge boolean
) RETURNS quota_internal.judgement
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.resolution := quota_internal.resolve(tenant, subjects, ttl);
    wanted text[] := costs.units || '{requests,concurrency}'::text[];
    accounts quota_internal.accounts[] := ARRAY(
        SELECT a FROM quota_internal.accounts a
        WHERE a.tenant = judge.tenant AND a.subject = ANY (r.lineage) AND a.in_force
            AND (a.unit = ANY (wanted) OR a.required)
        ORDER BY a.subject, a.limit_name);
    j quota_internal.judgement := quota_internal.judge_accounts(accounts, r.config_version, r.polling_hint_s, costs, headroom, charge);
BEGIN
    IF NOT costs.units <@ j.covered THEN
        PERFORM quota_internal.require_covered(subjects[1], costs.units, j.covered);
    END IF;
    IF r.frozen OR r.bound THEN
        j.frozen := r.frozen;
        j.bound := r.bound;
    END IF;
    RETURN j;
END
$$;

-- Locks the accounts of a judgement in the one order and judges once more, by the locked rows and a clock read after the locks.
CREATE OR REPLACE FUNCTION quota_internal.judge_locked(
    tenant text, j quota_internal.judgement, costs quota_internal.costs, headroom numeric, charge boolean
) RETURNS quota_internal.judgement
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    locked quota_internal.accounts[] := ARRAY(
        SELECT a FROM quota_internal.accounts a
        WHERE a.tenant = judge_locked.tenant AND a.id = ANY (j.ids)
        ORDER BY a.subject, a.limit_name
        FOR NO KEY UPDATE);
BEGIN
    RETURN quota_internal.judge_accounts(locked, j.config_version, j.polling_hint_s, costs, headroom, charge);
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.judge_accounts(
    accounts quota_internal.accounts[], config_version bigint, polling_hint_s numeric, costs quota_internal.costs,
    headroom numeric, charge boolean, at timestamptz DEFAULT NULL
) RETURNS quota_internal.judgement
LANGUAGE plpgsql AS $$
DECLARE
    a quota_internal.accounts;
    s quota_internal.standing;
    standings quota_internal.standing[] := '{}';
    refused boolean := false;
    stale boolean := false;
    ids bigint[] := '{}';
    windows timestamptz[] := '{}';
    amounts numeric[] := '{}';
    charged boolean[] := '{}';
    covered text[] := '{requests,concurrency}';
BEGIN
    at := coalesce(at, quota_internal.clock());
    FOREACH a IN ARRAY accounts LOOP
        s := quota_internal.stand(a, quota_internal.requested(a, costs), headroom, at, polling_hint_s);
        standings := standings || s;
        refused := refused OR s.reason IS NOT NULL;
        stale := stale OR s.reserved > 0 AND a.earliest_expiry <= at;
        ids := ids || a.id;
        windows := windows || s.window_start;
        amounts := amounts || s.requested;
        charged := charged || (a.kind <> 'concurrency' AND (charge OR a.on_expiry = 'charge'));
        covered := covered || a.unit;
    END LOOP;
    RETURN ROW(config_version, at, standings, refused, stale, false, false, ids, windows, amounts, charged, covered,
        polling_hint_s, 'infinity')::quota_internal.judgement;
END
$$;

-- The answer when a subject or an ancestor is frozen: it names the nearest one, and waiting cannot be computed.
CREATE OR REPLACE FUNCTION quota_internal.frozen_answer(tenant text, subjects text[]) RETURNS quota.decision
LANGUAGE plpgsql STABLE AS $$
DECLARE
    d quota.decision;
BEGIN
    d.granted := false;
    d.replayed := false;
    d.reason := 'frozen';
    SELECT f.name INTO d.limit_subject
    FROM unnest(subjects) WITH ORDINALITY n(name, position)
    JOIN quota_internal.subjects s ON s.tenant = frozen_answer.tenant AND s.name = n.name
    CROSS JOIN unnest(s.lineage) WITH ORDINALITY l(name, depth)
    JOIN quota_internal.subjects f ON f.tenant = frozen_answer.tenant AND f.name = l.name AND f.frozen IS NOT NULL
    ORDER BY n.position, l.depth
    LIMIT 1;
    d.remaining := '[]';
    d.violations := jsonb_build_array(jsonb_build_object(
        'subject', d.limit_subject, 'limit_name', NULL, 'unit', NULL, 'kind', NULL, 'capacity', NULL, 'spent', NULL,
        'reserved', NULL, 'level', NULL, 'available', NULL, 'reason', 'frozen', 'retry_after_s', NULL));
    RETURN d;
END
$$;

-- After the locks: leaves the block around them when the tenant's limits, tiers, lineages or freezes have changed meanwhile.
CREATE OR REPLACE FUNCTION quota_internal.require_unchanged(tenant text, config_version bigint) RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF require_unchanged.config_version
        <> (SELECT t.config_version FROM quota_internal.tenants t WHERE t.name = require_unchanged.tenant) THEN
        RAISE EXCEPTION USING ERRCODE = 'QT099';
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.reservation(tenant text, id uuid) RETURNS quota_internal.reservations
LANGUAGE sql STABLE AS $$
    SELECT r FROM quota_internal.reservations r WHERE r.tenant = reservation.tenant AND r.id = reservation.id
$$;

CREATE OR REPLACE FUNCTION quota_internal.refusal(standings quota_internal.standing[]) RETURNS quota.decision
LANGUAGE plpgsql STABLE AS $$
DECLARE
    d quota.decision;
BEGIN
    d.granted := false;
    d.replayed := false;
    RETURN quota_internal.conclude(d, standings);
END
$$;

-- The units of the hold: those asked for, and 1 for each of the two that count by themselves where a limit covers them. (covered
-- begins with the two as units that need no limit; what follows has one.)
CREATE OR REPLACE FUNCTION quota_internal.with_implied(costs jsonb, covered text[], units text[]) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    unit text;
BEGIN
    IF covered[3:] <@ units THEN
        RETURN costs;
    END IF;
    FOREACH unit IN ARRAY covered[3:] LOOP
        IF unit <> ALL (units) THEN
            costs := costs || jsonb_build_object(unit, 1);
        END IF;
    END LOOP;
    RETURN costs;
END
$$;

-- Takes what was judged to fit from the locked accounts: opens windows, moves buckets to the present, adds the hold. One statement
-- an account: a few of them cost less than one that joins an array.
CREATE OR REPLACE FUNCTION quota_internal.take(
    tenant text, standings quota_internal.standing[], at timestamptz, expires_at timestamptz, next_expiry timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    s quota_internal.standing;
BEGIN
    FOREACH s IN ARRAY standings LOOP
        CONTINUE WHEN s.account IS NULL;
        UPDATE quota_internal.accounts a
        SET spent = quota_internal.in_window(a.spent, a.window_end, at),
            reserved = quota_internal.in_window(a.reserved, a.window_end, at) + s.requested,
            level = CASE WHEN a.kind = 'bucket' THEN greatest(0, s.level - s.requested) END,
            level_at = CASE WHEN a.kind = 'bucket' THEN greatest(a.level_at, at) END,
            window_start = s.window_start,
            window_end = s.window_end,
            earliest_expiry = least(CASE WHEN a.earliest_expiry <= at THEN next_expiry ELSE a.earliest_expiry END, expires_at)
        WHERE a.tenant = take.tenant AND a.id = s.account;
    END LOOP;
END
$$;

-- The answer for an id that is known already; null when it is not. With locked, the row is locked, although nothing may change:
-- a stale snapshot fails here, the answer waits for a standby as the hold did, and an overdue hold is closed. A caller that may
-- hold accounts already must not wait for it.
CREATE OR REPLACE FUNCTION quota_internal.replay(
    tenant text, id uuid, subject text, also text[], costs jsonb, locked boolean
) RETURNS quota.decision
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.reservations;
    d quota.decision;
    differs text;
BEGIN
    IF locked THEN
        SELECT * INTO r FROM quota_internal.reservations x
        WHERE x.tenant = replay.tenant AND x.id = replay.id FOR NO KEY UPDATE;
    ELSE
        SELECT * INTO r FROM quota_internal.reservations x WHERE x.tenant = replay.tenant AND x.id = replay.id;
    END IF;
    IF r.id IS NULL THEN
        RETURN NULL;
    END IF;
    PERFORM quota_internal.require_tenant(replay.tenant);
    IF r.state = 'held' AND r.expires_at <= quota_internal.clock() THEN
        IF locked THEN
            PERFORM quota_internal.expire(replay.tenant, ARRAY[replay.id]);
        END IF;
        r.state := 'expired';
    END IF;
    differs := CASE
        WHEN r.outcome = 'record' THEN 'it is a record'
        WHEN r.subject <> replay.subject THEN format('subject "%s", first "%s"', replay.subject, r.subject)
        WHEN r.also <> replay.also THEN format('also %s, first %s', replay.also, r.also)
        WHEN r.costs <> replay.costs THEN format('costs %s, first %s', replay.costs, r.costs)
    END;
    IF differs IS NOT NULL THEN
        PERFORM quota_internal.fail('id_conflict', format('reservation %s is known with another request: %s', r.id, differs),
            'Use a new id for a new request, or repeat the first one unchanged.');
    END IF;
    d.reservation := r.id;
    d.state := r.state;
    d.expires_at := r.expires_at;
    d.granted := r.state = 'held';
    d.replayed := d.granted;
    IF d.granted THEN
        RETURN quota_internal.conclude(d, quota_internal.standings_of(r));
    END IF;
    d.reason := 'closed';
    d.remaining := '[]';
    d.violations := '[]';
    RETURN d;
END
$$;

-- The accounts of a reservation, in lock order.
CREATE OR REPLACE FUNCTION quota_internal.accounts_of(r quota_internal.reservations) RETURNS quota_internal.accounts[]
LANGUAGE sql STABLE AS $$
    SELECT coalesce(array_agg(a ORDER BY a.subject, a.limit_name), '{}')
    FROM quota_internal.accounts a
    WHERE a.tenant = r.tenant AND a.id = ANY (r.line_accounts)
$$;

-- Where the accounts of an open hold stand now, the hold included.
CREATE OR REPLACE FUNCTION quota_internal.standings_of(r quota_internal.reservations) RETURNS quota_internal.standing[]
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := quota_internal.clock();
    a quota_internal.accounts;
    s quota_internal.standing;
    accounts quota_internal.accounts[] := quota_internal.with_present_numbers(quota_internal.accounts_of(r), r.tenant);
    standings quota_internal.standing[] := '{}';
BEGIN
    IF quota_internal.few_overdue(r.tenant, at) THEN
        accounts := quota_internal.discount(accounts, at);
    END IF;
    FOREACH a IN ARRAY accounts LOOP
        s := quota_internal.stand(a, 0, r.headroom, at, 1);
        s.requested := (r.held -> a.unit)::numeric;
        standings := standings || s;
    END LOOP;
    RETURN standings;
END
$$;

-- Above READ COMMITTED a plain read may be older than what has been decided since: every decision then takes its locks first, and
-- a row that has moved on fails as 40001 instead of giving a wrong answer.
CREATE OR REPLACE FUNCTION quota_internal.snapshot_is_old() RETURNS boolean
LANGUAGE sql STABLE AS $$
    SELECT current_setting('transaction_isolation') <> 'read committed'
$$;

-- Locks accounts in the one order.
CREATE OR REPLACE FUNCTION quota_internal.lock_accounts(tenant text, ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM FROM quota_internal.accounts a
    WHERE a.tenant = lock_accounts.tenant AND a.id = ANY (lock_accounts.ids)
    ORDER BY a.subject, a.limit_name
    FOR NO KEY UPDATE;
END
$$;

-- The same, and returns them as they are now.
CREATE OR REPLACE FUNCTION quota_internal.locked_accounts(tenant text, ids bigint[]) RETURNS quota_internal.accounts[]
LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT a FROM quota_internal.accounts a
        WHERE a.tenant = locked_accounts.tenant AND a.id = ANY (locked_accounts.ids)
        ORDER BY a.subject, a.limit_name
        FOR NO KEY UPDATE);
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_hold_arguments(ttl interval, headroom numeric, on_expiry text, details jsonb)
RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF ttl > '0' AND headroom >= 0 AND headroom < 1 AND coalesce(on_expiry, 'release') IN ('release', 'charge')
        AND jsonb_typeof(details) = 'object'
    THEN
        RETURN;
    END IF;
    IF NOT coalesce(ttl > '0', false) THEN
        PERFORM quota_internal.fail('invalid_ttl', format('ttl %s is not above 0', coalesce(ttl::text, 'null')),
            'Pass an interval such as ''10 minutes''.');
    ELSIF NOT coalesce(headroom >= 0 AND headroom < 1, false) THEN
        PERFORM quota_internal.fail('invalid_argument', format('headroom %s is not within 0 and <1', coalesce(headroom::text, 'null')),
            'Headroom is the share of every capacity to leave free, such as 0.2.');
    ELSIF coalesce(on_expiry, 'release') NOT IN ('release', 'charge') THEN
        PERFORM quota_internal.fail('invalid_argument', format('on_expiry "%s" is unknown', left(on_expiry, 50)),
            'Pass ''release'', ''charge'', or null for what each limit says.');
    END IF;
    PERFORM quota_internal.require_details(details);
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_ttl(ttl interval, maximum interval) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF ttl > maximum THEN
        PERFORM quota_internal.fail('invalid_ttl', format('ttl %s is above the maximum of %s', ttl, maximum),
            'Ask for less and extend the hold while the work goes on.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_details(details jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF jsonb_typeof(details) IS DISTINCT FROM 'object' THEN
        PERFORM quota_internal.fail('invalid_argument', format('details %s is no object', coalesce(left(details::text, 100), 'null')),
            'Pass a JSON object, or leave it out.');
    END IF;
END
$$;

-- The same accounts, locked, where overdue holds lie about: judged with those discounted. next_expiry says how far the search
-- need not be repeated: to the tenant's next expiry, unless one of these accounts has an overdue hold left.
CREATE OR REPLACE FUNCTION quota_internal.judge_discounted(
    tenant text, j quota_internal.judgement, costs quota_internal.costs, headroom numeric, charge boolean,
    refund_buckets boolean
) RETURNS quota_internal.judgement
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    stored quota_internal.accounts[] := ARRAY(
        SELECT a FROM quota_internal.accounts a
        WHERE a.tenant = judge_discounted.tenant AND a.id = ANY (j.ids)
        ORDER BY a.subject, a.limit_name);
    discounted quota_internal.accounts[] := quota_internal.discount(stored, j.at, refund_buckets);
BEGIN
    j := quota_internal.judge_accounts(discounted, j.config_version, j.polling_hint_s, costs, headroom, charge, j.at);
    -- Judged as if they were closed, they are about all the same: what is shown must count them.
    j.stale := true;
    j.next_expiry := CASE WHEN discounted = stored THEN quota_internal.next_expiry(tenant, j.at) ELSE '-infinity' END;
    RETURN j;
END
$$;

CREATE OR REPLACE FUNCTION quota.reserve(
    subject text,
    costs jsonb,
    ttl interval DEFAULT '10 minutes',
    id uuid DEFAULT NULL,
    also text[] DEFAULT '{}',
    headroom numeric DEFAULT 0,
    on_expiry text DEFAULT NULL,
    details jsonb DEFAULT '{}',
    tenant text DEFAULT 'default'
) RETURNS quota.decision
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    parsed quota_internal.costs;
    subjects text[] := ARRAY[reserve.subject];
    charge boolean := on_expiry IS NOT DISTINCT FROM 'charge';
    d quota.decision;
    j quota_internal.judgement;
    bound boolean := false;
    old_snapshot boolean := quota_internal.snapshot_is_old();
BEGIN
    PERFORM quota_internal.require_hold_arguments(reserve.ttl, reserve.headroom, reserve.on_expiry, reserve.details);
    parsed := quota_internal.parse_costs(reserve.costs);
    IF reserve.also IS DISTINCT FROM '{}' THEN
        also := quota_internal.others(reserve.also, reserve.subject);
        subjects := subjects || also;
    END IF;
    FOR attempt IN 1 .. 100 LOOP
        IF old_snapshot THEN
            PERFORM FROM quota_internal.tenants t WHERE t.name = reserve.tenant FOR SHARE;
        END IF;
        IF reserve.id IS NOT NULL THEN
            d := quota_internal.replay(
                reserve.tenant, reserve.id, reserve.subject, also, parsed.by_value, locked => attempt = 1);
            IF d.reservation IS NOT NULL THEN
                RETURN d;
            END IF;
        END IF;
        j := quota_internal.judge(reserve.tenant, subjects, ttl, parsed, headroom, charge);
        bound := bound OR j.bound;
        EXIT WHEN j.frozen OR j.refused AND NOT j.stale AND NOT old_snapshot;

        -- A block that can be left: its locks go with it, so that deciding anew begins without any (no deadlock).
        BEGIN
            -- Overdue holds in the way are closed, their rows before any account. A call that has bound accounts holds those
            -- already: it must not wait, closes what is free and discounts the rest.
            IF j.refused AND NOT old_snapshot THEN
                EXIT WHEN NOT quota_internal.close_overdue_in_the_way(
                    reserve.tenant, j.standings, j.ids, j.at, NOT bound, NOT bound) AND NOT bound;
            END IF;
            j := quota_internal.judge_locked(reserve.tenant, j, parsed, headroom, charge);
            IF j.stale AND (j.refused OR quota_internal.few_overdue(reserve.tenant, j.at)) THEN
                j := quota_internal.judge_discounted(reserve.tenant, j, parsed, headroom, charge, false);
            ELSIF j.stale THEN
                -- What fits beside holds that are overdue fits without them.
                j.stale := false;
                j.next_expiry := '-infinity';
            END IF;
            IF j.refused THEN
                PERFORM quota_internal.require_unchanged(reserve.tenant, j.config_version);
                EXIT;
            END IF;

            d.reservation := coalesce(reserve.id, quota_internal.uuid_v7());
            d.expires_at := quota_internal.later(j.at, ttl);
            INSERT INTO quota_internal.reservations
                (tenant, id, subject, also, costs, held, created_at, expires_at, headroom, details,
                 line_accounts, line_windows, line_held, line_booked, line_charged)
            SELECT reserve.tenant, d.reservation, reserve.subject, also, parsed.by_value,
                quota_internal.with_implied(parsed.by_value, j.covered, parsed.units), j.at, d.expires_at, headroom, details,
                j.ids, j.windows, j.amounts, array_fill(0::numeric, ARRAY[cardinality(j.ids)]), j.charged
            FROM quota_internal.tenants t
            WHERE t.name = reserve.tenant AND t.config_version = j.config_version
            ON CONFLICT (tenant, id) DO NOTHING;
            -- Nothing inserted: a limit, tier, lineage or freeze has changed, or the same id was faster. Or a rival of the same
            -- id took its time to fail, and the hold would be born overdue. (Three times: a ttl may just be that short.)
            IF NOT FOUND OR reserve.id IS NOT NULL AND attempt <= 3 AND d.expires_at <= quota_internal.clock() THEN
                RAISE EXCEPTION USING ERRCODE = 'QT099';
            END IF;
            PERFORM quota_internal.take(reserve.tenant, j.standings, j.at, d.expires_at, j.next_expiry);

            d.granted := true;
            d.state := 'held';
            d.replayed := j.stale;
            IF j.stale THEN
                -- What is shown has overdue holds counted as their expiry will book them, refunds of buckets too.
                d := quota_internal.conclude(
                    d, quota_internal.standings_of(quota_internal.reservation(reserve.tenant, d.reservation)));
                d.replayed := false;
                RETURN d;
            END IF;
            RETURN quota_internal.conclude(d, j.standings);
        EXCEPTION WHEN SQLSTATE 'QT099' THEN
            d := NULL;
        END;
    END LOOP;

    -- Refused; unless the same id was faster: then its answer is the answer.
    IF reserve.id IS NOT NULL THEN
        d := quota_internal.replay(reserve.tenant, reserve.id, reserve.subject, also, parsed.by_value, locked => false);
        IF d.reservation IS NOT NULL THEN
            RETURN d;
        END IF;
    END IF;
    IF j.frozen THEN
        RETURN quota_internal.frozen_answer(reserve.tenant, subjects);
    ELSIF j.refused THEN
        IF j.stale THEN
            j := quota_internal.judge_discounted(reserve.tenant, j, parsed, headroom, charge, true);
        END IF;
        RETURN quota_internal.refusal(j.standings);
    END IF;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing; no decision after 100 attempts', reserve.tenant),
        HINT = 'Retry with the same id.';
END
$$;
COMMENT ON FUNCTION quota.reserve(text, jsonb, interval, uuid, text[], numeric, text, jsonb, text) IS
    'Holds the worst case of a call before it is made: every limit of every lineage takes it, or none does and the answer says why.';
