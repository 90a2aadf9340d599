-- reserve_many: many holds of one tenant in one transaction, each decided as reserve would decide it, in order.
--
-- The usual batch, all of one subject, is decided by reserve_alike. What is said here is the general way.
-- Most requests of a batch are plain: known subjects, valid amounts, a new id. Their accounts are locked once; if the sum of all
-- fits, all are granted, every account is written once and the holds in one statement. If it does not fit, they are judged one by
-- one, in order, by the same locked rows. The others (errors, replays, frozen subjects) take nothing whatever their place is, and
-- are answered by reserve itself.

-- What all batch functions demand of their arrays: the same length, at most 10,000, no null where there must be a value. The error
-- names the position.
CREATE OR REPLACE FUNCTION quota_internal.require_batch(what text, size integer, members anyarray, nullable boolean) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    missing integer;
BEGIN
    IF members IS NULL AND nullable THEN
        RETURN;
    ELSIF members IS NULL OR size > 10000 OR array_ndims(members) > 1 OR array_lower(members, 1) <> 1 THEN
        PERFORM quota_internal.fail('invalid_argument',
            CASE WHEN members IS NULL THEN format('%s is null', what)
                WHEN size > 10000 THEN format('a batch of %s is above the maximum of 10000', size)
                ELSE format('%s is no plain list that counts from 1', what) END,
            'Pass an array with one member a request, at most 10000; send a longer batch in parts.');
    ELSIF cardinality(members) <> size THEN
        PERFORM quota_internal.fail('invalid_argument',
            format('%s has %s members, the batch has %s: position %s has no counterpart', what, cardinality(members), size,
                least(cardinality(members), size) + 1),
            'Pass one member a request in every array, or null in place of a whole array.');
    END IF;
    IF NOT nullable THEN
        missing := array_position(members, NULL);
        IF missing IS NOT NULL THEN
            PERFORM quota_internal.fail('invalid_argument', format('%s is null at position %s', what, missing),
                'Positions count from 1; every request needs a value here.');
        END IF;
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.require_flag(what text, flag boolean) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    IF flag IS NULL THEN
        PERFORM quota_internal.fail('invalid_argument', format('%s is null', what), 'Pass true or false.');
    END IF;
END
$$;

-- The error of one request is the error of an atomic batch.
CREATE OR REPLACE FUNCTION quota_internal.fail_batch(place integer, code text, message text, remedy text) RETURNS void
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = format('%s (request %s of the batch)', message, place), HINT = remedy;
END
$$;

-- parse_costs without its errors: by_value is null when something is wrong. (A table function of one statement, which the planner
-- folds into its caller; keys in the select list, because a function in FROM fills a store for every request.)
CREATE OR REPLACE FUNCTION quota_internal.batch_costs(costs jsonb)
RETURNS TABLE (units text[], amounts numeric[], by_value jsonb)
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT array_agg(e.key), array_agg(e.exact),
        CASE WHEN bool_and(coalesce(quota_internal.is_amount(e.exact), false)) THEN
            CASE WHEN bool_or(e.written) THEN jsonb_object_agg(e.key, e.exact) ELSE costs END
        END
    FROM (
        SELECT v.key, jsonb_typeof(v.value) = 'string' AS written, quota_internal.exact(v.value) AS exact
        FROM (
            SELECT k.key, costs -> k.key AS value
            FROM (SELECT jsonb_object_keys(CASE jsonb_typeof(costs) WHEN 'object' THEN costs ELSE '{}' END) AS key) k
            OFFSET 0
        ) v
        OFFSET 0
    ) e
$$;

-- The requests, taken apart. costs is null where something is not in order: reserve will say what.
CREATE OR REPLACE FUNCTION quota_internal.batch_requests(
    subjects text[], costs jsonb[], ids uuid[], ttls interval[], also jsonb[], headrooms numeric[], on_expiries text[],
    details jsonb[]
) RETURNS quota_internal.batch_request[]
LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        -- One text tells groups apart faster than the arrays; the length keeps the subject's end.
        SELECT ROW(q.n,
            dense_rank() OVER (ORDER BY concat(length(q.subject), ':', q.subject, c.units, q.also) COLLATE "C"), q.subject, q.also,
            CASE WHEN q.in_order THEN c.by_value END, c.units, c.amounts, NULL, coalesce(q.id, quota_internal.uuid_v7()),
            NULL, q.ttl, q.headroom, q.on_expiry, q.details
            )::quota_internal.batch_request
        FROM (
            SELECT p.n, p.subject, p.costs, p.id, coalesce(p.ttl, '10 minutes') AS ttl, coalesce(p.headroom, 0) AS headroom,
                p.on_expiry, coalesce(p.details, '{}') AS details, CASE
                    WHEN jsonb_typeof(p.also) = 'array' AND p.also <> '[]' AND NOT p.also @> 'null'
                    THEN quota_internal.others(ARRAY(SELECT jsonb_array_elements_text(p.also)), p.subject)
                    ELSE '{}'
                END AS also,
                coalesce(p.ttl > '0', true) AND coalesce(p.headroom >= 0 AND p.headroom < 1, true)
                    AND coalesce(p.on_expiry IN ('release', 'charge'), true)
                    AND coalesce(jsonb_typeof(p.details) = 'object', true)
                    AND coalesce(jsonb_typeof(p.also) = 'array' AND NOT p.also @> 'null', true) AS in_order
            FROM unnest(subjects, costs, ids, ttls, also, headrooms, on_expiries, details)
                WITH ORDINALITY p(subject, costs, id, ttl, also, headroom, on_expiry, details, n)
        ) q
        CROSS JOIN LATERAL quota_internal.batch_costs(q.costs) c
        ORDER BY q.n);
END
$$;

-- The accounts of each group, in lock order. A group that cannot be judged (an unknown or frozen subject, a unit without a limit)
-- is left out. Everything here is in memory: without nested loops the planner, which guesses ten members an array, hashes. (They
-- are "off" by an enormous cost, which would set off the compiler.)
CREATE OR REPLACE FUNCTION quota_internal.batch_groups(
    requests quota_internal.batch_request[], nodes quota_internal.subjects[], accs quota_internal.accounts[]
) RETURNS quota_internal.batch_group[]
LANGUAGE plpgsql STABLE SET enable_nestloop = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        WITH asked AS MATERIALIZED (
            SELECT DISTINCT ON (r.g) r.g, r.subject, r.also, r.units
            FROM unnest(requests) r WHERE r.costs IS NOT NULL
        ), node AS MATERIALIZED (
            SELECT s.name, s.lineage, s.frozen FROM unnest(nodes) s WHERE NOT s.retired
        ), lineage AS MATERIALIZED (
            SELECT DISTINCT p.g, l.name
            FROM asked p
            CROSS JOIN LATERAL unnest(p.subject || p.also) x(name)
            LEFT JOIN node n ON n.name = x.name
            LEFT JOIN LATERAL unnest(n.lineage) l(name) ON true
        ), sound AS MATERIALIZED (
            SELECT l.g
            FROM lineage l
            LEFT JOIN node n ON n.name = l.name
            GROUP BY l.g
            HAVING bool_and(l.name IS NOT NULL AND n.frozen IS NULL)
        ), line AS (
            SELECT p.g, a.ordinality::integer AS place, a.unit, a.kind, a.on_expiry, a.id,
                array_position(p.units, a.unit) AS source, a.unit IN ('requests', 'concurrency') AS implied,
                row_number() OVER (PARTITION BY p.g ORDER BY a.ordinality) AS number
            FROM asked p
            JOIN lineage l ON l.g = p.g
            JOIN unnest(accs) WITH ORDINALITY a ON a.subject = l.name
            WHERE a.required OR a.unit = ANY (p.units) OR a.unit IN ('requests', 'concurrency')
        ), covered AS (
            SELECT l.g, array_agg(l.place ORDER BY l.place) AS places, array_agg(l.source ORDER BY l.place) AS sources,
                array_agg(l.number) FILTER (WHERE l.kind = 'concurrency') AS slots,
                coalesce(jsonb_object_agg(l.unit, 1) FILTER (WHERE l.source IS NULL), '{}') AS implied,
                array_agg(l.id ORDER BY l.place) AS ids,
                array_agg(l.kind <> 'concurrency' AND l.on_expiry = 'charge' ORDER BY l.place) AS charged,
                array_agg(l.kind <> 'concurrency' ORDER BY l.place) AS chargeable, array_agg(0::numeric) AS nothing,
                array_agg(l.unit) AS units, bool_and(l.source IS NOT NULL OR l.implied) AS complete
            FROM line l
            GROUP BY l.g
        )
        -- Units that count by themselves may have no limit, and so a request no line.
        SELECT ROW(p.g, coalesce(c.places, '{}'), coalesce(c.sources, '{}'), c.slots, coalesce(c.implied, '{}'),
            coalesce(c.ids, '{}'), NULL, coalesce(c.charged, '{}'), coalesce(c.chargeable, '{}'), coalesce(c.nothing, '{}'),
            NULL, NULL)::quota_internal.batch_group
        FROM asked p
        JOIN sound s ON s.g = p.g
        LEFT JOIN covered c ON c.g = p.g
        WHERE coalesce(c.complete, true) AND p.units <@ (coalesce(c.units, '{}') || '{requests,concurrency}'::text[]));
END
$$;

-- The plain requests, with the amounts of their lines: of a group, with whole slots and a ttl that the tenant allows.
CREATE OR REPLACE FUNCTION quota_internal.batch_plain(
    requests quota_internal.batch_request[], groups quota_internal.batch_group[], ttl_maximum interval, known uuid[]
) RETURNS quota_internal.batch_request[]
LANGUAGE plpgsql STABLE SET enable_nestloop = off SET jit = off AS $$
#variable_conflict use_column
BEGIN
    RETURN ARRAY(
        SELECT ROW(r.n, r.g, r.subject, r.also, r.costs, r.units, l.amounts,
            CASE WHEN g.implied = '{}' THEN r.costs ELSE g.implied || r.costs END,
            r.id, min(r.n) OVER (PARTITION BY r.id), r.ttl, r.headroom, r.on_expiry, r.details)::quota_internal.batch_request
        FROM unnest(requests) r
        JOIN unnest(groups) g ON g.g = r.g
        CROSS JOIN LATERAL (
            SELECT CASE
                WHEN g.sources = '{1}' AND cardinality(r.amounts) = 1 THEN r.amounts
                ELSE ARRAY(
                    SELECT CASE WHEN s.source IS NULL THEN 1 ELSE r.amounts[s.source] END
                    FROM unnest(g.sources) WITH ORDINALITY s(source, line) ORDER BY s.line)
            END AS amounts
            OFFSET 0
        ) l
        WHERE r.costs IS NOT NULL AND r.ttl <= ttl_maximum AND (known = '{}' OR r.id <> ALL (known))
            AND (g.slots IS NULL OR NOT EXISTS (
                SELECT FROM unnest(g.slots) s(line) WHERE l.amounts[s.line] <> trunc(l.amounts[s.line])))
        ORDER BY r.n);
END
$$;

-- Per account of the batch, in their order: the sum of what is asked, and the largest headroom; null where nothing is asked.
CREATE OR REPLACE FUNCTION quota_internal.batch_sums(
    requests quota_internal.batch_request[], groups quota_internal.batch_group[], accounts integer,
    OUT sums numeric[], OUT headrooms numeric[]
)
LANGUAGE plpgsql STABLE SET enable_nestloop = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    s record;
BEGIN
    sums := array_fill(NULL::numeric, ARRAY[accounts]);
    headrooms := sums;
    FOR s IN
        SELECT l.place, sum(r.amounts[l.line]) AS amount, max(r.headroom) AS headroom
        FROM unnest(requests) r
        JOIN (
            SELECT g.g, x.place, x.line FROM unnest(groups) g CROSS JOIN LATERAL unnest(g.accounts) WITH ORDINALITY x(place, line)
        ) l ON l.g = r.g
        GROUP BY l.place
    LOOP
        sums[s.place] := s.amount;
        headrooms[s.place] := s.headroom;
    END LOOP;
END
$$;

-- Judges sums as one request for all; the standings keep the places of the accounts.
CREATE OR REPLACE FUNCTION quota_internal.judge_sums(
    accs quota_internal.accounts[], sums numeric[], headrooms numeric[], at timestamptz, polling_hint_s numeric,
    OUT standings quota_internal.standing[], OUT refused boolean, OUT stale boolean
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s quota_internal.standing;
BEGIN
    standings := '{}';
    refused := false;
    stale := false;
    FOR i IN 1 .. cardinality(accs) LOOP
        CONTINUE WHEN sums[i] IS NULL;
        s := quota_internal.stand(accs[i], sums[i], headrooms[i], at, polling_hint_s);
        standings[i] := s;
        refused := refused OR s.reason IS NOT NULL;
        stale := stale OR s.reserved > 0 AND (accs[i]).earliest_expiry <= at;
    END LOOP;
END
$$;

-- Judges the requests one by one, each after what was granted before it, on copies of the accounts: as a decision sees them
-- (judged) and as they are stored. stale: overdue holds lie about and are few enough to be shown as their expiry will book them.
-- With probe it stops at the first grant.
CREATE OR REPLACE FUNCTION quota_internal.judge_in_order(
    requests quota_internal.batch_request[], groups quota_internal.batch_group[], stored quota_internal.accounts[],
    judged quota_internal.accounts[], stale boolean, at timestamptz, polling_hint_s numeric, probe boolean,
    OUT granted integer[], OUT answers quota.batch_decision[]
)
LANGUAGE plpgsql STABLE AS $$
DECLARE
    r quota_internal.batch_request;
    refused_before quota_internal.batch_request;
    standings quota_internal.standing[];
    s quota_internal.standing;
    d quota.decision;
    refused boolean;
    group_at integer[] := '{}';
    places integer[];
    i integer;
BEGIN
    granted := '{}';
    answers := '{}';
    FOR k IN 1 .. cardinality(groups) LOOP
        group_at[(groups[k]).g] := k;
    END LOOP;
    FOREACH r IN ARRAY requests LOOP
        -- The same id once more: a replay, if the first was granted; judged like any other, if it was not.
        CONTINUE WHEN r.first < r.n AND EXISTS (
            SELECT FROM unnest(requests) x WHERE x.first = r.first AND x.n = ANY (granted));
        IF r.g = refused_before.g AND r.amounts = refused_before.amounts AND r.headroom = refused_before.headroom THEN
            answers := answers || quota_internal.placed(r.n, d);
            CONTINUE;
        END IF;
        standings := '{}';
        refused := false;
        places := (groups[group_at[r.g]]).accounts;
        FOR k IN 1 .. cardinality(places) LOOP
            s := quota_internal.stand(judged[places[k]], r.amounts[k], r.headroom, at, polling_hint_s);
            standings := standings || s;
            refused := refused OR s.reason IS NOT NULL;
        END LOOP;
        IF refused THEN
            IF stale THEN
                standings := quota_internal.standings_at(
                    quota_internal.discount(stored, at), places, r.amounts, r.headroom, at, polling_hint_s);
            END IF;
            d := quota_internal.refusal(standings);
            refused_before := r;
            answers := answers || quota_internal.placed(r.n, d);
            CONTINUE;
        END IF;
        granted := granted || r.n;
        EXIT WHEN probe;
        refused_before := NULL;
        FOR k IN 1 .. cardinality(places) LOOP
            i := places[k];
            judged[i] := quota_internal.after_hold(judged[i], standings[k], at);
            IF stale THEN
                s := quota_internal.stand(stored[i], r.amounts[k], r.headroom, at, polling_hint_s);
                stored[i] := quota_internal.after_hold(stored[i], s, at);
            END IF;
        END LOOP;
        d := ROW(true, r.id, 'held', quota_internal.later(at, r.ttl), stale, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
            NULL, NULL);
        IF stale THEN
            -- What is shown counts overdue holds as their expiry will book them, after this one was taken.
            standings := quota_internal.standings_at(
                quota_internal.discount(stored, at), places, array_fill(0::numeric, ARRAY[cardinality(places)]), 0, at,
                polling_hint_s);
            FOR k IN 1 .. cardinality(places) LOOP
                standings[k].requested := r.amounts[k];
            END LOOP;
        END IF;
        d := quota_internal.conclude(d, standings);
        d.replayed := false;
        answers := answers || quota_internal.placed(r.n, d);
    END LOOP;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.standings_at(
    accs quota_internal.accounts[], places integer[], amounts numeric[], headroom numeric, at timestamptz, polling_hint_s numeric
) RETURNS quota_internal.standing[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    standings quota_internal.standing[] := '{}';
BEGIN
    FOR k IN 1 .. cardinality(places) LOOP
        standings := standings || quota_internal.stand(accs[places[k]], amounts[k], headroom, at, polling_hint_s);
    END LOOP;
    RETURN standings;
END
$$;

-- An account as take() will leave it.
CREATE OR REPLACE FUNCTION quota_internal.after_hold(
    a quota_internal.accounts, s quota_internal.standing, at timestamptz
) RETURNS quota_internal.accounts
LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN
    a.spent := coalesce(s.spent, a.spent);
    a.reserved := s.reserved + s.requested;
    a.level := greatest(0, s.level - s.requested);
    a.level_at := greatest(a.level_at, CASE a.kind WHEN 'bucket' THEN at END);
    a.window_start := s.window_start;
    a.window_end := s.window_end;
    RETURN a;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.after_holds(
    accs quota_internal.accounts[], sums numeric[], at timestamptz, polling_hint_s numeric
) RETURNS quota_internal.accounts[]
LANGUAGE plpgsql STABLE AS $$
BEGIN
    FOR i IN 1 .. cardinality(accs) LOOP
        IF sums[i] IS NOT NULL THEN
            accs[i] := quota_internal.after_hold(accs[i], quota_internal.stand(accs[i], sums[i], 0, at, polling_hint_s), at);
        END IF;
    END LOOP;
    RETURN accs;
END
$$;

-- What the groups show at the instant of the grant: the windows of their lines, and the answer after all of the batch. taken: the
-- standings are those after it already.
CREATE OR REPLACE FUNCTION quota_internal.conclude_groups(
    groups quota_internal.batch_group[], standings quota_internal.standing[], taken boolean
) RETURNS quota_internal.batch_group[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    g quota_internal.batch_group;
    concluded quota_internal.batch_group[] := '{}';
    own quota_internal.standing[];
    s quota_internal.standing;
    d quota.decision;
    place integer;
BEGIN
    d.granted := true;
    d.replayed := taken;
    FOREACH g IN ARRAY groups LOOP
        g.windows := '{}';
        own := '{}';
        s := NULL;
        FOREACH place IN ARRAY g.accounts LOOP
            s := standings[place];
            g.windows := g.windows || s.window_start;
            own := own || s;
        END LOOP;
        -- A group whose requests are all refused has no sums.
        CONTINUE WHEN g.accounts <> '{}' AND s.account IS NULL;
        g.answer := quota_internal.conclude(d, own);
        FOR k IN 1 .. cardinality(own) LOOP
            IF (own[k]).subject = (g.answer).limit_subject AND (own[k]).limit_name = (g.answer).limit_name THEN
                g.tightest := k;
            END IF;
        END LOOP;
        concluded := concluded || g;
    END LOOP;
    RETURN concluded;
END
$$;

-- Writes the holds, unless a limit, tier, lineage or freeze has changed or an id is known. Returns how many it wrote.
CREATE OR REPLACE FUNCTION quota_internal.batch_hold(
    tenant text, requests quota_internal.batch_request[], groups quota_internal.batch_group[], at timestamptz, config_version bigint
) RETURNS bigint
LANGUAGE plpgsql SET enable_nestloop = off SET jit = off AS $$
#variable_conflict use_column
DECLARE
    written bigint;
BEGIN
    INSERT INTO quota_internal.reservations
        (tenant, id, subject, also, costs, held, created_at, expires_at, headroom, details,
         line_accounts, line_windows, line_held, line_booked, line_charged)
    SELECT batch_hold.tenant, r.id, r.subject, r.also, r.costs, r.held, batch_hold.at, quota_internal.later(batch_hold.at, r.ttl),
        r.headroom, r.details, g.ids, g.windows, r.amounts, g.nothing,
        CASE r.on_expiry WHEN 'charge' THEN g.chargeable ELSE g.charged END
    FROM unnest(requests) r
    JOIN unnest(groups) g ON g.g = r.g
    WHERE batch_hold.config_version = (
        SELECT t.config_version FROM quota_internal.tenants t WHERE t.name = batch_hold.tenant)
    ORDER BY r.id
    ON CONFLICT (tenant, id) DO NOTHING;
    GET DIAGNOSTICS written = ROW_COUNT;
    RETURN written;
END
$$;

-- The answers when all are granted: every one shows its accounts after the whole batch.
CREATE OR REPLACE FUNCTION quota_internal.batch_grants(
    requests quota_internal.batch_request[], groups quota_internal.batch_group[], at timestamptz
) RETURNS quota.batch_decision[]
LANGUAGE plpgsql STABLE SET enable_nestloop = off SET jit = off AS $$
BEGIN
    RETURN ARRAY(
        SELECT ROW(r.n, true, r.id, 'held', quota_internal.later(at, r.ttl), false, NULL, (g.answer).limit_subject,
            (g.answer).limit_name, (g.answer).unit, (g.answer).capacity, (g.answer).spent, (g.answer).reserved,
            r.amounts[g.tightest], NULL, (g.answer).remaining, (g.answer).violations, NULL, NULL, NULL, NULL
            )::quota.batch_decision
        FROM unnest(requests) r
        JOIN unnest(groups) g ON g.g = r.g);
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.reserve_one(
    place integer, subject text, costs jsonb, ttl interval, id uuid, also jsonb, headroom numeric, on_expiry text, details jsonb,
    tenant text
) RETURNS quota.batch_decision
LANGUAGE plpgsql AS $$
DECLARE
    d quota.decision;
    answer quota.batch_decision;
BEGIN
    BEGIN
        IF also IS NOT NULL AND (jsonb_typeof(also) <> 'array' OR also @> 'null') THEN
            PERFORM quota_internal.fail('invalid_argument', format('also %s is no list of names', left(also::text, 100)),
                'Pass a JSON array of further subjects that this cost counts on, or null.');
        END IF;
        d := quota.reserve(subject, costs, coalesce(ttl, '10 minutes'), id,
            CASE WHEN also IS NULL THEN '{}' ELSE ARRAY(SELECT jsonb_array_elements_text(also)) END,
            coalesce(headroom, 0), on_expiry, coalesce(details, '{}'), tenant);
    EXCEPTION WHEN OTHERS THEN
        IF SQLSTATE NOT LIKE 'QT0%' THEN
            RAISE;
        END IF;
        answer.position := place;
        answer.reservation := id;
        answer.error := split_part(SQLERRM, ':', 1);
        answer.error_code := SQLSTATE;
        answer.error_message := SQLERRM;
        GET STACKED DIAGNOSTICS answer.error_remedy = PG_EXCEPTION_HINT;
        RETURN answer;
    END;
    RETURN quota_internal.placed(place, d);
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.placed(place integer, d quota.decision) RETURNS quota.batch_decision
LANGUAGE sql IMMUTABLE AS $$
    SELECT ROW(place, d.granted, d.reservation, d.state, d.expires_at, d.replayed, d.reason, d.limit_subject, d.limit_name, d.unit,
        d.capacity, d.spent, d.reserved, d.requested, d.retry_after_s, d.remaining, d.violations, NULL, NULL, NULL, NULL
        )::quota.batch_decision
$$;

CREATE OR REPLACE FUNCTION quota_internal.linked(place integer) RETURNS quota.batch_decision
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    answer quota.batch_decision;
BEGIN
    answer.position := place;
    answer.granted := false;
    answer.replayed := false;
    answer.reason := 'linked';
    answer.remaining := '[]';
    answer.violations := '[]';
    RETURN answer;
END
$$;
COMMENT ON FUNCTION quota_internal.linked(integer) IS
    'The answer of a request that fits, in an atomic batch of which another is refused.';

-- The accounts of a batch as they are now, and what judging them needs. Subjects that carry old definitions are bound anew.
CREATE OR REPLACE FUNCTION quota_internal.resolve_batch(
    tenant text, requests quota_internal.batch_request[],
    OUT config_version bigint, OUT polling_hint_s numeric, OUT ttl_maximum interval,
    OUT groups quota_internal.batch_group[], OUT accs quota_internal.accounts[], OUT bound boolean
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    names text[];
    units text[];
    lineages text[];
    nodes quota_internal.subjects[];
    version bigint;
BEGIN
    bound := false;
    WITH asked AS MATERIALIZED (
        SELECT DISTINCT ON (r.g) r.subject, r.also, r.units FROM unnest(requests) r WHERE r.costs IS NOT NULL
    )
    SELECT ARRAY(SELECT DISTINCT x.name FROM asked a CROSS JOIN LATERAL unnest(a.subject || a.also) x(name)),
        ARRAY(SELECT DISTINCT x.unit FROM asked a CROSS JOIN LATERAL unnest(a.units) x(unit)) || '{requests,concurrency}'::text[]
    INTO names, units;
    FOR attempt IN 1 .. 100 LOOP
        SELECT t.config_version, t.polling_hint_s, t.ttl_maximum, t.binding_version
        INTO resolve_batch.config_version, resolve_batch.polling_hint_s, resolve_batch.ttl_maximum, version
        FROM quota_internal.tenants t
        WHERE t.name = resolve_batch.tenant
            AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> resolve_batch.tenant);
        IF NOT FOUND THEN
            PERFORM quota_internal.require_tenant(resolve_batch.tenant);
        END IF;
        lineages := ARRAY(
            SELECT DISTINCT l.name FROM quota_internal.subjects s CROSS JOIN LATERAL unnest(s.lineage) l(name)
            WHERE s.tenant = resolve_batch.tenant AND s.name = ANY (names) AND NOT s.retired);
        nodes := ARRAY(
            SELECT s FROM quota_internal.subjects s WHERE s.tenant = resolve_batch.tenant AND s.name = ANY (lineages));
        IF NOT EXISTS (SELECT FROM unnest(nodes) s WHERE s.binding_version <> version) THEN
            accs := ARRAY(
                SELECT a FROM quota_internal.accounts a
                WHERE a.tenant = resolve_batch.tenant AND a.subject = ANY (lineages) AND a.in_force
                    AND (a.unit = ANY (units) OR a.required)
                ORDER BY a.subject, a.limit_name);
            groups := quota_internal.batch_groups(requests, nodes, accs);
            RETURN;
        END IF;
        PERFORM quota_internal.bind(resolve_batch.tenant, lineages);
        bound := true;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing', tenant),
        HINT = 'Retry with the same ids.';
END
$$;

-- Locks the accounts that the sums touch, in the one order; the others keep their places.
CREATE OR REPLACE FUNCTION quota_internal.lock_touched(tenant text, accs quota_internal.accounts[], ids bigint[])
RETURNS quota_internal.accounts[]
LANGUAGE plpgsql AS $$
DECLARE
    locked quota_internal.accounts[] := quota_internal.locked_accounts(tenant, ids);
    k integer := 1;
BEGIN
    IF cardinality(locked) = cardinality(accs) THEN
        RETURN locked;
    END IF;
    FOR i IN 1 .. cardinality(accs) LOOP
        IF (accs[i]).id = (locked[k]).id THEN
            accs[i] := locked[k];
            k := k + 1;
        END IF;
    END LOOP;
    RETURN accs;
END
$$;

-- Decides the plain requests of a batch and writes what is granted. Everything that may make it begin anew (a limit has changed, an
-- id is known after all) is QT099.
--   known   ids that exist already: their rows are locked, before any account
--   linked  nothing is to be granted: another request of an atomic batch is refused
CREATE OR REPLACE FUNCTION quota_internal.decide_batch(
    tenant text, requests quota_internal.batch_request[], known uuid[], atomic boolean, linked boolean, attempt integer,
    OUT answers quota.batch_decision[], OUT refused boolean
)
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    old_snapshot boolean := quota_internal.snapshot_is_old();
    b record;
    plain quota_internal.batch_request[];
    granted quota_internal.batch_request[];
    asked record;
    j record;
    decided record;
    accs quota_internal.accounts[];
    judged quota_internal.accounts[];
    stale boolean := false;
    groups quota_internal.batch_group[];
    ids bigint[];
    swept boolean := false;
    next_expiry timestamptz := 'infinity';
    expires_at timestamptz;
    at timestamptz;
BEGIN
    answers := '{}';
    refused := false;
    IF old_snapshot THEN
        PERFORM FROM quota_internal.tenants t WHERE t.name = decide_batch.tenant FOR SHARE;
    END IF;
    IF known <> '{}' THEN
        PERFORM FROM quota_internal.reservations r
        WHERE r.tenant = decide_batch.tenant AND r.id = ANY (known) ORDER BY r.id FOR NO KEY UPDATE;
    END IF;
    b := quota_internal.resolve_batch(tenant, requests);
    accs := b.accs;
    groups := b.groups;
    plain := quota_internal.batch_plain(requests, groups, b.ttl_maximum, known);
    IF plain = '{}' AND known = '{}' THEN
        RETURN;
    END IF;
    granted := ARRAY(SELECT r FROM unnest(plain) r WHERE r.first = r.n);
    asked := quota_internal.batch_sums(granted, groups, cardinality(accs));
    ids := ARRAY(SELECT a.id FROM unnest(accs) WITH ORDINALITY a WHERE asked.sums[a.ordinality] IS NOT NULL);
    at := quota_internal.clock();
    j := quota_internal.judge_sums(accs, asked.sums, asked.headrooms, at, b.polling_hint_s);
    IF j.refused AND NOT j.stale AND NOT old_snapshot THEN
        decided := quota_internal.judge_in_order(plain, groups, accs, accs, false, at, b.polling_hint_s, probe => true);
        IF decided.granted = '{}' THEN
            -- Nobody gets anything: nothing is locked, nothing is written.
            answers := decided.answers;
            refused := answers <> '{}';
            RETURN;
        END IF;
    END IF;

    IF j.refused AND j.stale AND NOT old_snapshot THEN
        swept := quota_internal.close_overdue_in_the_way(
            tenant, j.standings, ids, at, NOT b.bound AND known = '{}', NOT b.bound);
    END IF;
    IF known <> '{}' THEN
        PERFORM quota_internal.expire(tenant, known, ids, true, NOT b.bound AND NOT swept);
    END IF;
    accs := quota_internal.lock_touched(tenant, accs, ids);
    at := quota_internal.clock();
    j := quota_internal.judge_sums(accs, asked.sums, asked.headrooms, at, b.polling_hint_s);
    judged := accs;
    IF j.stale THEN
        stale := quota_internal.few_overdue(tenant, at);
        next_expiry := '-infinity';
    END IF;
    IF j.stale AND (j.refused OR stale) THEN
        -- Judged as if overdue holds were closed.
        judged := quota_internal.discount(accs, at, false);
        IF judged = accs THEN
            next_expiry := quota_internal.next_expiry(tenant, at);
        END IF;
        j := quota_internal.judge_sums(judged, asked.sums, asked.headrooms, at, b.polling_hint_s);
    END IF;
    IF j.refused OR linked THEN
        decided := quota_internal.judge_in_order(plain, groups, accs, judged, stale, at, b.polling_hint_s, probe => false);
        granted := ARRAY(SELECT r FROM unnest(plain) r WHERE r.n = ANY (decided.granted));
        answers := decided.answers;
        refused := EXISTS (SELECT FROM unnest(answers) x WHERE NOT x.granted);
        IF linked OR atomic AND refused THEN
            answers := ARRAY(
                SELECT coalesce(x, quota_internal.linked(r.n))
                FROM unnest(plain) r LEFT JOIN unnest(answers) x ON x.position = r.n AND NOT x.granted);
            granted := '{}';
        END IF;
        asked := quota_internal.batch_sums(granted, groups, cardinality(accs));
        j := quota_internal.judge_sums(judged, asked.sums, asked.headrooms, at, b.polling_hint_s);
    END IF;
    IF granted = '{}' THEN
        PERFORM quota_internal.require_unchanged(tenant, b.config_version);
        RETURN;
    END IF;
    groups := quota_internal.conclude_groups(groups, CASE WHEN stale THEN
        -- Shown after the holds are taken, with overdue holds counted as their expiry will book them, refunds of buckets too.
        (quota_internal.judge_sums(
            quota_internal.discount(quota_internal.after_holds(accs, asked.sums, at, b.polling_hint_s), at),
            ARRAY(SELECT 0 * x FROM unnest(asked.sums) x), asked.headrooms, at, b.polling_hint_s)).standings
        ELSE j.standings END, stale);
    IF answers = '{}' THEN
        answers := quota_internal.batch_grants(granted, groups, at);
    END IF;
    expires_at := (SELECT min(quota_internal.later(at, r.ttl)) FROM unnest(granted) r);
    -- A rival of the same id may have taken its time to fail: no hold is born overdue. (Three times: a ttl may just be that short.)
    IF quota_internal.batch_hold(tenant, granted, groups, at, b.config_version) < cardinality(granted)
        OR attempt <= 3 AND expires_at <= quota_internal.clock()
    THEN
        RAISE EXCEPTION USING ERRCODE = 'QT099';
    END IF;
    PERFORM quota_internal.take(tenant, j.standings, at, expires_at, next_expiry);
END
$$;

CREATE OR REPLACE FUNCTION quota.reserve_many(
    subjects text[],
    costs jsonb[],
    ids uuid[] DEFAULT NULL,
    ttls interval[] DEFAULT NULL,
    also jsonb[] DEFAULT NULL,
    headrooms numeric[] DEFAULT NULL,
    on_expiries text[] DEFAULT NULL,
    details jsonb[] DEFAULT NULL,
    atomic boolean DEFAULT false,
    tenant text DEFAULT 'default'
) RETURNS SETOF quota.batch_decision
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off AS $$
#variable_conflict use_column
DECLARE
    -- (Plans are kept, and many are made while the tables are small: none shall read a table from end to end for it.)
    size integer := cardinality(reserve_many.subjects);
    requests quota_internal.batch_request[];
    known uuid[] := '{}';
    linked boolean := false;
    decided record;
    answers quota.batch_decision[];
    one quota.batch_decision;
    i integer;
BEGIN
    IF (quota_internal.is_batch(size, reserve_many.subjects, false) AND quota_internal.is_batch(size, reserve_many.costs, false)
        AND quota_internal.is_batch(size, reserve_many.ids, true) AND quota_internal.is_batch(size, reserve_many.ttls, true)
        AND quota_internal.is_batch(size, reserve_many.also, true) AND quota_internal.is_batch(size, reserve_many.headrooms, true)
        AND quota_internal.is_batch(size, reserve_many.on_expiries, true)
        AND quota_internal.is_batch(size, reserve_many.details, true) AND atomic IS NOT NULL) IS NOT TRUE
    THEN
        PERFORM quota_internal.require_batch('subjects', size, reserve_many.subjects, false);
        PERFORM quota_internal.require_batch('costs', size, reserve_many.costs, false);
        PERFORM quota_internal.require_batch('ids', size, reserve_many.ids, true);
        PERFORM quota_internal.require_batch('ttls', size, reserve_many.ttls, true);
        PERFORM quota_internal.require_batch('also', size, reserve_many.also, true);
        PERFORM quota_internal.require_batch('headrooms', size, reserve_many.headrooms, true);
        PERFORM quota_internal.require_batch('on_expiries', size, reserve_many.on_expiries, true);
        PERFORM quota_internal.require_batch('details', size, reserve_many.details, true);
        PERFORM quota_internal.require_flag('atomic', atomic);
    END IF;
    IF subjects[1] = ALL (subjects) AND coalesce(array_remove(on_expiries, NULL) = '{}', true)
        AND coalesce(0 = ALL (array_remove(headrooms, NULL)), true)
        AND coalesce('[]' = ALL (array_remove(reserve_many.also, NULL)), true) AND NOT quota_internal.snapshot_is_old()
    THEN
        answers := quota_internal.reserve_alike(
            reserve_many.tenant, subjects[1], reserve_many.costs, reserve_many.ids, ttls, reserve_many.details);
        IF answers IS NOT NULL THEN
            RETURN QUERY SELECT x.* FROM unnest(answers) x;
            RETURN;
        END IF;
    END IF;
    requests := quota_internal.batch_requests(subjects, costs, reserve_many.ids, ttls, also, headrooms, on_expiries, details);

    FOR attempt IN 1 .. 100 LOOP
        IF reserve_many.ids IS NOT NULL THEN
            known := ARRAY(
                SELECT r.id FROM quota_internal.reservations r
                WHERE r.tenant = reserve_many.tenant AND r.id = ANY (reserve_many.ids));
        END IF;
        -- A block that can be left: its locks go with it, so that deciding anew begins without any (no deadlock).
        BEGIN
            decided := quota_internal.decide_batch(reserve_many.tenant, requests, known, atomic, linked, attempt);
            answers := decided.answers;
            FOR i IN
                SELECT n FROM generate_series(1, size) n
                WHERE cardinality(answers) < size
                EXCEPT SELECT x.position FROM unnest(answers) x
                ORDER BY 1
            LOOP
                one := quota_internal.reserve_one(
                    i, subjects[i], costs[i], ttls[i], ids[i], also[i], headrooms[i], on_expiries[i], details[i], tenant);
                IF atomic AND one.error IS NOT NULL THEN
                    PERFORM quota_internal.fail_batch(i, one.error_code, one.error_message, one.error_remedy);
                ELSIF one.error IS NULL AND NOT one.replayed AND (one.granted OR one.reason NOT IN ('closed', 'frozen')) THEN
                    -- It has become a plain request meanwhile: its place in the order counts.
                    RAISE EXCEPTION USING ERRCODE = 'QT099';
                ELSIF atomic AND NOT linked AND NOT one.granted THEN
                    linked := true;
                    RAISE EXCEPTION USING ERRCODE = 'QT099';
                END IF;
                answers := answers || one;
            END LOOP;
            RETURN QUERY SELECT x.* FROM unnest(answers) x ORDER BY x.position;
            RETURN;
        EXCEPTION WHEN SQLSTATE 'QT099' THEN
            NULL;
        END;
    END LOOP;
    RAISE EXCEPTION USING ERRCODE = 'serialization_failure',
        MESSAGE = format('the limits of tenant "%s" keep changing; no decision after 100 attempts', reserve_many.tenant),
        HINT = 'Retry with the same ids.';
END
$$;
COMMENT ON FUNCTION quota.reserve_many(text[], jsonb[], uuid[], interval[], jsonb[], numeric[], text[], jsonb[], boolean, text) IS
    'Many holds in one transaction, each decided as reserve would, in order; an error spoils only its own request.';
