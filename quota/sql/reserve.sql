-- reserve: one hold over many subjects, units and limits, all or nothing.
--
-- The way of every decision: resolve and judge from a plain snapshot (a refusal ends here: no lock, nothing written); close
-- overdue holds that stand in the way; lock the accounts in order; read the clock; judge again by the locked rows; write the
-- hold, provided that nothing it relied on has changed since (config_version), and then the accounts.

-- Reads all that a decision needs in one statement: without locks, without writing. named counts the subjects that exist.
CREATE OR REPLACE FUNCTION quota_internal.resolve(tenant text, subjects text[], units text[]) RETURNS quota_internal.resolution
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    found quota_internal.resolution;
BEGIN
    SELECT min(t.config_version), min(t.ttl_maximum), min(t.polling_hint_s), count(DISTINCT n.name),
        bool_or(s.binding_version <> t.binding_version), bool_or(s.frozen IS NOT NULL),
        array_agg(a.unit) FILTER (WHERE a.id IS NOT NULL), array_agg(a.id) FILTER (WHERE a.id IS NOT NULL),
        array_agg(a ORDER BY a.subject, a.limit_name) FILTER (WHERE a.id IS NOT NULL)
    INTO found
    FROM quota_internal.tenants t
    JOIN quota_internal.subjects n ON n.tenant = resolve.tenant AND n.name = ANY (resolve.subjects) AND NOT n.retired
    CROSS JOIN unnest(n.lineage) l(name)
    JOIN quota_internal.subjects s ON s.tenant = resolve.tenant AND s.name = l.name
    LEFT JOIN quota_internal.accounts a ON a.tenant = resolve.tenant AND a.subject = s.name AND a.in_force
        AND (a.unit = ANY (resolve.units) OR a.unit IN ('requests', 'concurrency') OR a.required)
    WHERE t.name = resolve.tenant
        AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> resolve.tenant);
    RETURN found;
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
        PERFORM quota_internal.fail('unknown_subject',
            format('there is no subject %s in tenant "%s"', coalesce('"' || left(missing, 220) || '"', 'null'), tenant),
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

-- Where each account stands at an instant, and whether what is asked of it fits.
CREATE OR REPLACE FUNCTION quota_internal.judge(
    accounts quota_internal.accounts[], units text[], amounts numeric[], headroom numeric, at timestamptz,
    polling_hint_s numeric, charge boolean, OUT standings quota_internal.standing[], OUT refused boolean
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    a quota_internal.accounts;
    s quota_internal.standing;
    usable numeric;
BEGIN
    refused := false;
    FOREACH a IN ARRAY accounts LOOP
        -- Two lineages that meet reach an account twice; it is charged once.
        CONTINUE WHEN a.id = s.account;
        s.account := a.id;
        s.subject := a.subject;
        s.limit_name := a.limit_name;
        s.unit := a.unit;
        s.kind := a.kind;
        s.capacity := a.capacity;
        s.requested := amounts[array_position(units, a.unit)];
        IF s.requested IS NULL THEN
            IF a.unit NOT IN ('requests', 'concurrency') THEN
                PERFORM quota_internal.fail('unit_missing',
                    format('limit "%s" of "%s" requires an amount of "%s"', a.limit_name, a.subject, a.unit),
                    'Add the unit to the costs; 0 is allowed.');
            END IF;
            s.requested := 1;
        END IF;
        IF a.period IS NULL THEN
            s.spent := a.spent;
            s.reserved := a.reserved;
        ELSIF a.window_end > at THEN
            s.spent := a.spent;
            s.reserved := a.reserved;
            s.window_start := a.window_start;
            s.window_end := a.window_end;
        ELSE
            s.spent := 0;
            s.reserved := 0;
            SELECT w.window_start, w.window_end INTO s.window_start, s.window_end
            FROM quota_internal.window_at(a.period, a.time_zone, at) w;
        END IF;
        IF a.kind = 'bucket' THEN
            s.spent := NULL;
            s.level := quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at);
        ELSIF a.kind = 'concurrency' AND s.requested <> trunc(s.requested) THEN
            PERFORM quota_internal.fail('invalid_amount',
                format('%s of "%s" is not a whole number of slots', s.requested, a.unit),
                'Concurrency is counted in whole slots.');
        END IF;
        usable := quota_internal.usable(a.kind, a.capacity, headroom);
        s.reason := quota_internal.verdict(a.kind, a.capacity, usable, s.requested, s.spent, s.reserved, s.level);
        IF s.reason IS NOT NULL THEN
            refused := true;
            s.retry_after_s := quota_internal.wait_s(s.reason, a.capacity, usable, s.requested, s.level, a.refill_per_s,
                a.level_at, a.window_end, at, polling_hint_s);
        END IF;
        s.charge_on_expiry := (charge OR a.on_expiry = 'charge') AND a.kind <> 'concurrency';
        standings := standings || s;
        -- The next account starts from a clean row but for the id it is compared with.
        s.level := NULL;
        s.window_start := NULL;
        s.window_end := NULL;
        s.retry_after_s := NULL;
    END LOOP;
    standings := coalesce(standings, '{}');
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

-- What a reservation's accounts show after the hold: the limit columns of a grant and of its replays.
CREATE OR REPLACE FUNCTION quota_internal.with_hold(standings quota_internal.standing[]) RETURNS quota_internal.standing[]
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    i integer;
BEGIN
    FOR i IN 1 .. cardinality(standings) LOOP
        IF standings[i].kind = 'bucket' THEN
            standings[i].level := standings[i].level - standings[i].requested;
        END IF;
        standings[i].reserved := standings[i].reserved + standings[i].requested;
    END LOOP;
    RETURN standings;
END
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

CREATE OR REPLACE FUNCTION quota_internal.is_known(tenant text, id uuid) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN id IS NOT NULL AND EXISTS (
        SELECT FROM quota_internal.reservations r WHERE r.tenant = is_known.tenant AND r.id = is_known.id);
END
$$;

-- The units of the hold: those asked for, and 1 for each of the two that count by themselves where a limit covers them.
CREATE OR REPLACE FUNCTION quota_internal.with_implied(costs jsonb, covered text[], units text[]) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN covered <@ units OR covered IS NULL THEN costs ELSE
        costs
        || CASE WHEN 'requests' = ANY (covered) AND 'requests' <> ALL (units) THEN '{"requests": 1}' ELSE '{}' END::jsonb
        || CASE WHEN 'concurrency' = ANY (covered) AND 'concurrency' <> ALL (units) THEN '{"concurrency": 1}' ELSE '{}' END::jsonb
    END
$$;

-- Standings as the lines of a reservation.
CREATE OR REPLACE FUNCTION quota_internal.lines_of(
    standings quota_internal.standing[],
    OUT accounts bigint[], OUT windows timestamptz[], OUT held numeric[], OUT booked numeric[], OUT charged boolean[]
)
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    s quota_internal.standing;
BEGIN
    accounts := '{}';
    windows := '{}';
    held := '{}';
    booked := '{}';
    charged := '{}';
    FOREACH s IN ARRAY standings LOOP
        accounts := accounts || s.account;
        windows := windows || s.window_start;
        held := held || s.requested;
        booked := booked || 0::numeric;
        charged := charged || s.charge_on_expiry;
    END LOOP;
END
$$;

-- Takes what was judged to fit from the locked accounts: opens windows, moves buckets to the present, adds the hold.
CREATE OR REPLACE FUNCTION quota_internal.take(
    tenant text, standings quota_internal.standing[], at timestamptz, expires_at timestamptz, next_expiry timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE quota_internal.accounts a
    SET spent = quota_internal.in_window(a.spent, a.window_end, take.at),
        reserved = quota_internal.in_window(a.reserved, a.window_end, take.at) + s.requested,
        level = CASE WHEN a.kind = 'bucket' THEN greatest(0, s.level - s.requested) END,
        level_at = greatest(a.level_at, CASE a.kind WHEN 'bucket' THEN take.at END),
        window_start = s.window_start,
        window_end = s.window_end,
        earliest_expiry = least(
            CASE WHEN a.earliest_expiry <= take.at THEN take.next_expiry ELSE a.earliest_expiry END, take.expires_at)
    FROM unnest(take.standings) s
    WHERE a.tenant = take.tenant AND a.id = s.account;
END
$$;

-- The answer for an id that is known already; null when it is not. An overdue hold met here is closed first.
CREATE OR REPLACE FUNCTION quota_internal.replay(tenant text, id uuid, subject text, also text[], costs jsonb) RETURNS quota.decision
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.reservations;
    d quota.decision;
    differs text;
BEGIN
    SELECT * INTO r FROM quota_internal.reservations x WHERE x.tenant = replay.tenant AND x.id = replay.id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF r.state = 'held' AND (r.expires_at <= quota_internal.clock() OR quota_internal.snapshot_is_old()) THEN
        PERFORM quota_internal.expire(replay.tenant, ARRAY[replay.id]);
        SELECT * INTO r FROM quota_internal.reservations x WHERE x.tenant = replay.tenant AND x.id = replay.id;
    END IF;
    differs := CASE
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

-- Where the accounts of an open hold stand now, each with what the hold asks of it.
CREATE OR REPLACE FUNCTION quota_internal.standings_of(r quota_internal.reservations) RETURNS quota_internal.standing[]
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := quota_internal.clock();
    accounts quota_internal.accounts[];
    standings quota_internal.standing[];
    i integer;
BEGIN
    SELECT array_agg(a ORDER BY a.subject, a.limit_name) INTO accounts
    FROM quota_internal.accounts a
    WHERE a.tenant = r.tenant AND a.id = ANY (r.line_accounts);
    SELECT j.standings INTO standings
    FROM quota_internal.judge(quota_internal.discount(coalesce(accounts, '{}'), at),
        ARRAY(SELECT jsonb_object_keys(r.held)), ARRAY(SELECT value::numeric FROM jsonb_each(r.held)),
        r.headroom, at, 1, false) j;
    FOR i IN 1 .. cardinality(standings) LOOP
        standings[i].reason := NULL;
        standings[i].retry_after_s := NULL;
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

-- Locks accounts in the one order and returns them as they are once locked; earliest is when the first of their holds may expire.
CREATE OR REPLACE FUNCTION quota_internal.lock_accounts(
    tenant text, ids bigint[], OUT accounts quota_internal.accounts[], OUT earliest timestamptz
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    SELECT array_agg(x), min(x.earliest_expiry) FILTER (WHERE x.reserved > 0) INTO accounts, earliest
    FROM (
        SELECT a.* FROM quota_internal.accounts a
        WHERE a.tenant = lock_accounts.tenant AND a.id = ANY (lock_accounts.ids)
        ORDER BY a.subject, a.limit_name
        FOR NO KEY UPDATE
    ) x;
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

-- The subjects of these lineages, each once.
CREATE OR REPLACE FUNCTION quota_internal.lineages(tenant text, subjects text[]) RETURNS text[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(DISTINCT l.name)
    FROM quota_internal.subjects s CROSS JOIN unnest(s.lineage) l(name)
    WHERE s.tenant = lineages.tenant AND s.name = ANY (lineages.subjects)
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
    d quota.decision;
    units text[];
    amounts numeric[];
    by_value jsonb;
    subjects text[] := ARRAY[reserve.subject];
    r quota_internal.resolution;
    at timestamptz;
    standings quota_internal.standing[];
    refused boolean;
    locked quota_internal.accounts[];
    earliest timestamptz;
    next_expiry timestamptz;
BEGIN
    PERFORM quota_internal.require_hold_arguments(reserve.ttl, reserve.headroom, reserve.on_expiry, reserve.details);
    SELECT c.units, c.amounts, c.by_value INTO units, amounts, by_value FROM quota_internal.parse_costs(reserve.costs) c;
    IF reserve.also IS DISTINCT FROM '{}' THEN
        also := quota_internal.others(reserve.also, reserve.subject);
        subjects := subjects || also;
    END IF;

    FOR attempt IN 1 .. 100 LOOP
        IF reserve.id IS NOT NULL THEN
            d := quota_internal.replay(reserve.tenant, reserve.id, reserve.subject, also, by_value);
            IF d.reservation IS NOT NULL THEN
                RETURN d;
            END IF;
        END IF;

        r := quota_internal.resolve(reserve.tenant, subjects, units);
        IF r.named < cardinality(subjects) THEN
            PERFORM quota_internal.require_subjects(reserve.tenant, subjects);
            CONTINUE;
        END IF;
        IF reserve.ttl > r.ttl_maximum THEN
            PERFORM quota_internal.require_ttl(reserve.ttl, r.ttl_maximum);
        END IF;
        IF r.unbound THEN
            PERFORM quota_internal.bind(reserve.tenant, quota_internal.lineages(reserve.tenant, subjects));
            CONTINUE;
        END IF;
        IF NOT (units <@ (r.units || ARRAY['requests', 'concurrency'])) THEN
            PERFORM quota_internal.require_covered(reserve.subject, units, coalesce(r.units, '{}'));
        END IF;
        at := quota_internal.clock();
        SELECT j.standings, j.refused INTO standings, refused
        FROM quota_internal.judge(coalesce(r.accounts, '{}'), units, amounts, reserve.headroom, at, r.polling_hint_s,
            reserve.on_expiry IS NOT DISTINCT FROM 'charge') j;
        IF refused OR r.frozen THEN
            IF quota_internal.snapshot_is_old() THEN
                PERFORM FROM quota_internal.tenants t WHERE t.name = reserve.tenant FOR SHARE;
            ELSIF NOT r.frozen AND quota_internal.close_overdue_in_the_way(reserve.tenant, r.accounts, standings, r.ids, at)
                OR quota_internal.is_known(reserve.tenant, reserve.id)
            THEN
                CONTINUE;
            ELSIF NOT r.frozen THEN
                RETURN quota_internal.refusal(standings);
            END IF;
            IF r.frozen THEN
                RETURN quota_internal.frozen_answer(reserve.tenant, subjects);
            END IF;
        END IF;

        SELECT l.accounts, l.earliest INTO locked, earliest FROM quota_internal.lock_accounts(reserve.tenant, r.ids) l;
        at := quota_internal.clock();
        next_expiry := 'infinity';
        IF earliest <= at THEN
            SELECT o.accounts, o.next_expiry INTO locked, next_expiry FROM quota_internal.discount_and_look_ahead(locked, at) o;
        END IF;
        SELECT j.standings, j.refused INTO standings, refused
        FROM quota_internal.judge(coalesce(locked, '{}'), units, amounts, reserve.headroom, at, r.polling_hint_s,
            reserve.on_expiry IS NOT DISTINCT FROM 'charge') j;
        IF refused THEN
            CONTINUE WHEN quota_internal.is_known(reserve.tenant, reserve.id)
                OR r.config_version <> (SELECT t.config_version FROM quota_internal.tenants t WHERE t.name = reserve.tenant);
            RETURN quota_internal.refusal(standings);
        END IF;

        d.reservation := coalesce(reserve.id, quota_internal.uuid_v7());
        d.expires_at := quota_internal.later(at, reserve.ttl);
        INSERT INTO quota_internal.reservations
            (tenant, id, subject, also, costs, held, created_at, expires_at, headroom, details,
             line_accounts, line_windows, line_held, line_booked, line_charged)
        SELECT reserve.tenant, d.reservation, reserve.subject, also, by_value,
            quota_internal.with_implied(by_value, r.units, units), at, d.expires_at, reserve.headroom, reserve.details,
            l.accounts, l.windows, l.held, l.booked, l.charged
        FROM quota_internal.tenants t
        CROSS JOIN quota_internal.lines_of(standings) l
        WHERE t.name = reserve.tenant AND t.config_version = r.config_version
        ON CONFLICT (tenant, id) DO NOTHING;
        -- Nothing inserted: the same id was faster, or a limit, a tier, a lineage or a freeze has changed. Decide anew.
        CONTINUE WHEN NOT FOUND;
        PERFORM quota_internal.take(reserve.tenant, standings, at, d.expires_at, next_expiry);

        d.granted := true;
        d.state := 'held';
        d.replayed := false;
        RETURN quota_internal.conclude(d, quota_internal.with_hold(standings));
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing; no decision after 100 attempts', reserve.tenant),
        HINT = 'Retry with the same id.';
END
$$;
COMMENT ON FUNCTION quota.reserve(text, jsonb, interval, uuid, text[], numeric, text, jsonb, text) IS
    'Holds the worst case of a call before it is made: every limit of every lineage takes it, or none does and the answer says why.';
