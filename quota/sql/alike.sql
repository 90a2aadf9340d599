-- The usual batch, as a process sends it that serves one key: all requests ask the same units of one subject, or close holds on the
-- same accounts. Then these are read, judged by the sums, locked and written once. The functions here do all of a batch, or nothing
-- and return null: then the general way decides.

-- Whether an array of a batch is in order, as require_batch demands. (One expression, so that the usual batch calls nothing.)
CREATE OR REPLACE FUNCTION quota_internal.is_batch(size integer, members anyarray, nullable boolean) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN members IS NULL THEN nullable
        ELSE size <= 10000 AND cardinality(members) = size AND array_ndims(members) = 1 AND array_lower(members, 1) = 1
            AND (nullable OR array_position(members, NULL) IS NULL)
    END
$$;

-- The amount that a member of a cost map says, as a number; null where it says none. Whether it is within bounds says is_amount.
CREATE OR REPLACE FUNCTION quota_internal.exact(value jsonb) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE jsonb_typeof(value)
        WHEN 'number' THEN value::numeric
        WHEN 'string' THEN CASE WHEN length(value #>> '{}') <= 100 AND value #>> '{}' ~ '^[0-9]+(\.[0-9]+)?$'
            THEN (value #>> '{}')::numeric END
    END
$$;

-- Whether an amount fits an account as it stands: nothing has to be opened, closed or discounted before.
CREATE OR REPLACE FUNCTION quota_internal.fits_at_sight(
    kind text, capacity numeric, requested numeric, spent numeric, reserved numeric, level numeric,
    earliest_expiry timestamptz, period text, window_end timestamptz, at timestamptz
) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT quota_internal.verdict(kind, capacity, capacity, requested, spent, reserved, level) IS NULL
        AND (reserved = 0 OR earliest_expiry > at) AND (period IS NULL OR window_end > at)
$$;

-- Grants holds that all fit together. subject, costs and ids are in order as require_batch demands.
CREATE OR REPLACE FUNCTION quota_internal.reserve_alike(
    tenant text, subject text, costs jsonb[], ids uuid[], ttls interval[], details jsonb[]
) RETURNS quota.batch_decision[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    size integer := cardinality(costs);
    first jsonb := costs[1];
    units text[];
    unit_sums numeric[] := '{}';
    seen record;
    a quota_internal.accounts;
    at timestamptz;
    sum numeric;
    in_order boolean;
    accounts bigint[] := '{}';
    line_units text[] := '{}';
    sums numeric[] := '{}';
    windows timestamptz[] := '{}';
    charged boolean[] := '{}';
    nothing numeric[];
    implied jsonb := '{}';
    held jsonb[];
    expires_at timestamptz[];
    written integer;
    standings quota_internal.standing[] := '{}';
    d quota.decision;
BEGIN
    SELECT t.config_version, t.ttl_maximum,
        ARRAY(
            SELECT a FROM quota_internal.accounts a
            WHERE a.tenant = reserve_alike.tenant AND a.subject = ANY (n.lineage) AND a.in_force
                AND (first ? a.unit OR a.unit IN ('requests', 'concurrency') OR a.required)
            ORDER BY a.subject, a.limit_name) AS accounts
    INTO seen
    FROM quota_internal.tenants t
    JOIN quota_internal.subjects n ON n.tenant = reserve_alike.tenant AND n.name = reserve_alike.subject AND NOT n.retired
    WHERE t.name = reserve_alike.tenant AND jsonb_typeof(first) = 'object'
        AND NOT EXISTS (
            SELECT FROM quota_internal.subjects s
            WHERE s.tenant = reserve_alike.tenant AND s.name = ANY (n.lineage)
                AND (s.frozen IS NOT NULL OR s.binding_version <> t.binding_version))
        AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> reserve_alike.tenant);
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;

    units := ARRAY(SELECT jsonb_object_keys(first));
    SELECT array_agg(coalesce(q.id, quota_internal.uuid_v7()) ORDER BY q.n), array_agg(coalesce(q.ttl, '10 minutes') ORDER BY q.n),
        bool_and(q.costs - units = '{}' AND coalesce(q.ttl, '10 minutes') > '0'
            AND coalesce(q.ttl, '10 minutes') <= seen.ttl_maximum AND coalesce(jsonb_typeof(q.details) = 'object', true))
    INTO ids, ttls, in_order
    FROM unnest(costs, ids, ttls, details) WITH ORDINALITY q(costs, id, ttl, details, n);
    FOR i IN 1 .. cardinality(units) LOOP
        EXIT WHEN NOT in_order;
        -- Costs by value, unit for unit.
        SELECT array_agg(x.costs || jsonb_build_object(units[i], x.amount) ORDER BY x.n), sum(x.amount),
            bool_and(coalesce(quota_internal.is_amount(x.amount), false))
        INTO costs, sum, in_order
        FROM (
            SELECT q.costs, quota_internal.exact(q.costs -> units[i]) AS amount, q.n
            FROM unnest(costs) WITH ORDINALITY q(costs, n)
            OFFSET 0
        ) x;
        unit_sums := unit_sums || sum;
    END LOOP;
    IF NOT in_order THEN
        RETURN NULL;
    END IF;

    at := quota_internal.clock();
    FOREACH a IN ARRAY seen.accounts LOOP
        sum := unit_sums[array_position(units, a.unit)];
        IF sum IS NULL AND a.unit IN ('requests', 'concurrency') THEN
            sum := size;
            implied := implied || jsonb_build_object(a.unit, 1);
        ELSIF sum IS NULL OR a.kind = 'concurrency' THEN
            -- A required unit is missing; or slots are asked for by number, and each must be whole.
            RETURN NULL;
        END IF;
        IF NOT quota_internal.fits_at_sight(a.kind, a.capacity, sum, a.spent, a.reserved,
            CASE WHEN a.kind = 'bucket' THEN quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at) END,
            a.earliest_expiry, a.period, a.window_end, at)
        THEN
            RETURN NULL;
        END IF;
        accounts := accounts || a.id;
        line_units := line_units || a.unit;
        sums := sums || sum;
        windows := windows || a.window_start;
        charged := charged || (a.kind <> 'concurrency' AND a.on_expiry = 'charge');
    END LOOP;
    IF NOT units <@ (line_units || '{requests,concurrency}'::text[]) THEN
        RETURN NULL;
    END IF;
    nothing := array_fill(0::numeric, ARRAY[cardinality(accounts)]);
    held := costs;
    IF implied <> '{}' THEN
        held := ARRAY(SELECT c.costs || implied FROM unnest(costs) WITH ORDINALITY c(costs, n) ORDER BY c.n);
    END IF;

    -- A block that can be left: its locks go with it.
    BEGIN
        PERFORM quota_internal.lock_accounts(tenant, accounts);
        at := quota_internal.clock();
        expires_at := ARRAY(SELECT quota_internal.later(at, x.ttl) FROM unnest(ttls) WITH ORDINALITY x(ttl, n) ORDER BY x.n);
        FOR i IN 1 .. cardinality(accounts) LOOP
            sum := sums[i];
            UPDATE quota_internal.accounts a
            SET reserved = a.reserved + sum,
                level = CASE WHEN a.kind = 'bucket' THEN
                    quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at) - sum END,
                level_at = CASE WHEN a.kind = 'bucket' THEN greatest(a.level_at, at) END,
                earliest_expiry = least(a.earliest_expiry, (SELECT min(x) FROM unnest(expires_at) x))
            WHERE a.tenant = reserve_alike.tenant AND a.id = accounts[i] AND a.window_start IS NOT DISTINCT FROM windows[i]
                AND quota_internal.fits_at_sight(a.kind, a.capacity, sum, a.spent, a.reserved,
                    CASE WHEN a.kind = 'bucket' THEN
                        quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at) END,
                    a.earliest_expiry, a.period, a.window_end, at)
            RETURNING a.* INTO a;
            IF NOT FOUND THEN
                RAISE EXCEPTION USING ERRCODE = 'QT099';
            END IF;
            standings := standings || ROW(a.id, a.subject, a.limit_name, a.unit, a.kind, a.capacity,
                CASE WHEN a.kind <> 'bucket' THEN a.spent END, a.reserved, a.level, sum, NULL, NULL, a.window_start, a.window_end
                )::quota_internal.standing;
        END LOOP;
        INSERT INTO quota_internal.reservations
            (tenant, id, subject, also, costs, held, created_at, expires_at, headroom, details,
             line_accounts, line_windows, line_held, line_booked, line_charged)
        SELECT reserve_alike.tenant, q.id, reserve_alike.subject, '{}', q.costs, q.held, at, q.expires_at, 0,
            coalesce(q.details, '{}'), accounts, windows,
            CASE cardinality(line_units)
                WHEN 1 THEN ARRAY[(q.held -> line_units[1])::numeric]
                ELSE ARRAY(
                    SELECT (q.held -> u.unit)::numeric FROM unnest(line_units) WITH ORDINALITY u(unit, line) ORDER BY u.line)
            END,
            nothing, charged
        FROM unnest(ids, costs, held, expires_at, details) q(id, costs, held, expires_at, details)
        WHERE seen.config_version = (SELECT t.config_version FROM quota_internal.tenants t WHERE t.name = reserve_alike.tenant)
        ORDER BY q.id;
        GET DIAGNOSTICS written = ROW_COUNT;
        -- Nothing written: a limit, tier, lineage or freeze has changed. Or a rival of an id took its time to fail, and a hold would
        -- be born overdue.
        IF written < size OR quota_internal.clock() >= ANY (expires_at) THEN
            RAISE EXCEPTION USING ERRCODE = 'QT099';
        END IF;
    EXCEPTION WHEN SQLSTATE 'QT099' OR unique_violation THEN
        RETURN NULL;
    END;
    d.granted := true;
    d.replayed := true;  -- the standings have the holds already
    d := quota_internal.conclude(d, standings);
    RETURN ARRAY(
        SELECT ROW(q.n, true, q.id, 'held', q.expires_at, false, NULL, d.limit_subject, d.limit_name, d.unit, d.capacity, d.spent,
            d.reserved, (q.held -> d.unit)::numeric, NULL, d.remaining, '[]', NULL, NULL, NULL, NULL)::quota.batch_decision
        FROM unnest(ids, held, expires_at) WITH ORDINALITY q(id, held, expires_at, n)
        ORDER BY q.n);
END
$$;

-- Settles open holds of which none exceeds what it holds. ids and costs are in order as require_batch demands.
CREATE OR REPLACE FUNCTION quota_internal.settle_alike(
    tenant text, ids uuid[], costs jsonb[], outcomes text[], details jsonb[]
) RETURNS quota.batch_settlement[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    size integer := cardinality(ids);
    given text[] := '{}';
    holds record;
    asked record;
    booked record;
    a quota_internal.accounts;
    at timestamptz;
    totals jsonb[];
    in_order boolean;
    booked_accounts bigint[] := '{}';
    booked_windows timestamptz[] := '{}';
    booked_units text[] := '{}';     -- of the lines; null for slots, which are never booked
    line_frees numeric[] := '{}';         -- by line
    line_books numeric[] := '{}';
    i integer;
BEGIN
    -- The rows in the one order, locked, as whoever settles does.
    SELECT count(*) AS count, bool_and(r.state = 'held' AND r.booked = '{}') AS open, min(r.expires_at) AS expires_at,
        min(r.line_accounts) AS accounts, max(r.line_accounts) AS last_accounts,
        min(r.line_windows) AS windows, max(r.line_windows) AS last_windows,
        array_agg(r.id ORDER BY r.id) AS ids, array_agg(r.subject ORDER BY r.id) AS subjects, array_agg(r.held ORDER BY r.id) AS held
    INTO holds
    FROM (
        SELECT x.* FROM quota_internal.reservations x
        WHERE x.tenant = settle_alike.tenant AND x.id = ANY (settle_alike.ids)
            AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> settle_alike.tenant)
        ORDER BY x.id
        FOR NO KEY UPDATE
    ) r;
    at := quota_internal.clock();
    IF holds.count < size OR NOT holds.open OR holds.expires_at <= at OR holds.accounts <> holds.last_accounts
        OR holds.windows <> holds.last_windows
    THEN
        RETURN NULL;
    END IF;

    SELECT array_agg(q.costs ORDER BY q.id) AS costs, array_agg(coalesce(q.outcome, 'ok') ORDER BY q.id) AS outcomes,
        array_agg(coalesce(q.details, '{}') ORDER BY q.id) AS details,
        bool_and(coalesce(q.outcome, 'ok') IN ('ok', 'error', 'timeout', 'cancelled')
            AND coalesce(jsonb_typeof(q.details) = 'object', true)) AS in_order
    INTO asked
    FROM unnest(ids, costs, outcomes, details) WITH ORDINALITY q(id, costs, outcome, details, n);
    totals := holds.held;
    in_order := asked.in_order;
    IF costs IS NOT NULL THEN
        given := ARRAY(SELECT jsonb_object_keys(CASE jsonb_typeof(costs[1]) WHEN 'object' THEN costs[1] ELSE '{}' END));
        -- Members that say nothing, or something of other units.
        in_order := in_order AND given <> '{}' AND 'concurrency' <> ALL (given)
            AND NOT EXISTS (SELECT FROM unnest(costs) c WHERE (c - given = '{}') IS NOT TRUE);
    END IF;
    FOR i IN 1 .. cardinality(given) LOOP
        EXIT WHEN NOT in_order;
        SELECT array_agg(x.held || jsonb_build_object(given[i], x.amount) ORDER BY x.n),
            bool_and(coalesce(quota_internal.is_amount(x.amount) AND x.amount <= (x.held -> given[i])::numeric, false))
        INTO totals, in_order
        FROM (
            SELECT q.held, quota_internal.exact(q.costs -> given[i]) AS amount, q.n
            FROM unnest(totals, asked.costs) WITH ORDINALITY q(held, costs, n)
            OFFSET 0
        ) x;
    END LOOP;
    IF NOT in_order THEN
        RETURN NULL;
    END IF;

    FOREACH a IN ARRAY ARRAY(
        SELECT x FROM quota_internal.accounts x WHERE x.tenant = settle_alike.tenant AND x.id = ANY (holds.accounts))
    LOOP
        i := array_position(holds.accounts, a.id);
        line_frees[i] := (SELECT sum((h -> a.unit)::numeric) FROM unnest(holds.held) h);
        IF a.kind = 'concurrency' THEN
            line_books[i] := 0;
            booked_units[i] := NULL;
            CONTINUE;
        END IF;
        SELECT sum(x.amount) AS amount, min(x.amount) AS least INTO booked
        FROM (SELECT (t -> a.unit)::numeric AS amount FROM unnest(totals) t) x;
        IF booked.least = 0 THEN
            -- A line without an amount has no place in an entry.
            RETURN NULL;
        END IF;
        line_books[i] := booked.amount;
        booked_units[i] := a.unit;
    END LOOP;
    FOR i IN 1 .. cardinality(booked_units) LOOP
        IF booked_units[i] IS NOT NULL THEN
            booked_accounts := booked_accounts || holds.accounts[i];
            booked_windows := booked_windows || holds.windows[i];
        END IF;
    END LOOP;
    IF cardinality(line_frees) < cardinality(holds.accounts) OR booked_accounts = '{}' THEN
        -- Several lines of one account; or nothing to book.
        RETURN NULL;
    END IF;

    INSERT INTO quota_internal.entries (tenant, at, kind, reservation, subject, line_accounts, line_windows, line_amounts)
    SELECT settle_alike.tenant, at, 'settle', q.id, q.subject, booked_accounts, booked_windows,
        CASE
            WHEN cardinality(booked_units) = 1 THEN ARRAY[(q.totals -> booked_units[1])::numeric]
            ELSE ARRAY(
                SELECT (q.totals -> u.unit)::numeric FROM unnest(booked_units) WITH ORDINALITY u(unit, line)
                WHERE u.unit IS NOT NULL ORDER BY u.line)
        END
    FROM unnest(holds.ids, holds.subjects, totals) q(id, subject, totals);
    UPDATE quota_internal.reservations r
    SET state = 'settled',
        booked = q.totals,
        line_booked = CASE
            WHEN cardinality(booked_units) = 1 THEN ARRAY[(q.totals -> booked_units[1])::numeric]
            ELSE ARRAY(
                SELECT coalesce((q.totals -> u.unit)::numeric, 0) FROM unnest(booked_units) WITH ORDINALITY u(unit, line)
                ORDER BY u.line)
        END,
        closed_at = at,
        outcome = q.outcome,
        details = CASE WHEN q.details = '{}' THEN r.details ELSE r.details || q.details END
    FROM unnest(holds.ids, totals, asked.outcomes, asked.details) q(id, totals, outcome, details)
    WHERE r.tenant = settle_alike.tenant AND r.id = q.id;

    -- The accounts, which everybody wants, last and for a moment only.
    PERFORM quota_internal.lock_accounts(tenant, holds.accounts);
    at := quota_internal.clock();
    FOREACH a IN ARRAY quota_internal.refilled_accounts(ARRAY(
        SELECT x FROM quota_internal.accounts x WHERE x.tenant = settle_alike.tenant AND x.id = ANY (holds.accounts)), tenant, at)
    LOOP
        i := array_position(holds.accounts, a.id);
        -- What was held in a window that has ended meanwhile is no longer counted.
        IF a.window_start IS NOT DISTINCT FROM holds.windows[i] THEN
            a.reserved := a.reserved - line_frees[i];
            a.spent := a.spent + CASE WHEN a.kind = 'budget' THEN line_books[i] ELSE 0 END;
        END IF;
        UPDATE quota_internal.accounts b
        SET spent = a.spent,
            reserved = a.reserved,
            level = CASE WHEN b.kind = 'bucket' THEN quota_internal.clamp(a.level + line_frees[i] - line_books[i], a.capacity) END,
            level_at = CASE WHEN b.kind = 'bucket' THEN greatest(b.level_at, at) END,
            earliest_expiry = CASE WHEN a.reserved = 0 THEN 'infinity' ELSE b.earliest_expiry END
        WHERE b.tenant = settle_alike.tenant AND b.id = a.id;
    END LOOP;
    RETURN ARRAY(
        SELECT ROW(q.n, q.id, 'settled', false, false, '{}', NULL, NULL, NULL, NULL)::quota.batch_settlement
        FROM unnest(ids) WITH ORDINALITY q(id, n) ORDER BY q.n);
END
$$;
