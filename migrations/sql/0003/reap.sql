-- Expiry. A hold is expired from expires_at on, swept or not: decisions discount overdue holds, and whoever is in their way, or
-- the reaper, closes them. Everything here depends on the reservation's row alone.

-- What overdue holds have in these windows of accounts: it returns (released) or counts as spent (charged).
CREATE OR REPLACE FUNCTION quota_internal.overdue(
    tenant text, ids bigint[], windows timestamptz[], since timestamptz, at timestamptz
)
RETURNS TABLE (account bigint, released numeric, charged numeric)
LANGUAGE sql STABLE AS $$
    SELECT a.id,
        coalesce(sum(greatest(l.held - l.booked, 0)) FILTER (WHERE NOT l.charged), 0),
        coalesce(sum(greatest(l.held - l.booked, 0)) FILTER (WHERE l.charged), 0)
    FROM quota_internal.reservations r
    CROSS JOIN unnest(r.line_accounts, r.line_windows, r.line_held, r.line_booked, r.line_charged)
        l(account, window_start, held, booked, charged)
    JOIN unnest(ids, windows) a(id, window_start) ON a.id = l.account
        AND l.window_start IS NOT DISTINCT FROM a.window_start
    WHERE r.tenant = overdue.tenant AND r.state = 'held' AND r.expires_at >= overdue.since AND r.expires_at <= overdue.at
        AND r.line_accounts && overdue.ids
    GROUP BY a.id
$$;

-- Accounts as they would read if every overdue hold had been closed. For a decision the refund of a bucket counts only once it
-- is swept, so that it cannot be given out twice; what people read includes it.
CREATE OR REPLACE FUNCTION quota_internal.discount(
    accounts quota_internal.accounts[], at timestamptz, refund_buckets boolean DEFAULT true
) RETURNS quota_internal.accounts[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    a quota_internal.accounts;
    since timestamptz;
    o record;
    i integer;
BEGIN
    FOREACH a IN ARRAY accounts LOOP
        IF a.reserved > 0 AND a.earliest_expiry <= at THEN
            since := least(since, a.earliest_expiry);
        END IF;
    END LOOP;
    IF since IS NULL THEN
        RETURN accounts;
    END IF;
    FOR o IN
        SELECT * FROM quota_internal.overdue(a.tenant, ARRAY(SELECT x.id FROM unnest(accounts) x),
            ARRAY(SELECT x.window_start FROM unnest(accounts) x), since, at)
    LOOP
        FOR i IN 1 .. cardinality(accounts) LOOP
            IF accounts[i].id = o.account THEN
                accounts[i].reserved := accounts[i].reserved - o.released - o.charged;
                IF accounts[i].kind = 'budget' THEN
                    accounts[i].spent := accounts[i].spent + o.charged;
                ELSIF accounts[i].kind = 'bucket' AND refund_buckets THEN
                    a := accounts[i];
                    a.level := quota_internal.clamp(
                        quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at) + o.released, a.capacity);
                    a.level_at := greatest(a.level_at, at);
                    accounts[i] := a;
                END IF;
            END IF;
        END LOOP;
    END LOOP;
    RETURN accounts;
END
$$;

-- Whether so few overdue holds lie about that every answer can afford to count them as their expiry will book them. Where a reaper
-- has much to do, answers show what is stored: overdue holds still count as held there. A decision never depends on it.
CREATE OR REPLACE FUNCTION quota_internal.few_overdue(tenant text, at timestamptz) RETURNS boolean
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN 20 >= (
        SELECT count(*)
        FROM (
            SELECT FROM quota_internal.reservations r
            WHERE r.tenant = few_overdue.tenant AND r.state = 'held' AND r.expires_at <= few_overdue.at
            LIMIT 21
        ) x);
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.next_expiry(tenant text, at timestamptz) RETURNS timestamptz
LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce(
        (SELECT r.expires_at FROM quota_internal.reservations r
         WHERE r.tenant = next_expiry.tenant AND r.state = 'held' AND r.expires_at > next_expiry.at
         ORDER BY r.expires_at LIMIT 1),
        'infinity');
END
$$;

-- Before a refusal: closes overdue holds of the accounts that refuse, oldest first, as the reaper would. True if it closed any.
-- All accounts that the caller is about to lock are locked together with those of the holds, in the one order. A caller that has
-- locks already says which it must not wait for.
CREATE OR REPLACE FUNCTION quota_internal.close_overdue_in_the_way(
    tenant text, standings quota_internal.standing[], ids bigint[], at timestamptz,
    wait_for_rows boolean DEFAULT true, wait_for_accounts boolean DEFAULT true
) RETURNS boolean
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    in_the_way bigint[];
    since timestamptz;
    overdue uuid[];
    seen bigint;
BEGIN
    SELECT array_agg(a.id), min(a.earliest_expiry) INTO in_the_way, since
    FROM unnest(standings) s
    JOIN quota_internal.accounts a ON a.tenant = close_overdue_in_the_way.tenant AND a.id = s.account
    WHERE s.reason IS NOT NULL AND s.reserved > 0 AND a.earliest_expiry <= close_overdue_in_the_way.at;
    IF in_the_way IS NULL THEN
        RETURN false;
    END IF;
    SELECT array_agg(r.id) INTO overdue
    FROM (
        SELECT r.id FROM quota_internal.reservations r
        WHERE r.tenant = close_overdue_in_the_way.tenant AND r.state = 'held' AND r.expires_at >= since AND r.expires_at <= at
            AND r.line_accounts && in_the_way
            -- Only what still holds something in the window that refuses.
            AND EXISTS (
                SELECT FROM unnest(r.line_accounts, r.line_windows, r.line_held, r.line_booked)
                    l(account, window_start, held, booked)
                JOIN quota_internal.accounts a ON a.tenant = r.tenant AND a.id = l.account
                    AND l.window_start IS NOT DISTINCT FROM a.window_start
                WHERE l.account = ANY (in_the_way) AND l.held > l.booked)
        ORDER BY r.expires_at
        LIMIT 1000
    ) r;
    IF overdue IS NOT NULL THEN
        PERFORM quota_internal.expire(close_overdue_in_the_way.tenant, overdue, ids, wait_for_rows, wait_for_accounts);
        RETURN true;
    END IF;
    SELECT count(*) INTO seen
    FROM (
        SELECT FROM quota_internal.reservations r
        WHERE r.tenant = close_overdue_in_the_way.tenant AND r.state = 'held' AND r.expires_at >= since AND r.expires_at <= at
        LIMIT 50
    ) x;
    IF seen = 50 THEN
        PERFORM quota_internal.note_next_expiry(close_overdue_in_the_way.tenant, in_the_way);
    END IF;
    RETURN false;
END
$$;

-- Overdue holds of others lie about and this search has to step over them every time: note once, under the accounts' locks, how
-- far there is nothing of theirs. Rows that somebody else has locked are left for another time.
CREATE OR REPLACE FUNCTION quota_internal.note_next_expiry(tenant text, ids bigint[]) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    locked bigint[];
    at timestamptz;
BEGIN
    SELECT array_agg(x.id) INTO locked
    FROM (
        SELECT a.id FROM quota_internal.accounts a
        WHERE a.tenant = note_next_expiry.tenant AND a.id = ANY (note_next_expiry.ids)
        ORDER BY a.subject, a.limit_name
        FOR NO KEY UPDATE SKIP LOCKED
    ) x;
    at := quota_internal.clock();
    IF locked IS NULL OR EXISTS (
        SELECT FROM quota_internal.reservations r
        WHERE r.tenant = note_next_expiry.tenant AND r.state = 'held' AND r.expires_at <= at AND r.line_accounts && locked)
    THEN
        RETURN;
    END IF;
    UPDATE quota_internal.accounts a
    SET earliest_expiry = quota_internal.next_expiry(note_next_expiry.tenant, at)
    WHERE a.tenant = note_next_expiry.tenant AND a.id = ANY (locked);
END
$$;

-- Locks these holds, if they are open and overdue, by id. Returns those to close.
CREATE OR REPLACE FUNCTION quota_internal.lock_due(tenant text, ids uuid[], wait boolean) RETURNS uuid[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    at timestamptz := quota_internal.clock();
BEGIN
    IF wait THEN
        RETURN ARRAY(
            SELECT r.id FROM quota_internal.reservations r
            WHERE r.tenant = lock_due.tenant AND r.id = ANY (lock_due.ids) AND r.state = 'held' AND r.expires_at <= at
            ORDER BY r.id
            FOR NO KEY UPDATE);
    END IF;
    RETURN ARRAY(
        SELECT r.id FROM quota_internal.reservations r
        WHERE r.tenant = lock_due.tenant AND r.id = ANY (lock_due.ids) AND r.state = 'held' AND r.expires_at <= at
        ORDER BY r.id
        FOR NO KEY UPDATE SKIP LOCKED);
END
$$;

-- Those of the holds whose accounts are all free: they are locked, without waiting for any.
CREATE OR REPLACE FUNCTION quota_internal.with_free_accounts(tenant text, due uuid[], also_lock bigint[]) RETURNS uuid[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    locked bigint[] := ARRAY(
        SELECT a.id FROM quota_internal.accounts a
        WHERE a.tenant = with_free_accounts.tenant AND a.id = ANY (ARRAY(
            SELECT l.account FROM quota_internal.reservations r CROSS JOIN unnest(r.line_accounts) l(account)
            WHERE r.tenant = with_free_accounts.tenant AND r.id = ANY (due)
            UNION SELECT unnest(also_lock)))
        ORDER BY a.subject, a.limit_name
        FOR NO KEY UPDATE SKIP LOCKED);
BEGIN
    RETURN ARRAY(
        SELECT r.id FROM quota_internal.reservations r
        WHERE r.tenant = with_free_accounts.tenant AND r.id = ANY (due) AND r.line_accounts <@ locked);
END
$$;

-- Closes these holds if they are open and overdue: what is left of each returns, or is booked where its line says so. The accounts,
-- which everybody wants, are locked last and for a moment only: what becomes of a hold depends on its own row.
CREATE OR REPLACE FUNCTION quota_internal.expire(
    tenant text, ids uuid[], also_lock bigint[] DEFAULT '{}', wait_for_rows boolean DEFAULT true,
    wait_for_accounts boolean DEFAULT true, OUT released bigint, OUT charged bigint
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    due uuid[] := quota_internal.lock_due(tenant, ids, wait_for_rows);
    at timestamptz := quota_internal.clock();
    accounts bigint[];
    windows timestamptz[];
    returned numeric[];
    booked numeric[];
BEGIN
    released := 0;
    charged := 0;
    IF NOT wait_for_accounts THEN
        due := quota_internal.with_free_accounts(expire.tenant, due, expire.also_lock);
    END IF;
    SELECT array_agg(x.account), array_agg(x.window_start), array_agg(x.returned), array_agg(x.booked)
    INTO accounts, windows, returned, booked
    FROM (
        SELECT l.account, l.window_start,
            coalesce(sum(greatest(l.held - l.booked, 0)) FILTER (WHERE NOT l.charged), 0) AS returned,
            coalesce(sum(greatest(l.held - l.booked, 0)) FILTER (WHERE l.charged), 0) AS booked
        FROM quota_internal.reservations r
        CROSS JOIN unnest(r.line_accounts, r.line_windows, r.line_held, r.line_booked, r.line_charged)
            l(account, window_start, held, booked, charged)
        WHERE r.tenant = expire.tenant AND r.id = ANY (due)
        GROUP BY l.account, l.window_start
    ) x;

    INSERT INTO quota_internal.entries
        (tenant, at, kind, reservation, subject, line_accounts, line_windows, line_amounts)
    SELECT r.tenant, at, 'charge', r.id, r.subject, array_agg(l.account ORDER BY l.n), array_agg(l.window_start ORDER BY l.n),
        array_agg(l.held - l.booked ORDER BY l.n)
    FROM quota_internal.reservations r
    CROSS JOIN unnest(r.line_accounts, r.line_windows, r.line_held, r.line_booked, r.line_charged)
        WITH ORDINALITY l(account, window_start, held, booked, charged, n)
    WHERE r.tenant = expire.tenant AND r.id = ANY (due) AND l.charged AND l.held > l.booked
    GROUP BY r.tenant, r.id, r.subject;
    GET DIAGNOSTICS charged = ROW_COUNT;
    released := cardinality(due) - charged;
    UPDATE quota_internal.reservations r
    SET state = 'expired',
        closed_at = at,
        line_booked = CASE WHEN true = ANY (r.line_charged) THEN ARRAY(
            SELECT CASE WHEN l.charged THEN greatest(l.held, l.booked) ELSE l.booked END
            FROM unnest(r.line_held, r.line_booked, r.line_charged) WITH ORDINALITY l(held, booked, charged, n)
            ORDER BY l.n) ELSE r.line_booked END
    WHERE r.tenant = expire.tenant AND r.id = ANY (due);

    IF wait_for_accounts THEN
        PERFORM quota_internal.lock_accounts(expire.tenant, accounts || expire.also_lock);
    END IF;
    at := greatest(at, quota_internal.clock());
    UPDATE quota_internal.accounts a
    SET reserved = a.reserved - x.returned - x.booked,
        spent = a.spent + CASE a.kind WHEN 'budget' THEN x.booked ELSE 0 END,
        level = CASE WHEN a.kind = 'bucket' THEN quota_internal.clamp(
            quota_internal.refilled(a.level, a.level_at, n.capacity, n.refill_per_s, at) + x.returned, n.capacity) END,
        level_at = CASE WHEN a.kind = 'bucket' THEN greatest(a.level_at, at) END,
        earliest_expiry = CASE WHEN a.reserved = x.returned + x.booked THEN 'infinity' ELSE a.earliest_expiry END
    FROM unnest(accounts, windows, returned, booked) x(account, window_start, returned, booked)
    JOIN quota_internal.accounts c ON c.tenant = expire.tenant AND c.id = x.account
        AND c.window_start IS NOT DISTINCT FROM x.window_start
    CROSS JOIN LATERAL quota_internal.numbers_in_force(c) n
    WHERE a.tenant = expire.tenant AND a.id = x.account;
END
$$;

CREATE OR REPLACE FUNCTION quota.reap(max integer DEFAULT 1000, tenant text DEFAULT NULL, OUT released bigint, OUT charged bigint)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    one text;
    at timestamptz;
    due uuid[];
    closed record;
BEGIN
    IF reap.max IS NULL OR reap.max < 1 THEN
        PERFORM quota_internal.fail('invalid_argument', format('max %s is not at least 1', coalesce(reap.max::text, 'null')),
            'Pass how many holds one call may close, such as 1000.');
    END IF;
    IF reap.tenant IS NOT NULL THEN
        PERFORM quota_internal.require_tenant(reap.tenant);
    END IF;
    released := 0;
    charged := 0;
    FOR one IN
        SELECT t.name FROM quota_internal.tenants t
        WHERE (reap.tenant IS NULL OR t.name = reap.tenant)
            AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> t.name)
        ORDER BY t.name
    LOOP
        at := quota_internal.clock();
        SELECT array_agg(x.id) INTO due
        FROM (
            SELECT r.id FROM quota_internal.reservations r
            WHERE r.tenant = one AND r.state = 'held' AND r.expires_at <= at
            ORDER BY r.expires_at
            LIMIT reap.max - released - charged
            FOR NO KEY UPDATE SKIP LOCKED
        ) x;
        IF due IS NOT NULL THEN
            SELECT * INTO closed FROM quota_internal.expire(one, due);
            released := released + closed.released;
            charged := charged + closed.charged;
        END IF;
        EXIT WHEN released + charged >= reap.max;
    END LOOP;
END
$$;
COMMENT ON FUNCTION quota.reap(integer, text) IS
    'Closes at most max overdue holds, oldest first; any number of reapers may run, be killed and start again.';
