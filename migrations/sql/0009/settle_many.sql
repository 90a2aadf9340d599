-- settle_many and release_many: many reservations of one tenant closed in one transaction, each as settle or release would.
--
-- The usual batch, all on the same accounts, is settled by settle_alike. What is said here is the general way.
-- Most members of a batch are plain: an open hold that is not overdue, settled or released as a whole, once. They are booked
-- together: every account is written once, holds and entries in one statement each. The others (late, partial, corrections, replays,
-- errors) follow one by one, in order, by settle and release themselves.

-- Locks the reservations by id; overdue holds are closed, as the reaper would. Returns the open ones, and the accounts of all.
CREATE OR REPLACE FUNCTION quota_internal.lock_batch(
    tenant text, ids uuid[], OUT open quota_internal.reservations[], OUT accounts bigint[]
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    at timestamptz;
    due uuid[];
BEGIN
    IF NOT EXISTS (SELECT FROM quota_internal.tenants t WHERE t.name = lock_batch.tenant)
        OR EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> lock_batch.tenant)
    THEN
        PERFORM quota_internal.require_tenant(lock_batch.tenant);
    END IF;
    open := ARRAY(
        SELECT r FROM quota_internal.reservations r
        WHERE r.tenant = lock_batch.tenant AND r.id = ANY (lock_batch.ids)
        ORDER BY r.id
        FOR NO KEY UPDATE);
    accounts := ARRAY(SELECT DISTINCT l.account FROM unnest(open) r CROSS JOIN LATERAL unnest(r.line_accounts) l(account));
    IF EXISTS (SELECT FROM unnest(open) r WHERE r.state <> 'held') THEN
        open := ARRAY(SELECT r FROM unnest(open) r WHERE r.state = 'held');
    END IF;
    at := quota_internal.clock();
    due := ARRAY(SELECT r.id FROM unnest(open) r WHERE r.expires_at <= at);
    IF due <> '{}' THEN
        PERFORM quota_internal.expire(lock_batch.tenant, due, accounts);
        open := ARRAY(SELECT r FROM unnest(open) r WHERE r.expires_at > at);
    END IF;
END
$$;

-- The plain members: each open hold once, of one line an account, nothing booked of it so far, with totals that are in order.
-- totals is null where the hold is released.
CREATE OR REPLACE FUNCTION quota_internal.batch_closings(
    open quota_internal.reservations[], accs quota_internal.accounts[], ids uuid[], costs jsonb[], finals boolean[],
    outcomes text[], details jsonb[], releases boolean
) RETURNS quota_internal.batch_closing[]
LANGUAGE plpgsql STABLE SET enable_nestloop = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        WITH request AS MATERIALIZED (
            SELECT DISTINCT ON (q.id) q.id, q.n, q.costs, coalesce(q.final, true) AS final, coalesce(q.outcome, 'ok') AS outcome,
                coalesce(q.details, '{}') AS details
            FROM unnest(ids, costs, finals, outcomes, details) WITH ORDINALITY q(id, costs, final, outcome, details, n)
            ORDER BY q.id, q.n
        ), hold AS MATERIALIZED (
            SELECT r.id, r.subject, r.held, r.line_accounts, r.line_windows, r.line_held FROM unnest(open) r WHERE r.booked = '{}'
        ), shape AS MATERIALIZED (
            SELECT s.line_accounts, array_agg(CASE WHEN a.kind <> 'concurrency' THEN a.unit END ORDER BY l.line) AS units
            FROM (SELECT DISTINCT h.line_accounts FROM hold h) s
            CROSS JOIN LATERAL unnest(s.line_accounts) WITH ORDINALITY l(account, line)
            JOIN unnest(accs) a ON a.id = l.account
            GROUP BY s.line_accounts
            HAVING count(*) = count(DISTINCT l.account)
        )
        SELECT ROW(q.n, q.id, h.subject, h.held, CASE WHEN NOT releases THEN t.totals END, h.line_accounts, h.line_windows,
            h.line_held, CASE
                WHEN releases THEN array_fill(0::numeric, ARRAY[cardinality(s.units)])
                WHEN cardinality(s.units) = 1 THEN ARRAY[coalesce((t.totals -> s.units[1])::numeric, 0)]
                ELSE ARRAY(
                    SELECT coalesce((t.totals -> u.unit)::numeric, 0) FROM unnest(s.units) WITH ORDINALITY u(unit, line)
                    ORDER BY u.line)
            END, CASE
                WHEN releases OR q.costs IS NULL THEN false
                WHEN cardinality(c.units) = 1 THEN c.amounts[1] > (h.held -> c.units[1])::numeric
                ELSE EXISTS (SELECT FROM unnest(c.units, c.amounts) x(unit, amount) WHERE x.amount > (h.held -> x.unit)::numeric)
            END, q.outcome, q.details)::quota_internal.batch_closing
        FROM request q
        JOIN hold h ON h.id = q.id
        JOIN shape s ON s.line_accounts = h.line_accounts
        CROSS JOIN LATERAL quota_internal.batch_costs(q.costs) c
        CROSS JOIN LATERAL (
            SELECT CASE WHEN q.costs IS NULL THEN h.held ELSE h.held || (c.by_value - 'concurrency') END AS totals OFFSET 0
        ) t
        WHERE q.final AND q.outcome IN ('ok', 'error', 'timeout', 'cancelled') AND jsonb_typeof(q.details) = 'object'
            AND (q.costs IS NULL OR c.by_value IS NOT NULL AND h.held ?& c.units
                AND NOT coalesce((c.by_value -> 'concurrency')::numeric % 1 <> 0, false)));
END
$$;

-- Accounts with their buckets at the present level, by the numbers in force.
CREATE OR REPLACE FUNCTION quota_internal.refilled_accounts(accs quota_internal.accounts[], tenant text, at timestamptz)
RETURNS quota_internal.accounts[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    a quota_internal.accounts;
BEGIN
    accs := quota_internal.with_present_numbers(accs, tenant);
    FOR i IN 1 .. cardinality(accs) LOOP
        a := accs[i];
        IF a.kind = 'bucket' THEN
            accs[i].level := quota_internal.refilled(a.level, a.level_at, a.capacity, a.refill_per_s, at);
        END IF;
    END LOOP;
    RETURN accs;
END
$$;

-- What the closings come to on each account.
CREATE OR REPLACE FUNCTION quota_internal.batch_changes(
    closings quota_internal.batch_closing[], accs quota_internal.accounts[]
) RETURNS quota_internal.batch_change[]
LANGUAGE plpgsql STABLE SET enable_nestloop = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        SELECT ROW(a.id, x.freed, x.spent,
            CASE WHEN a.kind = 'bucket' THEN quota_internal.clamp(a.level + x.given, a.capacity) END,
            a.kind = 'bucket' AND x.gives > 0 AND x.takes > 0 AND (a.level + x.gives > a.capacity OR a.level < x.takes)
            )::quota_internal.batch_change
        FROM (
            SELECT l.account,
                coalesce(sum(l.held) FILTER (WHERE l.window_start IS NOT DISTINCT FROM b.window_start), 0) AS freed,
                coalesce(sum(l.booked) FILTER (
                    WHERE b.kind = 'budget' AND l.window_start IS NOT DISTINCT FROM b.window_start), 0) AS spent,
                sum(l.held - l.booked) AS given,
                coalesce(sum(l.held - l.booked) FILTER (WHERE l.held > l.booked), 0) AS gives,
                coalesce(sum(l.booked - l.held) FILTER (WHERE l.held < l.booked), 0) AS takes
            FROM unnest(closings) c
            CROSS JOIN LATERAL unnest(c.accounts, c.windows, c.line_held, c.line_booked) l(account, window_start, held, booked)
            JOIN unnest(accs) b ON b.id = l.account
            GROUP BY l.account
        ) x
        JOIN unnest(accs) a ON a.id = x.account);
END
$$;

-- Writes the closings of holds: their entries, then their rows.
CREATE OR REPLACE FUNCTION quota_internal.batch_close(
    tenant text, closings quota_internal.batch_closing[], at timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO quota_internal.entries
        (tenant, at, kind, reservation, subject, line_accounts, line_windows, line_amounts)
    SELECT batch_close.tenant, batch_close.at, 'settle', c.id, c.subject, c.accounts, c.windows, c.line_booked
    FROM unnest(closings) c
    WHERE NOT c.exceeds AND 0 < ALL (c.line_booked);
    -- Lines without an amount have no place in an entry, and what exceeds a hold has an entry of its own.
    INSERT INTO quota_internal.entries
        (tenant, at, kind, reservation, subject, line_accounts, line_windows, line_amounts)
    SELECT batch_close.tenant, batch_close.at, k.kind, c.id, c.subject, array_agg(l.account ORDER BY l.line),
        array_agg(l.window_start ORDER BY l.line), array_agg(CASE k.kind WHEN 'settle' THEN l.within ELSE l.beyond END ORDER BY l.line)
    FROM unnest(closings) c
    CROSS JOIN LATERAL (
        SELECT x.account, x.window_start, least(x.held, x.booked) AS within, greatest(x.booked - x.held, 0) AS beyond, x.line
        FROM unnest(c.accounts, c.windows, c.line_held, c.line_booked) WITH ORDINALITY x(account, window_start, held, booked, line)
    ) l
    CROSS JOIN (VALUES (1, 'settle'), (2, 'overage')) k(n, kind)
    WHERE (c.exceeds OR NOT 0 < ALL (c.line_booked)) AND CASE k.kind WHEN 'settle' THEN l.within ELSE l.beyond END > 0
    GROUP BY c.n, c.id, c.subject, k.n, k.kind
    ORDER BY c.n, k.n;

    UPDATE quota_internal.reservations r
    SET state = CASE WHEN c.totals IS NULL THEN 'released' ELSE 'settled' END,
        booked = coalesce(c.totals, r.booked),
        line_booked = c.line_booked,
        closed_at = batch_close.at,
        outcome = CASE WHEN c.totals IS NOT NULL THEN c.outcome END,
        details = CASE WHEN c.details = '{}' THEN r.details ELSE r.details || c.details END
    FROM unnest(closings) c
    WHERE r.tenant = batch_close.tenant AND r.id = c.id;
END
$$;

-- Writes what the closings come to on their accounts, which are locked.
CREATE OR REPLACE FUNCTION quota_internal.batch_return(
    tenant text, changes quota_internal.batch_change[], at timestamptz
) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE quota_internal.accounts a
    SET spent = a.spent + n.spent,
        reserved = a.reserved - n.freed,
        level = n.level,
        level_at = greatest(a.level_at, CASE a.kind WHEN 'bucket' THEN batch_return.at END),
        earliest_expiry = CASE WHEN a.reserved = n.freed THEN 'infinity' ELSE a.earliest_expiry END
    FROM unnest(changes) n
    WHERE a.tenant = batch_return.tenant AND a.id = n.id;
END
$$;

-- Closes the plain members of a batch; returns what it closed. All rows and accounts are locked afterwards. The accounts, which
-- everybody wants, are locked last and for a moment only, unless the order of the members may count for a bucket.
CREATE OR REPLACE FUNCTION quota_internal.close_plain(
    tenant text, ids uuid[], costs jsonb[], finals boolean[], outcomes text[], details jsonb[], releases boolean
) RETURNS quota_internal.batch_closing[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    locked record := quota_internal.lock_batch(tenant, ids);
    accs quota_internal.accounts[] := ARRAY(
        SELECT a FROM quota_internal.accounts a WHERE a.tenant = close_plain.tenant AND a.id = ANY (locked.accounts));
    closings quota_internal.batch_closing[] := quota_internal.batch_closings(
        locked.open, accs, ids, costs, finals, outcomes, details, releases);
    at timestamptz;
BEGIN
    IF EXISTS (SELECT FROM unnest(closings) c WHERE c.exceeds) AND EXISTS (SELECT FROM unnest(accs) a WHERE a.kind = 'bucket') THEN
        accs := quota_internal.locked_accounts(tenant, locked.accounts);
        at := quota_internal.clock();
        IF EXISTS (
            SELECT FROM unnest(quota_internal.batch_changes(closings, quota_internal.refilled_accounts(accs, tenant, at))) x
            WHERE x.ordered)
        THEN
            RETURN '{}';
        END IF;
    END IF;
    at := quota_internal.clock();
    PERFORM quota_internal.batch_close(tenant, closings, at);
    accs := quota_internal.locked_accounts(tenant, locked.accounts);
    at := quota_internal.clock();
    PERFORM quota_internal.batch_return(
        tenant, quota_internal.batch_changes(closings, quota_internal.refilled_accounts(accs, tenant, at)), at);
    RETURN closings;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.settle_one(
    place integer, id uuid, costs jsonb, final boolean, outcome text, details jsonb, tenant text
) RETURNS quota.batch_settlement
LANGUAGE plpgsql AS $$
DECLARE
    s record;
    answer quota.batch_settlement;
BEGIN
    answer.position := place;
    answer.reservation := id;
    BEGIN
        s := quota.settle(id, costs, final, outcome, details, tenant);
        answer.state := s.state;
        answer.late := s.late;
        answer.replayed := s.replayed;
        answer.overage := s.overage;
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE NOT LIKE 'QT0%' THEN
            RAISE;
        END IF;
        answer.error := split_part(SQLERRM, ':', 1);
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
        GET STACKED DIAGNOSTICS answer.error_remedy = PG_EXCEPTION_HINT;
    END;
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION quota.settle_many(
    ids uuid[],
    costs jsonb[] DEFAULT NULL,
    finals boolean[] DEFAULT NULL,
    outcomes text[] DEFAULT NULL,
    details jsonb[] DEFAULT NULL,
    atomic boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS SETOF quota.batch_settlement
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    -- (As in reserve_many: a plan that was made while the tables were small is kept.)
    size integer := cardinality(settle_many.ids);
    closings quota_internal.batch_closing[];
    one quota.batch_settlement;
    answers quota.batch_settlement[];
    i integer;
BEGIN
    IF (quota_internal.is_batch(size, settle_many.ids, false) AND quota_internal.is_batch(size, settle_many.costs, true)
        AND quota_internal.is_batch(size, settle_many.finals, true) AND quota_internal.is_batch(size, settle_many.outcomes, true)
        AND quota_internal.is_batch(size, settle_many.details, true) AND atomic IS NOT NULL) IS NOT TRUE
    THEN
        PERFORM quota_internal.require_batch('ids', size, settle_many.ids, false);
        PERFORM quota_internal.require_batch('costs', size, settle_many.costs, true);
        PERFORM quota_internal.require_batch('finals', size, settle_many.finals, true);
        PERFORM quota_internal.require_batch('outcomes', size, settle_many.outcomes, true);
        PERFORM quota_internal.require_batch('details', size, settle_many.details, true);
        PERFORM quota_internal.require_flag('atomic', atomic);
    END IF;
    IF true = ALL (array_remove(coalesce(finals, '{}'), NULL)) THEN
        answers := quota_internal.settle_alike(
            settle_many.tenant, settle_many.ids, settle_many.costs, outcomes, settle_many.details);
        IF answers IS NOT NULL THEN
            RETURN QUERY SELECT x.* FROM unnest(answers) x;
            RETURN;
        END IF;
    END IF;
    closings := quota_internal.close_plain(
        settle_many.tenant, settle_many.ids, settle_many.costs, finals, outcomes, settle_many.details, releases => false);
    answers := ARRAY(
        SELECT ROW(c.n, c.id, 'settled', false, false,
            CASE WHEN c.exceeds THEN quota_internal.overage(c.held, c.totals) ELSE '{}' END, NULL, NULL, NULL, NULL
            )::quota.batch_settlement
        FROM unnest(closings) c);
    FOR i IN
        SELECT n FROM generate_series(1, size) n
        WHERE cardinality(closings) < size
        EXCEPT SELECT c.n FROM unnest(closings) c
        ORDER BY 1
    LOOP
        one := quota_internal.settle_one(i, settle_many.ids[i], settle_many.costs[i], coalesce(finals[i], true),
            coalesce(outcomes[i], 'ok'), coalesce(settle_many.details[i], '{}'), settle_many.tenant);
        IF atomic AND one.error IS NOT NULL THEN
            PERFORM quota_internal.fail_batch(i, one.error_code, one.error_message, one.error_remedy);
        END IF;
        answers := answers || one;
    END LOOP;
    RETURN QUERY SELECT x.* FROM unnest(answers) x ORDER BY x.position;
END
$$;
COMMENT ON FUNCTION quota.settle_many(uuid[], jsonb[], boolean[], text[], jsonb[], boolean, text) IS
    'Many settles in one transaction; an error spoils only its own member, or with atomic all of them.';

CREATE OR REPLACE FUNCTION quota_internal.release_one(place integer, id uuid, details jsonb, tenant text)
RETURNS quota.batch_release
LANGUAGE plpgsql AS $$
DECLARE
    r record;
    answer quota.batch_release;
BEGIN
    answer.position := place;
    answer.reservation := id;
    BEGIN
        r := quota.release(id, details, tenant);
        answer.state := r.state;
        answer.replayed := r.replayed;
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE NOT LIKE 'QT0%' THEN
            RAISE;
        END IF;
        answer.error := split_part(SQLERRM, ':', 1);
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
        GET STACKED DIAGNOSTICS answer.error_remedy = PG_EXCEPTION_HINT;
    END;
    RETURN answer;
END
$$;

CREATE OR REPLACE FUNCTION quota.release_many(
    ids uuid[],
    details jsonb[] DEFAULT NULL,
    atomic boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS SETOF quota.batch_release
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    -- (As in reserve_many: a plan that was made while the tables were small is kept.)
    size integer := cardinality(release_many.ids);
    closings quota_internal.batch_closing[];
    one quota.batch_release;
    answers quota.batch_release[];
    i integer;
BEGIN
    PERFORM quota_internal.require_batch('ids', size, release_many.ids, false);
    PERFORM quota_internal.require_batch('details', size, release_many.details, true);
    PERFORM quota_internal.require_flag('atomic', atomic);
    closings := quota_internal.close_plain(
        release_many.tenant, release_many.ids, NULL, NULL, NULL, release_many.details, releases => true);
    answers := ARRAY(
        SELECT ROW(c.n, c.id, 'released', false, NULL, NULL, NULL, NULL)::quota.batch_release FROM unnest(closings) c);
    FOR i IN
        SELECT n FROM generate_series(1, size) n
        WHERE cardinality(closings) < size
        EXCEPT SELECT c.n FROM unnest(closings) c
        ORDER BY 1
    LOOP
        one := quota_internal.release_one(
            i, release_many.ids[i], coalesce(release_many.details[i], '{}'), release_many.tenant);
        IF atomic AND one.error IS NOT NULL THEN
            PERFORM quota_internal.fail_batch(i, one.error_code, one.error_message, one.error_remedy);
        END IF;
        answers := answers || one;
    END LOOP;
    RETURN QUERY SELECT x.* FROM unnest(answers) x ORDER BY x.position;
END
$$;
COMMENT ON FUNCTION quota.release_many(uuid[], jsonb[], boolean, text) IS
    'Many releases in one transaction; an error spoils only its own member, or with atomic all of them.';
