-- The ledger proves itself: check() compares every counter with the holds and entries it stands for; repair() rebuilds counters.

-- What an entry does to the amount spent.
CREATE OR REPLACE FUNCTION quota_internal.sign_of(kind text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN kind IN ('credit', 'correction_down') THEN -1 WHEN kind = 'repair' THEN 0 ELSE 1 END
$$;

-- What the counters of every account must read: from open holds and from the entries since the last carried one.
CREATE OR REPLACE FUNCTION quota_internal.expected_counters(tenant text)
RETURNS TABLE (account bigint, reserved numeric, spent numeric)
LANGUAGE sql STABLE AS $$
    SELECT a.id, coalesce(h.amount, 0), coalesce(e.amount, 0)
    FROM quota_internal.accounts a
    LEFT JOIN (
        SELECT l.account, l.window_start, sum(greatest(l.held - l.booked, 0)) AS amount
        FROM quota_internal.reservations r
        CROSS JOIN unnest(r.line_accounts, r.line_windows, r.line_held, r.line_booked) l(account, window_start, held, booked)
        WHERE r.tenant = expected_counters.tenant AND r.state = 'held'
        GROUP BY l.account, l.window_start
    ) h ON h.account = a.id AND h.window_start IS NOT DISTINCT FROM a.window_start
    LEFT JOIN (
        SELECT l.account, l.window_start, sum(l.amount * quota_internal.sign_of(e.kind)) AS amount
        FROM quota_internal.entries e
        CROSS JOIN unnest(e.line_accounts, e.line_windows, e.line_amounts) l(account, window_start, amount)
        WHERE e.tenant = expected_counters.tenant
        GROUP BY l.account, l.window_start
    ) e ON a.kind = 'budget' AND e.account = a.id AND e.window_start IS NOT DISTINCT FROM a.window_start
    WHERE a.tenant = expected_counters.tenant
$$;

-- The violations of one tenant.
CREATE OR REPLACE FUNCTION quota_internal.violations(tenant text)
RETURNS TABLE (invariant text, subject text, limit_name text, expected text, found text)
LANGUAGE sql STABLE AS $$
    SELECT CASE a.kind WHEN 'concurrency' THEN 'slots_match_holds' ELSE 'reserved_matches_holds' END,
        a.subject, a.limit_name, trim_scale(x.reserved)::text, trim_scale(a.reserved)::text
    FROM quota_internal.expected_counters(violations.tenant) x
    JOIN quota_internal.accounts a ON a.tenant = violations.tenant AND a.id = x.account
    WHERE a.reserved <> x.reserved
    UNION ALL
    SELECT 'spent_matches_entries', a.subject, a.limit_name, trim_scale(x.spent)::text, trim_scale(a.spent)::text
    FROM quota_internal.expected_counters(violations.tenant) x
    JOIN quota_internal.accounts a ON a.tenant = violations.tenant AND a.id = x.account
    WHERE a.spent <> x.spent
    UNION ALL
    SELECT 'outcome_matches_entries', coalesce(b.subject, e.subject), a.limit_name,
        format('%s by reservation %s', trim_scale(coalesce(b.booked, 0)), coalesce(b.reservation, e.reservation)),
        trim_scale(coalesce(e.amount, 0))::text
    FROM (
        SELECT r.id AS reservation, r.subject, l.account, l.window_start, l.booked
        FROM quota_internal.reservations r
        CROSS JOIN unnest(r.line_accounts, r.line_windows, r.line_booked) l(account, window_start, booked)
        WHERE r.tenant = violations.tenant
    ) b
    FULL JOIN (
        SELECT e.reservation, min(e.subject) AS subject, l.account, l.window_start,
            sum(l.amount * quota_internal.sign_of(e.kind)) AS amount
        FROM quota_internal.entries e
        CROSS JOIN unnest(e.line_accounts, e.line_windows, e.line_amounts) l(account, window_start, amount)
        WHERE e.tenant = violations.tenant AND e.reservation IS NOT NULL AND e.kind <> 'credit'
        GROUP BY e.reservation, l.account, l.window_start
    ) e ON e.reservation = b.reservation AND e.account = b.account
        AND coalesce(e.window_start, '-infinity') = coalesce(b.window_start, '-infinity')
    LEFT JOIN quota_internal.accounts a ON a.tenant = violations.tenant AND a.id = coalesce(b.account, e.account)
    WHERE coalesce(b.booked, 0) <> coalesce(e.amount, 0)
    UNION ALL
    SELECT 'level_in_range', a.subject, a.limit_name, format('0 to %s', trim_scale(n.capacity)),
        trim_scale(quota_internal.refilled(a.level, a.level_at, n.capacity, n.refill_per_s, quota_internal.clock()))::text
    FROM quota_internal.accounts a
    CROSS JOIN LATERAL quota_internal.numbers_in_force(a) n
    WHERE a.tenant = violations.tenant AND a.kind = 'bucket'
        AND NOT (quota_internal.refilled(a.level, a.level_at, n.capacity, n.refill_per_s, quota_internal.clock())
            BETWEEN 0 AND n.capacity)
    UNION ALL
    SELECT 'nothing_negative', a.subject, a.limit_name, 'at least 0', format('spent %s, reserved %s', a.spent, a.reserved)
    FROM quota_internal.accounts a
    WHERE a.tenant = violations.tenant AND NOT (a.spent >= 0 AND a.reserved >= 0)
    UNION ALL
    SELECT 'accounts_match_limits', f.subject, f.limit_name,
        format('capacity %s, refill %s', trim_scale(f.capacity), trim_scale(f.refill_per_s)),
        format('capacity %s, refill %s', trim_scale(a.capacity), trim_scale(a.refill_per_s))
    FROM quota_internal.tenants t
    JOIN quota_internal.subjects s ON s.tenant = t.name AND s.binding_version = t.binding_version
    JOIN quota_internal.limits_in_force f ON f.tenant = t.name AND f.subject = s.name
    LEFT JOIN quota_internal.accounts a ON a.tenant = t.name AND a.subject = f.subject AND a.limit_name = f.limit_name
    WHERE t.name = violations.tenant
        AND (a.in_force, a.capacity, a.refill_per_s) IS DISTINCT FROM (true, f.capacity, f.refill_per_s)
$$;

CREATE OR REPLACE FUNCTION quota.check(tenant text DEFAULT NULL) RETURNS SETOF quota.violation
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
BEGIN
    IF "check".tenant IS NOT NULL THEN
        PERFORM quota_internal.require_tenant("check".tenant);
    END IF;
    RETURN QUERY
    SELECT t.name, v.invariant, v.subject, v.limit_name, v.expected, v.found
    FROM quota_internal.tenants t
    CROSS JOIN LATERAL quota_internal.violations(t.name) v
    WHERE ("check".tenant IS NULL OR t.name = "check".tenant)
        AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> t.name)
    ORDER BY 1, 2, 3, 4;
END
$$;
COMMENT ON FUNCTION quota.check(text) IS
    'A row per counter that differs from the holds and entries it stands for; none when the ledger is right. Safe under load.';

CREATE OR REPLACE FUNCTION quota.repair(tenant text DEFAULT 'default')
RETURNS TABLE (subject text, limit_name text, counter text, was numeric, is_now numeric)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    wrong record;
BEGIN
    PERFORM quota_internal.require_tenant(repair.tenant);
    PERFORM quota_internal.lock_accounts(repair.tenant, ARRAY(
        SELECT a.id FROM quota_internal.accounts a WHERE a.tenant = repair.tenant));
    FOR wrong IN
        SELECT a.id, a.subject, a.limit_name, a.spent, a.reserved, a.window_start, x.spent AS spent_now, x.reserved AS reserved_now
        FROM quota_internal.expected_counters(repair.tenant) x
        JOIN quota_internal.accounts a ON a.tenant = repair.tenant AND a.id = x.account
        WHERE a.spent <> x.spent OR a.reserved <> x.reserved
        ORDER BY a.subject, a.limit_name
    LOOP
        IF wrong.spent_now < 0 THEN
            RAISE EXCEPTION USING ERRCODE = 'data_corrupted',
                MESSAGE = format('the entries of "%s" "%s" sum to %s', wrong.subject, wrong.limit_name, wrong.spent_now),
                HINT = 'The ledger itself is damaged; restore it from a backup before anything else.';
        END IF;
        UPDATE quota_internal.accounts a
        SET spent = wrong.spent_now, reserved = wrong.reserved_now
        WHERE a.tenant = repair.tenant AND a.id = wrong.id;
        INSERT INTO quota_internal.entries (tenant, at, kind, subject, line_accounts, line_windows, line_amounts, details)
        VALUES (repair.tenant, quota_internal.clock(), 'repair', wrong.subject, ARRAY[wrong.id], ARRAY[wrong.window_start],
            ARRAY[0::numeric], jsonb_build_object(
                'spent', wrong.spent::text, 'spent_now', wrong.spent_now::text,
                'reserved', wrong.reserved::text, 'reserved_now', wrong.reserved_now::text));
        subject := wrong.subject;
        limit_name := wrong.limit_name;
        IF wrong.spent <> wrong.spent_now THEN
            counter := 'spent';
            was := wrong.spent;
            is_now := wrong.spent_now;
            RETURN NEXT;
        END IF;
        IF wrong.reserved <> wrong.reserved_now THEN
            counter := 'reserved';
            was := wrong.reserved;
            is_now := wrong.reserved_now;
            RETURN NEXT;
        END IF;
    END LOOP;
    PERFORM quota_internal.log(repair.tenant, 'repair', repair.tenant, NULL, NULL, NULL);
END
$$;
COMMENT ON FUNCTION quota.repair(text) IS
    'Rebuilds spent and reserved from the ledger in one transaction and enters each change; bucket levels are only reported by check.';
