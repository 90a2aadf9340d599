-- settle and release: what becomes of a hold. The totals replace it; what is not used returns at once; what exceeds it is booked.

-- The reservation, locked; an overdue hold is closed first, as the reaper would. Unknown ids are misuse.
CREATE OR REPLACE FUNCTION quota_internal.lock_reservation(tenant text, id uuid) RETURNS quota_internal.reservations
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.reservations;
BEGIN
    SELECT * INTO r FROM quota_internal.reservations x
    WHERE x.tenant = lock_reservation.tenant AND x.id = lock_reservation.id
        AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> lock_reservation.tenant)
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        PERFORM quota_internal.require_tenant(lock_reservation.tenant);
        PERFORM quota_internal.fail('unknown_reservation',
            format('there is no reservation %s in tenant "%s"', coalesce(lock_reservation.id::text, 'null'), lock_reservation.tenant),
            'Pass the id that reserve returned; refused reserves leave none, and closed ones are kept for a limited time.');
    END IF;
    IF r.state = 'held' AND r.expires_at <= quota_internal.clock() THEN
        PERFORM quota_internal.expire(r.tenant, ARRAY[r.id]);
        SELECT * INTO r FROM quota_internal.reservations x
        WHERE x.tenant = lock_reservation.tenant AND x.id = lock_reservation.id;
    END IF;
    RETURN r;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_units_held(r quota_internal.reservations, totals jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    unit text;
BEGIN
    IF totals - ARRAY(SELECT jsonb_object_keys(r.held)) = '{}' THEN
        RETURN;
    END IF;
    SELECT k INTO unit FROM jsonb_object_keys(totals) k WHERE NOT r.held ? k LIMIT 1;
    PERFORM quota_internal.fail('unit_not_held', format('reservation %s does not hold "%s"', r.id, unit),
        format('Settle and adjust the units it was reserved with: %s.',
            (SELECT string_agg(k, ', ' ORDER BY k) FROM jsonb_object_keys(r.held) k)));
END
$$;

-- Slots are whole, whatever their unit is called.
CREATE OR REPLACE FUNCTION quota_internal.require_whole_slots(r quota_internal.reservations, unit text, amount numeric)
RETURNS void
LANGUAGE plpgsql STABLE AS $$
BEGIN
    IF amount <> trunc(amount) AND EXISTS (
        SELECT FROM quota_internal.accounts a
        WHERE a.tenant = r.tenant AND a.id = ANY (r.line_accounts) AND a.kind = 'concurrency'
            AND a.unit = require_whole_slots.unit)
    THEN
        PERFORM quota_internal.fail('invalid_amount', format('%s of "%s" is not a whole number of slots', amount, unit),
            'Concurrency is counted in whole slots.');
    END IF;
END
$$;

-- A correction may not take what a credit has taken back already.
CREATE OR REPLACE FUNCTION quota_internal.require_not_below_credits(r quota_internal.reservations, totals jsonb) RETURNS void
LANGUAGE plpgsql STABLE AS $$
DECLARE
    c record;
BEGIN
    SELECT a.unit, sum(x.credited) AS credited INTO c
    FROM unnest(r.line_accounts, quota_internal.credited(r)) x(account, credited)
    JOIN quota_internal.accounts a ON a.tenant = r.tenant AND a.id = x.account
    GROUP BY a.id, a.unit
    HAVING sum(x.credited) > (totals ->> a.unit)::numeric
    LIMIT 1;
    IF FOUND THEN
        PERFORM quota_internal.fail('total_decreased',
            format('%s of "%s" is below the %s that was credited on reservation %s', totals ->> c.unit, c.unit, c.credited, r.id),
            'What was credited is taken back already: send a total that is not below it.');
    END IF;
END
$$;

-- No total may fall below what is booked already.
CREATE OR REPLACE FUNCTION quota_internal.require_not_decreased(r quota_internal.reservations, totals jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    t record;
BEGIN
    IF r.booked = '{}' THEN
        RETURN;
    END IF;
    FOR t IN SELECT b.key, b.value AS booked, totals -> b.key AS total FROM jsonb_each(r.booked) b LOOP
        IF t.total::numeric < t.booked::numeric THEN
            PERFORM quota_internal.fail('total_decreased',
                format('%s of "%s" is below the %s that reservation %s has booked', t.total, t.key, t.booked, r.id),
                'Totals are of the reservation so far, never steps: send the sum of everything used.');
        END IF;
    END LOOP;
END
$$;

-- Books totals on the accounts of a reservation: the heart of settle, release, late settle and correction.
--   totals      what each unit comes to in all
--   final       nothing stays held
--   open        the hold is open: its lines still hold what is not booked; else they have returned or been charged
--   adds, takes the entry kinds of what is booked up to the hold, beyond it, and of what goes back
-- Lines of one account are filled in their order, each up to what it holds; the last takes the rest.
CREATE OR REPLACE FUNCTION quota_internal.post(
    r quota_internal.reservations, totals jsonb, final boolean, adds text, exceeds text, takes text,
    OUT line_booked numeric[], OUT posted_at timestamptz
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    open boolean := r.state = 'held';
    a quota_internal.accounts;
    version bigint;
    lines integer := cardinality(r.line_accounts);
    i integer;
    rest numeric;
    part numeric;
    before numeric;
    freed numeric;
    capacity numeric;
    refill_per_s numeric;
    ids bigint[] := '{}';
    spents numeric[] := '{}';
    reserveds numeric[] := '{}';
    levels numeric[] := '{}';
    added numeric[];
    exceeded numeric[];
    taken numeric[];
BEGIN
    line_booked := r.line_booked;
    PERFORM quota_internal.lock_accounts(r.tenant, r.line_accounts);
    posted_at := quota_internal.clock();
    IF lines = 0 THEN
        RETURN;
    END IF;
    added := array_fill(0::numeric, ARRAY[lines]);
    exceeded := added;
    taken := added;
    FOR a IN SELECT x.* FROM quota_internal.accounts x WHERE x.tenant = r.tenant AND x.id = ANY (r.line_accounts) LOOP
        rest := (totals ->> a.unit)::numeric;
        IF a.kind = 'bucket' THEN
            version := coalesce(version, (SELECT t.binding_version FROM quota_internal.tenants t WHERE t.name = r.tenant));
            capacity := a.capacity;
            refill_per_s := a.refill_per_s;
            IF a.binding_version <> version THEN
                SELECT n.capacity, n.refill_per_s INTO capacity, refill_per_s FROM quota_internal.numbers_in_force(a) n;
            END IF;
            a.level := quota_internal.refilled(a.level, a.level_at, capacity, refill_per_s, posted_at);
        END IF;
        freed := 0;
        FOR i IN 1 .. lines LOOP
            CONTINUE WHEN r.line_accounts[i] <> a.id;
            before := r.line_booked[i];
            part := rest;
            IF a.id = ANY (r.line_accounts[i + 1 :]) THEN
                part := CASE
                    WHEN open THEN greatest(before, least(rest, r.line_held[i]))
                    ELSE least(rest, greatest(before, r.line_held[i]))
                END;
            END IF;
            rest := rest - part;
            IF open THEN
                freed := greatest(r.line_held[i] - before, 0) - CASE WHEN final THEN 0 ELSE greatest(r.line_held[i] - part, 0) END;
                IF r.line_windows[i] IS NOT DISTINCT FROM a.window_start THEN
                    a.reserved := a.reserved - freed;
                END IF;
            END IF;
            CONTINUE WHEN a.kind = 'concurrency';
            IF a.kind = 'bucket' THEN
                -- An expired hold has been refunded, or charged in full: what comes late only takes.
                a.level := a.level + CASE
                    WHEN open THEN freed - (part - before)
                    WHEN r.state = 'expired' THEN least(before - part, 0)
                    ELSE before - part
                END;
            ELSIF r.line_windows[i] IS NOT DISTINCT FROM a.window_start THEN
                a.spent := a.spent + part - before;
            END IF;
            line_booked[i] := part;
            IF part < before THEN
                taken[i] := before - part;
            ELSE
                exceeded[i] := CASE WHEN exceeds <> adds THEN greatest(part - greatest(before, r.line_held[i]), 0) ELSE 0 END;
                added[i] := part - before - exceeded[i];
            END IF;
        END LOOP;
        ids := ids || a.id;
        spents := spents || a.spent;
        reserveds := reserveds || a.reserved;
        levels := levels || CASE WHEN a.kind = 'bucket' THEN quota_internal.clamp(a.level, capacity) END;
    END LOOP;

    UPDATE quota_internal.accounts b
    SET spent = n.spent,
        reserved = n.reserved,
        level = n.level,
        level_at = greatest(b.level_at, CASE b.kind WHEN 'bucket' THEN posted_at END),
        earliest_expiry = CASE WHEN n.reserved = 0 THEN 'infinity' ELSE b.earliest_expiry END
    FROM unnest(ids, spents, reserveds, levels) n(id, spent, reserved, level)
    WHERE b.tenant = r.tenant AND b.id = n.id;

    PERFORM quota_internal.enter(r, posted_at, adds, added);
    PERFORM quota_internal.enter(r, posted_at, exceeds, exceeded);
    PERFORM quota_internal.enter(r, posted_at, takes, taken);
END
$$;

-- Writes one entry for the lines that have an amount, if any has.
CREATE OR REPLACE FUNCTION quota_internal.enter(
    r quota_internal.reservations, at timestamptz, kind text, amounts numeric[], request uuid DEFAULT NULL, details jsonb DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    entry bigint;
    accounts bigint[] := r.line_accounts;
    windows timestamptz[] := r.line_windows;
    i integer;
BEGIN
    IF NOT (0 < ANY (amounts)) THEN
        RETURN NULL;
    END IF;
    IF NOT (0 < ALL (amounts)) THEN
        FOR i IN REVERSE cardinality(amounts) .. 1 LOOP
            IF amounts[i] = 0 THEN
                accounts := accounts[: i - 1] || accounts[i + 1 :];
                windows := windows[: i - 1] || windows[i + 1 :];
                amounts := amounts[: i - 1] || amounts[i + 1 :];
            END IF;
        END LOOP;
    END IF;
    INSERT INTO quota_internal.entries
        (tenant, at, kind, reservation, subject, line_accounts, line_windows, line_amounts, request, details)
    VALUES (r.tenant, enter.at, enter.kind, r.id, r.subject, accounts, windows, amounts, enter.request, enter.details)
    RETURNING id INTO entry;
    RETURN entry;
END
$$;

-- Per unit, what the totals exceed the hold by.
CREATE OR REPLACE FUNCTION quota_internal.overage(held jsonb, totals jsonb) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    over jsonb;
BEGIN
    IF totals = held THEN
        RETURN '{}';
    END IF;
    SELECT jsonb_object_agg(t.key, trim_scale(t.value::numeric - (held -> t.key)::numeric)::text) INTO over
    FROM jsonb_each(totals) t
    WHERE t.value::numeric > (held -> t.key)::numeric;
    RETURN coalesce(over, '{}');
END
$$;

CREATE OR REPLACE FUNCTION quota.settle(
    id uuid,
    costs jsonb DEFAULT NULL,
    final boolean DEFAULT true,
    outcome text DEFAULT 'ok',
    details jsonb DEFAULT '{}',
    tenant text DEFAULT 'default',
    OUT state text, OUT late boolean, OUT replayed boolean, OUT overage jsonb
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.reservations;
    given jsonb;
    totals jsonb;
    posted record;
    kinds text[];
BEGIN
    PERFORM quota_internal.require_settle_arguments(settle.costs, settle.final, settle.outcome, settle.details);
    IF settle.costs IS NOT NULL THEN
        given := (quota_internal.parse_costs(settle.costs)).by_value;
    END IF;
    r := quota_internal.lock_reservation(settle.tenant, settle.id);
    IF given IS NOT NULL THEN
        PERFORM quota_internal.require_units_held(r, given);
        -- Slots are never booked: any final close frees them, whatever is said of them.
        PERFORM quota_internal.require_whole_slots(r, 'concurrency', (given -> 'concurrency')::numeric);
        given := given - 'concurrency';
    END IF;
    -- Units left out: a final settle books their hold, a partial one leaves them as they are.
    totals := CASE WHEN settle.final THEN quota_internal.whole(r) ELSE quota_internal.so_far(r) END || coalesce(given, '{}');
    replayed := false;
    late := r.late;

    IF r.state = 'held' THEN
        PERFORM quota_internal.require_not_decreased(r, totals);
        kinds := ARRAY['settle', 'overage', 'correction_down'];
    ELSIF r.state = 'released' THEN
        PERFORM quota_internal.fail('already_released', format('reservation %s was released at %s', r.id, r.closed_at),
            'Book usage that has no hold with quota.record.');
    ELSIF r.state = 'expired' THEN
        IF NOT settle.final THEN
            PERFORM quota_internal.fail('expired', format('reservation %s expired at %s', r.id, r.expires_at),
                'Settle it finally: late usage is booked in full.');
        END IF;
        PERFORM quota_internal.require_not_decreased(r, totals);
        PERFORM quota_internal.require_not_below_credits(r, totals);
        kinds := ARRAY['late', 'late', 'correction_down'];
        late := true;
    ELSE
        overage := quota_internal.overage(r.held, r.booked);
        state := r.state;
        IF r.outcome IS DISTINCT FROM 'unknown' OR NOT settle.final THEN
            IF settle.final AND totals = r.booked THEN
                replayed := true;
                RETURN;
            END IF;
            PERFORM quota_internal.fail('already_settled',
                format('reservation %s was settled at %s with %s', r.id, r.closed_at, r.booked),
                'The first totals stand; correct them with quota.credit, or quota.record for what was missing.');
        ELSIF settle.outcome = 'unknown' THEN
            replayed := true;
            RETURN;
        END IF;
        PERFORM quota_internal.require_not_below_credits(r, totals);
        kinds := ARRAY['correction_up', 'correction_up', 'correction_down'];
    END IF;

    overage := quota_internal.overage(r.held, totals);
    IF NOT settle.final AND totals = quota_internal.so_far(r) THEN
        state := r.state;
        replayed := true;
        RETURN;
    END IF;
    SELECT * INTO posted FROM quota_internal.post(r, totals, settle.final, kinds[1], kinds[2], kinds[3]);
    state := CASE WHEN settle.final THEN 'settled' ELSE 'held' END;
    UPDATE quota_internal.reservations x
    SET state = settle.state,
        booked = totals,
        partial = CASE WHEN settle.final AND x.state <> 'settled' THEN NULLIF(x.booked, '{}') ELSE x.partial END,
        line_booked = posted.line_booked,
        closed_at = CASE WHEN settle.final THEN posted.posted_at END,
        outcome = CASE WHEN settle.final THEN settle.outcome END,
        late = settle.late,
        details = CASE WHEN settle.details = '{}' THEN x.details ELSE x.details || settle.details END
    WHERE x.tenant = r.tenant AND x.id = r.id;
END
$$;
COMMENT ON FUNCTION quota.settle(uuid, jsonb, boolean, text, jsonb, text) IS
    'Replaces a hold by the true totals. Less: the rest returns at once. More: booked in full and reported as overage.';

CREATE OR REPLACE FUNCTION quota_internal.require_settle_arguments(costs jsonb, final boolean, outcome text, details jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF final AND outcome IN ('ok', 'error', 'timeout', 'cancelled') AND jsonb_typeof(details) = 'object' THEN
        RETURN;
    END IF;
    PERFORM quota_internal.require_details(details);
    IF final IS NULL THEN
        PERFORM quota_internal.fail('invalid_argument', 'final is null', 'Pass true, or false to leave the rest held.');
    ELSIF outcome IS NULL OR outcome NOT IN ('ok', 'error', 'timeout', 'cancelled', 'unknown') THEN
        PERFORM quota_internal.fail('invalid_argument', format('outcome "%s" is unknown', coalesce(left(outcome, 50), 'null')),
            'Pass ok, error, timeout, cancelled or unknown.');
    ELSIF outcome = 'unknown' AND (costs IS NOT NULL OR NOT final) THEN
        PERFORM quota_internal.fail('invalid_argument', 'an unknown outcome books the whole hold and takes no costs',
            'Leave costs out and settle finally; settle once more when the true totals are known.');
    ELSIF NOT final AND costs IS NULL THEN
        PERFORM quota_internal.fail('invalid_costs', 'a settle that is not final needs totals',
            'Send what has been used so far, such as {"tokens": 1200}.');
    END IF;
END
$$;

-- The whole hold by unit: what a unit settles at when nobody says otherwise. Never below what was booked before the final settle.
CREATE OR REPLACE FUNCTION quota_internal.whole(r quota_internal.reservations) RETURNS jsonb
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    before jsonb := CASE WHEN r.state = 'settled' THEN r.partial WHEN r.booked <> '{}' THEN r.booked END;
BEGIN
    IF before IS NULL THEN
        RETURN r.held;
    END IF;
    RETURN r.held || (
        SELECT coalesce(jsonb_object_agg(b.key, b.value), '{}')
        FROM jsonb_each(before) b
        WHERE b.value::numeric > (r.held -> b.key)::numeric);
END
$$;

-- What every unit has booked so far.
CREATE OR REPLACE FUNCTION quota_internal.so_far(r quota_internal.reservations) RETURNS jsonb
LANGUAGE sql IMMUTABLE AS $$
    SELECT coalesce(jsonb_object_agg(h.key, coalesce(r.booked -> h.key, '0')), '{}') FROM jsonb_each(r.held) h
$$;

CREATE OR REPLACE FUNCTION quota.release(
    id uuid,
    details jsonb DEFAULT '{}',
    tenant text DEFAULT 'default',
    OUT state text, OUT replayed boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    r quota_internal.reservations;
    posted record;
BEGIN
    PERFORM quota_internal.require_details(release.details);
    r := quota_internal.lock_reservation(release.tenant, release.id);
    IF r.state = 'settled' THEN
        PERFORM quota_internal.fail('already_settled',
            format('reservation %s was settled at %s with %s', r.id, r.closed_at, r.booked),
            'What is booked stands; correct it with quota.credit.');
    ELSIF r.state <> 'held' THEN
        state := r.state;
        replayed := true;
        RETURN;
    END IF;
    -- What was booked stays: every unit comes to what it has booked so far, and nothing stays held.
    SELECT * INTO posted
    FROM quota_internal.post(r, quota_internal.so_far(r), true, 'settle', 'overage', 'correction_down');
    state := 'released';
    replayed := false;
    UPDATE quota_internal.reservations x
    SET state = 'released',
        closed_at = posted.posted_at,
        details = x.details || release.details
    WHERE x.tenant = r.tenant AND x.id = r.id;
END
$$;
COMMENT ON FUNCTION quota.release(uuid, jsonb, text) IS
    'Returns a hold whose call never left. What partial settles have booked stays booked.';
