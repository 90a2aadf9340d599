-- record and credit: usage that had no hold, and what is taken back.

CREATE OR REPLACE FUNCTION quota.record(
    subject text,
    costs jsonb,
    id uuid DEFAULT NULL,
    also text[] DEFAULT '{}',
    details jsonb DEFAULT '{}',
    tenant text DEFAULT 'default',
    OUT entry bigint, OUT replayed boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    parsed quota_internal.costs;
    subjects text[];
    known quota_internal.reservations;
    j quota_internal.judgement;
    booking quota_internal.reservations;
BEGIN
    PERFORM quota_internal.require_details(record.details);
    parsed := quota_internal.parse_costs(record.costs);
    also := quota_internal.others(record.also, record.subject);
    subjects := record.subject || also;

    FOR attempt IN 1 .. 100 LOOP
        SELECT * INTO known FROM quota_internal.reservations x WHERE x.tenant = record.tenant AND x.id = record.id;
        IF FOUND THEN
            PERFORM quota_internal.require_tenant(record.tenant);
            entry := quota_internal.recorded(known, record.subject, also, parsed.by_value);
            replayed := true;
            RETURN;
        END IF;
        IF quota_internal.snapshot_is_old() THEN
            PERFORM FROM quota_internal.tenants t WHERE t.name = record.tenant FOR SHARE;
        END IF;
        j := quota_internal.judge(record.tenant, subjects, NULL, parsed, 0, false);
        -- A block that can be left: its locks go with it, so that beginning anew holds none.
        BEGIN
            j := quota_internal.judge_locked(record.tenant, j, parsed, 0, false);

            booking.tenant := record.tenant;
            booking.id := coalesce(record.id, quota_internal.uuid_v7());
            booking.subject := record.subject;
            SELECT coalesce(array_agg(s.account), '{}'), coalesce(array_agg(s.window_start), '{}'),
                coalesce(array_agg(s.requested), '{}'), coalesce(array_agg(0::numeric), '{}'), coalesce(array_agg(false), '{}')
            INTO booking.line_accounts, booking.line_windows, booking.line_booked, booking.line_held, booking.line_charged
            FROM unnest(j.standings) s
            WHERE s.kind <> 'concurrency';
            booking.held := quota_internal.with_implied(parsed.by_value,
                j.covered[:2] || array_remove(j.covered[3:], 'concurrency'), parsed.units);
            -- A record is a reservation that is born settled: its id is known from then on, and it can be credited.
            INSERT INTO quota_internal.reservations
                (tenant, id, subject, also, costs, held, booked, state, outcome, created_at, expires_at, closed_at, details,
                 line_accounts, line_windows, line_held, line_booked, line_charged)
            SELECT record.tenant, booking.id, record.subject, also, parsed.by_value, booking.held, booking.held, 'settled', 'record',
                j.at, j.at, j.at, record.details, booking.line_accounts, booking.line_windows, booking.line_held,
                booking.line_booked, booking.line_charged
            FROM quota_internal.tenants t
            WHERE t.name = record.tenant AND t.config_version = j.config_version
            ON CONFLICT (tenant, id) DO NOTHING;
            IF NOT FOUND THEN
                RAISE EXCEPTION USING ERRCODE = 'QT099';
            END IF;
            PERFORM quota_internal.book(record.tenant, j.standings, j.at);
            INSERT INTO quota_internal.entries
                (tenant, at, kind, reservation, subject, line_accounts, line_windows, line_amounts, details)
            VALUES (record.tenant, j.at, 'record', booking.id, record.subject, booking.line_accounts, booking.line_windows,
                booking.line_booked, nullif(record.details, '{}'))
            RETURNING entries.id INTO entry;
            replayed := false;
            RETURN;
        EXCEPTION WHEN SQLSTATE 'QT099' THEN
            NULL;
        END;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing; nothing recorded after 100 attempts', record.tenant),
        HINT = 'Retry with the same id.';
END
$$;
COMMENT ON FUNCTION quota.record(text, jsonb, uuid, text[], jsonb, text) IS
    'Books usage that had no hold, in full: never refused, even beyond a cap or on a frozen subject.';

-- The entry of a record that is known, if it is the same record.
CREATE OR REPLACE FUNCTION quota_internal.recorded(known quota_internal.reservations, subject text, also text[], costs jsonb) RETURNS bigint
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
BEGIN
    IF known.outcome IS DISTINCT FROM 'record' OR known.subject <> recorded.subject OR known.also <> recorded.also
        OR known.costs <> recorded.costs
    THEN
        PERFORM quota_internal.fail('id_conflict',
            format('id %s is known as another %s: subject "%s", also %s, costs %s', known.id,
                CASE WHEN known.outcome = 'record' THEN 'record' ELSE 'reservation' END, known.subject, known.also, known.costs),
            'Use a new id for a new request, or repeat the first one unchanged.');
    END IF;
    RETURN (SELECT e.id FROM quota_internal.entries e
            WHERE e.tenant = known.tenant AND e.reservation = known.id AND e.kind = 'record');
END
$$;

-- Adds to the locked accounts what is booked without a hold; slots are never booked.
CREATE OR REPLACE FUNCTION quota_internal.book(tenant text, standings quota_internal.standing[], at timestamptz) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    UPDATE quota_internal.accounts a
    SET spent = CASE a.kind WHEN 'budget' THEN quota_internal.in_window(a.spent, a.window_end, book.at) + s.requested ELSE 0 END,
        reserved = quota_internal.in_window(a.reserved, a.window_end, book.at),
        level = CASE WHEN a.kind = 'bucket' THEN quota_internal.clamp(s.level - s.requested, a.capacity) END,
        level_at = CASE WHEN a.kind = 'bucket' THEN greatest(a.level_at, book.at) END,
        window_start = s.window_start,
        window_end = s.window_end
    FROM unnest(book.standings) s
    WHERE a.tenant = book.tenant AND a.id = s.account AND a.kind <> 'concurrency';
END
$$;

-- The subjects of `also`: a set, without the subject itself.
CREATE OR REPLACE FUNCTION quota_internal.others(also text[], subject text) RETURNS text[]
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF also = '{}' THEN
        RETURN also;
    END IF;
    IF also IS NULL OR array_position(also, NULL) IS NOT NULL THEN
        PERFORM quota_internal.fail('invalid_argument', 'also is null or has a null in it',
            'Pass the names of further subjects that this cost counts on, or leave it out.');
    END IF;
    RETURN ARRAY(SELECT DISTINCT x.name COLLATE "C" FROM unnest(also) x(name) WHERE x.name <> subject ORDER BY 1);
END
$$;

CREATE OR REPLACE FUNCTION quota.credit(
    reservation uuid,
    costs jsonb,
    reason text,
    id uuid DEFAULT NULL,
    tenant text DEFAULT 'default',
    OUT entry bigint, OUT replayed boolean
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    given jsonb;
    r quota_internal.reservations;
    known quota_internal.entries;
    at timestamptz;
    a quota_internal.accounts;
    credited numeric[];
    amounts numeric[] := '{}';
    rest numeric;
    part numeric;
    i integer;
BEGIN
    PERFORM quota_internal.require_reason(credit.reason);
    given := (quota_internal.parse_costs(credit.costs)).by_value;
    r := quota_internal.lock_reservation(credit.tenant, credit.reservation);
    PERFORM quota_internal.require_units_held(r, given);
    SELECT * INTO known FROM quota_internal.entries e WHERE e.tenant = credit.tenant AND e.request = credit.id;
    IF FOUND THEN
        IF known.reservation <> r.id OR known.details -> 'costs' <> given THEN
            PERFORM quota_internal.fail('id_conflict',
                format('id %s is known as a credit of %s on reservation %s', credit.id, known.details -> 'costs', known.reservation),
                'Use a new id for a new credit, or repeat the first one unchanged.');
        END IF;
        entry := known.id;
        replayed := true;
        RETURN;
    END IF;

    PERFORM quota_internal.lock_accounts(r.tenant, r.line_accounts);
    at := quota_internal.clock();
    credited := quota_internal.credited(r);
    FOR i IN 1 .. cardinality(r.line_accounts) LOOP
        amounts := amounts || 0::numeric;
    END LOOP;
    FOR a IN SELECT x.* FROM quota_internal.accounts x WHERE x.tenant = r.tenant AND x.id = ANY (r.line_accounts) LOOP
        rest := (given -> a.unit)::numeric;
        CONTINUE WHEN rest IS NULL OR a.kind = 'concurrency';
        FOR i IN REVERSE cardinality(r.line_accounts) .. 1 LOOP
            CONTINUE WHEN r.line_accounts[i] <> a.id;
            part := least(rest, r.line_booked[i] - credited[i]);
            amounts[i] := part;
            rest := rest - part;
            IF a.kind = 'budget' AND r.line_windows[i] IS NOT DISTINCT FROM a.window_start THEN
                UPDATE quota_internal.accounts b SET spent = b.spent - part WHERE b.tenant = r.tenant AND b.id = a.id;
            END IF;
        END LOOP;
        IF rest > 0 THEN
            PERFORM quota_internal.fail('amount_out_of_range',
                format('%s of "%s" is more than reservation %s has booked and not been credited yet',
                    given -> a.unit, a.unit, r.id),
                format('At most %s can be taken back.', (given -> a.unit)::numeric - rest));
        END IF;
    END LOOP;
    entry := quota_internal.enter(r, at, 'credit', amounts, credit.id,
        jsonb_build_object('reason', credit.reason, 'costs', given));
    replayed := false;
    -- Touched, so that a second credit from an older snapshot fails instead of missing this one.
    UPDATE quota_internal.reservations x SET details = x.details WHERE x.tenant = r.tenant AND x.id = r.id;
    PERFORM quota_internal.log(r.tenant, 'credit', r.id::text, NULL, given, credit.reason);
END
$$;
COMMENT ON FUNCTION quota.credit(uuid, jsonb, text, uuid, text) IS
    'Takes back at most what a reservation booked, on all its accounts and in the windows it was booked in.';

-- What earlier credits have taken from each line.
CREATE OR REPLACE FUNCTION quota_internal.credited(r quota_internal.reservations) RETURNS numeric[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(coalesce(c.amount, 0) ORDER BY l.n)
    FROM unnest(r.line_accounts, r.line_windows) WITH ORDINALITY l(account, window_start, n)
    LEFT JOIN (
        SELECT x.account, x.window_start, sum(x.amount) AS amount
        FROM quota_internal.entries e
        CROSS JOIN unnest(e.line_accounts, e.line_windows, e.line_amounts) x(account, window_start, amount)
        WHERE e.tenant = r.tenant AND e.reservation = r.id AND e.kind = 'credit'
        GROUP BY x.account, x.window_start
    ) c ON c.account = l.account AND c.window_start IS NOT DISTINCT FROM l.window_start
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_reason(reason text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF reason IS NULL OR btrim(reason) = '' OR length(reason) > 2000 THEN
        PERFORM quota_internal.fail('invalid_argument', 'the reason is empty or longer than 2000 characters',
            'Say why: the reason is kept in the log.');
    END IF;
END
$$;
