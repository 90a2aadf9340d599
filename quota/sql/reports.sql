-- Reports: what was refused, held and used, by model, by pool and by route. They read what reservations keep in their details
-- (docs/reports.md); nothing is written for them. Details are anybody's JSON: what is no number from 0 to 10^15 counts as not told.

CREATE OR REPLACE VIEW quota.model_calls AS
SELECT r.tenant, r.reservation, r.subject, r.also, r.created_at AS at, r.state, r.outcome, r.details ->> 'provider' AS provider,
    r.details ->> 'model' AS model, coalesce(r.details ->> 'route', '') AS route,
    coalesce(jsonb_path_query_first(r.details, '$.attempt ? (@ >= 1 && @ <= 1e15)')::bigint, 1) AS attempt,
    jsonb_path_query_first(r.details, '$.status ? (@ >= 0 && @ <= 1e15)')::bigint AS status, r.details ->> 'flag' AS flag,
    coalesce(jsonb_path_query_first(r.details, '$.answers ? (@ >= 1 && @ <= 1e15)')::bigint, 1) AS answers,
    jsonb_path_query_first(r.details, '$.ceiling ? (@ >= 0 && @ <= 1e15)')::bigint AS ceiling,
    coalesce(jsonb_path_query_first(r.details, '$.usage.output ? (@ >= 0 && @ <= 1e15)')::bigint, 0)
        + coalesce(jsonb_path_query_first(r.details, '$.usage.output_audio ? (@ >= 0 && @ <= 1e15)')::bigint, 0) AS output_tokens,
    coalesce(jsonb_path_query_first(r.details, '$.usage.input ? (@ >= 0 && @ <= 1e15)')::bigint, 0)
        + coalesce(jsonb_path_query_first(r.details, '$.usage.input_audio ? (@ >= 0 && @ <= 1e15)')::bigint, 0) AS input_tokens,
    coalesce(jsonb_path_query_first(r.details, '$.usage.cached_input ? (@ >= 0 && @ <= 1e15)')::bigint, 0) AS cached_tokens,
    coalesce(jsonb_path_query_first(r.details, '$.usage.cache_write_5m ? (@ >= 0 && @ <= 1e15)')::bigint, 0)
        + coalesce(jsonb_path_query_first(r.details, '$.usage.cache_write_1h ? (@ >= 0 && @ <= 1e15)')::bigint, 0)
        AS cache_write_tokens,
    coalesce(r.outcome = 'ok' AND jsonb_typeof(r.details -> 'usage') = 'object', false) AS answered,
    CASE r.details -> 'truncated' WHEN 'true' THEN true WHEN 'false' THEN false END AS truncated,
    coalesce((r.costs ->> 'quota_tokens')::numeric,
        (r.costs ->> 'quota_input_tokens')::numeric + (r.costs ->> 'quota_output_tokens')::numeric) AS quota_held,
    coalesce((r.booked ->> 'quota_tokens')::numeric,
        (r.booked ->> 'quota_input_tokens')::numeric + (r.booked ->> 'quota_output_tokens')::numeric) AS quota_settled
FROM quota.reservations r
WHERE r.details ->> 'provider' IS NOT NULL AND r.details ->> 'model' IS NOT NULL AND r.details ? 'ceiling';
COMMENT ON VIEW quota.model_calls IS 'Calls of models that were held, with what their details tell.';

-- A refusal leaves nothing behind. Whoever was refused may tell so later, in sums: a record of nothing with these details.
CREATE OR REPLACE VIEW quota.model_refusals AS
SELECT r.tenant, r.reservation, r.created_at AS at, t.told ->> 'provider' AS provider, t.told ->> 'model' AS model,
    coalesce(t.told ->> 'route', '') AS route, t.told ->> 'reason' AS reason, t.told ->> 'limit_subject' AS limit_subject,
    t.told ->> 'limit_name' AS limit_name,
    jsonb_path_query_first(t.told, '$.refused ? (@ >= 0 && @ <= 1e15)')::bigint AS refused,
    coalesce(jsonb_path_query_first(t.told, '$.retried ? (@ >= 0 && @ <= 1e15)')::bigint, 0) AS retried
FROM quota.reservations r
CROSS JOIN LATERAL jsonb_path_query(r.details, '$.refusals[*] ? (@.type() == "object")') t(told)
WHERE r.outcome = 'record' AND r.details ? 'refusals' AND t.told ->> 'provider' IS NOT NULL AND t.told ->> 'model' IS NOT NULL
    AND t.told ->> 'reason' IS NOT NULL AND jsonb_path_exists(t.told, '$.refused ? (@ >= 0 && @ <= 1e15)');
COMMENT ON VIEW quota.model_refusals IS 'Calls of models that the ledger refused, in the sums in which their clients told of them.';

CREATE OR REPLACE VIEW quota.route_calls AS
SELECT r.tenant, r.reservation, r.subject, r.created_at AS at, r.details ->> 'route' AS route, r.details ->> 'outcome' AS outcome,
    jsonb_path_query_first(r.details, '$.estimate ? (@ >= 0 && @ <= 1e15)')::numeric AS estimate,
    jsonb_path_query_first(r.details, '$.cost ? (@ >= 0 && @ <= 1e15)')::numeric AS cost,
    jsonb_path_query_first(r.details, '$.rows ? (@ >= 0 && @ <= 1e15)')::bigint AS rows,
    jsonb_path_query_first(r.details, '$.node_calls ? (@ >= 0 && @ <= 1e15)')::bigint AS node_calls,
    jsonb_path_query_first(r.details, '$.latency_ms ? (@ >= 0 && @ <= 1e15)')::numeric AS latency_ms,
    jsonb_path_query_first(r.details, '$.status ? (@ >= 0 && @ <= 1e15)')::bigint AS status,
    jsonb_path_query_first(r.details, '$.response_bytes ? (@ >= 0 && @ <= 1e15)')::bigint AS response_bytes,
    jsonb_path_query_first(r.details, '$.database_ms ? (@ >= 0 && @ <= 1e15)')::numeric AS database_ms,
    jsonb_path_query_first(r.details, '$.rows_read ? (@ >= 0 && @ <= 1e15)')::bigint AS rows_read,
    r.details -> 'cost_header_missing' IS NOT DISTINCT FROM 'true' AS cost_header_missing
FROM quota.reservations r
WHERE r.details ->> 'route' IS NOT NULL AND r.details ->> 'outcome' IS NOT NULL
    AND jsonb_path_exists(r.details, '$.cost ? (@ >= 0 && @ <= 1e15)');
COMMENT ON VIEW quota.route_calls IS 'Calls of routes that were settled, with what their details tell.';

-- The time that a report is about: the seven days before now, unless somebody says otherwise.
CREATE OR REPLACE FUNCTION quota_internal.report_range(INOUT since timestamptz, INOUT until timestamptz)
LANGUAGE plpgsql STABLE AS $$
BEGIN
    until := coalesce(until, quota_internal.clock());
    since := coalesce(since, until - interval '7 days');
    IF since >= until THEN
        PERFORM quota_internal.fail('invalid_argument', format('a report since %s until %s', since, until),
            'A report begins before it ends.');
    END IF;
END
$$;

CREATE OR REPLACE FUNCTION quota_internal.ratio(part numeric, whole numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT trim_scale(round(part / nullif(whole, 0), 4))
$$;

-- A statistic as it is shown: four digits of a fraction; of what is none (a correlation with what never changes), null.
CREATE OR REPLACE FUNCTION quota_internal.shown(statistic double precision) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN abs(statistic) < 1e15 THEN trim_scale(round(statistic::numeric, 4)) END
$$;

CREATE OR REPLACE FUNCTION quota.report_models(
    since timestamptz DEFAULT NULL, until timestamptz DEFAULT NULL, tenant text DEFAULT 'default'
) RETURNS TABLE (
    provider text, model text, route text,
    attempts bigint, refused bigint, throttled bigint, throttle_rate numeric,
    retries bigint, retry_rate numeric, retry_correlation numeric,
    failed bigint, answered bigint, truncated bigint, truncation_rate numeric,
    ceiling_p50 bigint, output_p50 bigint, output_p95 bigint, output_p99 bigint, efficiency_p50 numeric, recommended_ceiling bigint,
    input_tokens numeric, cached_tokens numeric, cache_write_tokens numeric, output_tokens numeric, billed_tokens numeric,
    quota_held numeric, quota_settled numeric
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    during record;
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    SELECT * INTO during FROM quota_internal.report_range(since, until);
    RETURN QUERY
    WITH calls AS (
        -- The ceiling is of all answers together; what a caller declares is of one.
        SELECT c.*, ceil(c.ceiling::numeric / c.answers) AS declared, ceil(c.output_tokens::numeric / c.answers) AS came_back
        FROM quota.model_calls c
        WHERE c.tenant = report_models.tenant AND c.at >= during.since AND c.at < during.until
    ), refusals AS (
        SELECT f.* FROM quota.model_refusals f
        WHERE f.tenant = report_models.tenant AND f.at >= during.since AND f.at < during.until
    ), minutes AS (
        SELECT x.provider, x.model, x.route, sum(x.pushed_back) AS pushed_back, sum(x.retried) AS retried
        FROM (
            SELECT c.provider, c.model, c.route, c.at, (c.status IS NOT DISTINCT FROM 429)::int AS pushed_back,
                (c.attempt > 1)::int AS retried
            FROM calls c
            UNION ALL
            SELECT f.provider, f.model, f.route, f.at, f.refused, f.retried FROM refusals f
        ) x
        GROUP BY x.provider, x.model, x.route, date_trunc('minute', x.at)
    ), asked AS (
        SELECT m.provider, m.model, m.route, sum(m.retried)::bigint AS retries, corr(m.pushed_back, m.retried) AS correlation
        FROM minutes m GROUP BY m.provider, m.model, m.route
    ), told AS (
        SELECT f.provider, f.model, f.route, sum(f.refused)::bigint AS refused
        FROM refusals f GROUP BY f.provider, f.model, f.route
    ), made AS (
        SELECT c.provider, c.model, c.route, count(*) AS calls,
            count(*) FILTER (WHERE c.status = 429) AS throttled,
            count(*) FILTER (WHERE c.outcome IN ('timeout', 'unknown') OR c.status >= 500) AS failed,
            count(*) FILTER (WHERE c.answered) AS answered,
            count(*) FILTER (WHERE c.truncated) AS truncated,
            count(*) FILTER (WHERE c.truncated IS NOT NULL) AS told_how_it_ended,
            percentile_disc(0.5) WITHIN GROUP (ORDER BY c.declared) FILTER (WHERE c.answered)::bigint AS ceiling_p50,
            percentile_disc(0.5) WITHIN GROUP (ORDER BY c.came_back) FILTER (WHERE c.answered)::bigint AS output_p50,
            percentile_disc(0.95) WITHIN GROUP (ORDER BY c.came_back) FILTER (WHERE c.answered)::bigint AS output_p95,
            percentile_disc(0.99) WITHIN GROUP (ORDER BY c.came_back) FILTER (WHERE c.answered)::bigint AS output_p99,
            percentile_disc(0.5) WITHIN GROUP (ORDER BY quota_internal.ratio(c.output_tokens, c.ceiling))
                FILTER (WHERE c.answered) AS efficiency_p50,
            sum(c.input_tokens) AS input_tokens, sum(c.cached_tokens) AS cached_tokens,
            sum(c.cache_write_tokens) AS cache_write_tokens, sum(c.output_tokens) AS output_tokens,
            sum(c.quota_held) AS quota_held, sum(c.quota_settled) AS quota_settled
        FROM calls c GROUP BY c.provider, c.model, c.route
    )
    SELECT a.provider, a.model, a.route,
        coalesce(m.calls, 0) + coalesce(t.refused, 0), coalesce(t.refused, 0), coalesce(m.throttled, 0),
        quota_internal.ratio(coalesce(t.refused, 0) + coalesce(m.throttled, 0), coalesce(m.calls, 0) + coalesce(t.refused, 0)),
        a.retries, quota_internal.ratio(a.retries, coalesce(m.calls, 0) + coalesce(t.refused, 0)), quota_internal.shown(a.correlation),
        coalesce(m.failed, 0), coalesce(m.answered, 0), coalesce(m.truncated, 0), quota_internal.ratio(m.truncated, m.told_how_it_ended),
        m.ceiling_p50, m.output_p50, m.output_p95, m.output_p99, m.efficiency_p50,
        -- p95 and a fifth. Of fewer than twenty answers the p95 is the largest one, which says nothing.
        CASE WHEN m.answered >= 20 THEN ceil(m.output_p95 * 1.2)::bigint END,
        coalesce(m.input_tokens, 0), coalesce(m.cached_tokens, 0), coalesce(m.cache_write_tokens, 0), coalesce(m.output_tokens, 0),
        coalesce(m.input_tokens + m.cached_tokens + m.cache_write_tokens + m.output_tokens, 0),
        trim_scale(m.quota_held), trim_scale(m.quota_settled)
    FROM asked a
    LEFT JOIN told t USING (provider, model, route)
    LEFT JOIN made m USING (provider, model, route)
    ORDER BY a.provider, a.model, a.route;
END
$$;
COMMENT ON FUNCTION quota.report_models(timestamptz, timestamptz, text) IS
    'Per model and route: throttle rate, retry health, truncation, and how much of the declared ceilings comes back.';

CREATE OR REPLACE FUNCTION quota.report_pools(
    since timestamptz DEFAULT NULL, until timestamptz DEFAULT NULL, tenant text DEFAULT 'default'
) RETURNS TABLE (
    pool text, limit_name text, unit text, span text, quota numeric,
    settled numeric, spans bigint, mean_use numeric, peak_use numeric, peak_at timestamptz,
    peak_holds bigint, peak_held_use numeric, refused bigint, throttled bigint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    during record;
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    SELECT * INTO during FROM quota_internal.report_range(since, until);
    RETURN QUERY
    WITH pools AS (
        SELECT a.id, a.subject, a.limit_name, a.unit, a.kind, a.capacity,
            CASE a.kind WHEN 'bucket' THEN 'minute' ELSE coalesce(a.period, 'lifetime') END AS span
        FROM quota_internal.accounts a
        JOIN quota_internal.subjects s ON s.tenant = a.tenant AND s.name = a.subject
        WHERE a.tenant = report_pools.tenant AND a.in_force AND a.kind <> 'concurrency' AND s.kind = 'pool' AND NOT s.retired
    ), booked AS (
        -- Rates by the minute in which they were settled, as the provider's own figures are; budgets by their windows.
        SELECT p.id, CASE p.kind WHEN 'bucket' THEN date_trunc('minute', e.at) ELSE coalesce(l.window_start, '-infinity') END AS span_at,
            sum(CASE WHEN e.kind IN ('credit', 'correction_down') THEN -l.amount ELSE l.amount END) AS amount
        FROM quota_internal.entries e
        CROSS JOIN LATERAL unnest(e.line_accounts, e.line_windows, e.line_amounts) l(account, window_start, amount)
        JOIN pools p ON p.id = l.account
        WHERE e.tenant = report_pools.tenant AND e.at >= during.since AND e.at < during.until AND e.kind NOT IN ('repair', 'carried')
        GROUP BY 1, 2
    ), used AS (
        SELECT b.id, sum(b.amount) AS settled, count(*) AS spans, avg(b.amount) AS mean, max(b.amount) AS peak,
            (array_agg(b.span_at ORDER BY b.amount DESC, b.span_at))[1] AS peak_at
        FROM booked b GROUP BY b.id
    ), placed AS (
        SELECT h.id, max(h.holds) AS holds, max(h.amount) AS amount
        FROM (
            SELECT p.id, count(*) AS holds, sum(coalesce(r.costs ->> p.unit, r.held ->> p.unit)::numeric) AS amount
            FROM quota_internal.reservations r
            JOIN pools p ON p.id = ANY (r.line_accounts) AND p.kind = 'bucket'
            WHERE r.tenant = report_pools.tenant AND r.created_at >= during.since AND r.created_at < during.until
                AND r.outcome IS DISTINCT FROM 'record'
            GROUP BY p.id, date_trunc('minute', r.created_at)
        ) h
        GROUP BY h.id
    ), told AS (
        SELECT f.limit_subject, f.limit_name, sum(f.refused)::bigint AS refused
        FROM quota.model_refusals f
        WHERE f.tenant = report_pools.tenant AND f.at >= during.since AND f.at < during.until
        GROUP BY f.limit_subject, f.limit_name
    ), pushed_back AS (
        SELECT x.subject, count(*) AS throttled
        FROM quota.model_calls c CROSS JOIN LATERAL unnest(c.also || c.subject) x(subject)
        WHERE c.tenant = report_pools.tenant AND c.at >= during.since AND c.at < during.until AND c.status = 429
        GROUP BY x.subject
    )
    SELECT p.subject, p.limit_name, p.unit, p.span, trim_scale(p.capacity),
        trim_scale(coalesce(u.settled, 0)), coalesce(u.spans, 0), quota_internal.ratio(u.mean, p.capacity),
        quota_internal.ratio(u.peak, p.capacity), nullif(u.peak_at, '-infinity'),
        b.holds, quota_internal.ratio(b.amount, p.capacity), coalesce(t.refused, 0), coalesce(x.throttled, 0)
    FROM pools p
    LEFT JOIN used u ON u.id = p.id
    LEFT JOIN placed b ON b.id = p.id
    LEFT JOIN told t ON t.limit_subject = p.subject AND t.limit_name = p.limit_name
    LEFT JOIN pushed_back x ON x.subject = p.subject
    ORDER BY p.subject, p.limit_name;
END
$$;
COMMENT ON FUNCTION quota.report_pools(timestamptz, timestamptz, text) IS
    'Per quota of a pool: how much of it was settled and held in the busiest minute or day, and what it refused.';

CREATE OR REPLACE FUNCTION quota.report_calibration(
    since timestamptz DEFAULT NULL, until timestamptz DEFAULT NULL, tenant text DEFAULT 'default'
) RETURNS TABLE (
    route text, calls bigint, failed bigint, failure_rate numeric, header_missing bigint, cost numeric, estimate_short numeric,
    load text, load_ms numeric, ms_per_cost numeric, suggested_factor numeric, latency_p50_ms numeric, latency_p95_ms numeric,
    latency_correlation numeric, database_correlation numeric, bytes_correlation numeric, rows_read_correlation numeric,
    failure_correlation numeric,
    ms_per_row numeric, suggested_node_percent numeric, suggested_base_cost numeric, suggested_failure_cost numeric,
    suggested_max_latency_ms numeric, suggested_max_response_bytes bigint, suggested_max_rows_read bigint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    during record;
BEGIN
    PERFORM quota_internal.require_tenant(tenant);
    SELECT * INTO during FROM quota_internal.report_range(since, until);
    RETURN QUERY
    WITH told AS (
        -- Whoever leaves while it is answered is no failure of the route.
        SELECT c.*, c.outcome NOT IN ('answered', 'gone') AS is_failed,
            -- Routes are compared by one measure: the database's time where at least half of the calls tell it.
            2 * count(c.database_ms) OVER () >= count(*) OVER () AS by_database
        FROM quota.route_calls c
        WHERE c.tenant = report_calibration.tenant AND c.at >= during.since AND c.at < during.until
    ), calls AS (
        SELECT t.*, CASE WHEN t.by_database THEN t.database_ms ELSE t.latency_ms END AS load_ms,
            t.rows::double precision AS x1, t.rows::double precision * t.node_calls AS x2
        FROM told t
    ), sums AS (
        SELECT c.route, grouping(c.route) = 1 AS is_total, count(*) AS calls, count(*) FILTER (WHERE c.is_failed) AS failed,
            count(*) FILTER (WHERE c.cost_header_missing) AS header_missing, sum(c.cost) AS cost,
            count(*) FILTER (WHERE c.cost > c.estimate) AS short, count(c.estimate) AS estimated, bool_or(c.by_database) AS by_database,
            sum(c.load_ms) AS load_ms, sum(c.cost) FILTER (WHERE c.load_ms IS NOT NULL) AS loaded_cost,
            avg(c.load_ms) FILTER (WHERE c.is_failed) AS failed_ms,
            percentile_cont(0.5) WITHIN GROUP (ORDER BY c.latency_ms::double precision) AS latency_p50,
            percentile_cont(0.95) WITHIN GROUP (ORDER BY c.latency_ms::double precision) AS latency_p95,
            percentile_cont(0.99) WITHIN GROUP (ORDER BY c.latency_ms::double precision) AS latency_p99,
            percentile_disc(0.99) WITHIN GROUP (ORDER BY c.response_bytes) AS bytes_p99,
            percentile_disc(0.99) WITHIN GROUP (ORDER BY c.rows_read) AS rows_read_p99,
            corr(c.cost, c.latency_ms) AS latency, corr(c.cost, c.database_ms) AS database, corr(c.cost, c.response_bytes) AS bytes,
            corr(c.cost, c.rows_read) AS rows_read, corr(c.cost, c.is_failed::int) AS failure
        FROM calls c GROUP BY GROUPING SETS ((c.route), ())
    ), moments AS (
        -- Least squares of load = base + a x rows + b x (rows x node calls), over the calls that were answered.
        SELECT c.route, grouping(c.route) = 1 AS is_total, avg(c.load_ms)::double precision AS y, avg(c.x1) AS x1, avg(c.x2) AS x2,
            var_pop(c.x1) AS v1, var_pop(c.x2) AS v2, covar_pop(c.x1, c.x2) AS v12,
            covar_pop(c.load_ms, c.x1) AS y1, covar_pop(c.load_ms, c.x2) AS y2
        FROM calls c
        WHERE c.outcome = 'answered' AND c.load_ms IS NOT NULL AND c.x1 IS NOT NULL AND c.x2 IS NOT NULL
        GROUP BY GROUPING SETS ((c.route), ())
    ), slopes AS (
        -- Where node calls never vary apart from rows, rows alone explain what they can.
        SELECT m.*, CASE
                WHEN m.v1 * m.v2 - m.v12 ^ 2 > 1e-9 * m.v1 * m.v2 THEN (m.y1 * m.v2 - m.y2 * m.v12) / (m.v1 * m.v2 - m.v12 ^ 2)
                WHEN m.v1 > 0 THEN m.y1 / m.v1
            END AS a,
            CASE WHEN m.v1 * m.v2 - m.v12 ^ 2 > 1e-9 * m.v1 * m.v2 THEN (m.y2 * m.v1 - m.y1 * m.v12) / (m.v1 * m.v2 - m.v12 ^ 2)
            END AS b
        FROM moments m
    )
    SELECT s.route, s.calls, s.failed, quota_internal.ratio(s.failed, s.calls), s.header_missing, trim_scale(s.cost),
        quota_internal.ratio(s.short, s.estimated), CASE WHEN s.by_database THEN 'database_ms' ELSE 'latency_ms' END, trim_scale(s.load_ms),
        quota_internal.ratio(s.load_ms, s.loaded_cost),
        quota_internal.ratio(s.load_ms / nullif(s.loaded_cost, 0), w.load_ms / nullif(w.loaded_cost, 0)),
        quota_internal.shown(s.latency_p50), quota_internal.shown(s.latency_p95),
        quota_internal.shown(s.latency), quota_internal.shown(s.database), quota_internal.shown(s.bytes),
        quota_internal.shown(s.rows_read), quota_internal.shown(s.failure),
        quota_internal.shown(l.a),
        CASE WHEN l.a > 0 THEN quota_internal.shown(100 * l.b / l.a) END,
        CASE WHEN l.a > 0 THEN quota_internal.shown((l.y - l.a * l.x1 - coalesce(l.b, 0) * l.x2) / l.a) END,
        quota_internal.ratio(s.failed_ms, w.load_ms / nullif(w.loaded_cost, 0)),
        ceil(quota_internal.shown(s.latency_p99) * 1.2), ceil(s.bytes_p99 * 1.2)::bigint, ceil(s.rows_read_p99 * 1.2)::bigint
    FROM sums s
    CROSS JOIN (SELECT x.load_ms, x.loaded_cost FROM sums x WHERE x.is_total) w
    LEFT JOIN slopes l ON l.route IS NOT DISTINCT FROM s.route AND l.is_total = s.is_total
    WHERE s.calls > 0
    -- All routes together in front, then the worst priced ones: those that cost nothing and load something first of all.
    ORDER BY s.is_total DESC, s.loaded_cost = 0 AND s.load_ms > 0 DESC NULLS LAST, 11 DESC NULLS LAST, s.route;
END
$$;
COMMENT ON FUNCTION quota.report_calibration(timestamptz, timestamptz, text) IS
    'Per route: what its settled cost says of latency, load and failures, and coefficients and bounds that would fit.';
