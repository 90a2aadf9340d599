-- What people read. Views belong to the owner of the tables and show a bound login its own tenant only.

CREATE OR REPLACE VIEW quota_internal.visible_tenants AS
SELECT t.name AS tenant
FROM quota_internal.tenants t
-- IS NOT FALSE keeps it from becoming a join: the planner takes an anti-join with <> for one that hardly anybody passes, and
-- would sort whole tables to read one page.
WHERE (NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user AND g.tenant <> t.name)) IS NOT FALSE;

-- The present, for views: what quota_internal.clock() says. A relation, because a view uses relations with its owner's rights, but
-- functions with the rights of whoever reads it. The inner SELECT keeps it from being read anew for every row.
CREATE OR REPLACE VIEW quota_internal.present AS
SELECT (SELECT clock_timestamp()) AS at;

-- For the same reason in_window and refilled of limits.sql are spelled out here; a test holds the two to each other.
CREATE OR REPLACE VIEW quota.balances AS
SELECT a.tenant, a.subject, a.limit_name, a.unit, a.kind, a.capacity,
    CASE WHEN a.kind <> 'bucket' THEN CASE WHEN a.window_end <= p.at THEN 0 ELSE a.spent END END AS spent,
    CASE WHEN a.window_end <= p.at THEN 0 ELSE a.reserved END AS reserved,
    CASE WHEN a.kind = 'bucket' THEN CASE
        WHEN a.level_at = '-infinity' THEN a.capacity
        WHEN p.at <= a.level_at THEN least(a.capacity, a.level)
        ELSE least(a.capacity, a.level + a.refill_per_s * extract(epoch FROM (p.at - a.level_at)))
    END END AS level,
    CASE WHEN a.window_end > p.at THEN a.window_start END AS window_start,
    CASE WHEN a.window_end > p.at THEN a.window_end END AS window_end,
    s.frozen
FROM quota_internal.accounts a
JOIN quota_internal.visible_tenants v ON v.tenant = a.tenant
JOIN quota_internal.subjects s ON s.tenant = a.tenant AND s.name = a.subject
CROSS JOIN quota_internal.present p
WHERE a.in_force AND NOT s.retired;
COMMENT ON VIEW quota.balances IS
    'Counters as stored, overdue holds included until they are swept; quota.balance() is exact for one subject.';

CREATE OR REPLACE VIEW quota.holds AS
SELECT r.tenant, r.id AS reservation, r.subject, r.also, r.held, r.booked, r.created_at, r.expires_at,
    r.expires_at <= p.at AS overdue, true = ANY (r.line_charged) AS charge_on_expiry, r.details
FROM quota_internal.reservations r
JOIN quota_internal.visible_tenants v ON v.tenant = r.tenant
CROSS JOIN quota_internal.present p
WHERE r.state = 'held';
COMMENT ON VIEW quota.holds IS 'Open reservations: what is held and not settled yet.';

CREATE OR REPLACE VIEW quota.reservations AS
SELECT r.tenant, r.id AS reservation, r.subject, r.also, r.state, r.costs, r.held, r.booked, r.outcome, r.late, r.created_at,
    r.expires_at, r.closed_at, r.details
FROM quota_internal.reservations r
JOIN quota_internal.visible_tenants v ON v.tenant = r.tenant;
COMMENT ON VIEW quota.reservations IS 'Every reservation that is kept, open and closed.';

CREATE OR REPLACE VIEW quota.entries AS
SELECT e.tenant, e.id AS entry, e.at, e.kind, e.reservation, e.subject AS charged_to, a.subject, a.limit_name, a.unit, l.amount,
    CASE WHEN e.kind IN ('credit', 'correction_down') THEN -l.amount WHEN e.kind = 'repair' THEN 0 ELSE l.amount END
        AS signed_amount,
    l.window_start, e.details
FROM quota_internal.entries e
JOIN quota_internal.visible_tenants v ON v.tenant = e.tenant
LEFT JOIN unnest(e.line_accounts, e.line_windows, e.line_amounts) l(account, window_start, amount) ON true
LEFT JOIN quota_internal.accounts a ON a.tenant = e.tenant AND a.id = l.account;
COMMENT ON VIEW quota.entries IS 'The append-only ledger, one line per account that a booking touched.';

-- An amount reaches every limit of its unit on a subject; it is used once. Ancestors have lines of their own, so that their usage
-- rolls up what their descendants used.
CREATE OR REPLACE VIEW quota.usage AS
SELECT u.tenant, u.subject, u.unit, date_trunc('hour', u.at, 'UTC') AS hour, sum(u.amount) AS amount, count(*) AS bookings
FROM (
    SELECT x.tenant, x.entry, x.at, x.subject, x.unit, max(x.amount) AS amount
    FROM (
        SELECT e.tenant, e.entry, e.at, e.subject, e.unit, e.limit_name, sum(e.signed_amount) AS amount
        FROM quota.entries e
        WHERE e.kind NOT IN ('repair', 'carried') AND e.unit IS NOT NULL
        GROUP BY e.tenant, e.entry, e.at, e.subject, e.unit, e.limit_name
    ) x
    GROUP BY x.tenant, x.entry, x.at, x.subject, x.unit
) u
GROUP BY u.tenant, u.subject, u.unit, date_trunc('hour', u.at, 'UTC');
COMMENT ON VIEW quota.usage IS 'What was booked, by subject, unit and UTC hour; a subject''s figures include what was charged through it.';

CREATE OR REPLACE VIEW quota.subjects AS
SELECT s.tenant, s.name, s.kind, s.parent, s.lineage, s.frozen, s.retired, s.created_at, s.rate_tier
FROM quota_internal.subjects s
JOIN quota_internal.visible_tenants v ON v.tenant = s.tenant;

CREATE OR REPLACE VIEW quota.limits AS
SELECT l.tenant, l.owner, l.name, l.unit, l.kind, l.capacity, l.refill_per_s, l.period, l.time_zone, l.on_expiry, l.required
FROM quota_internal.limits l
JOIN quota_internal.visible_tenants v ON v.tenant = l.tenant
WHERE NOT l.removed;

CREATE OR REPLACE VIEW quota.tiers AS
SELECT nullif(t.tenant, '') AS tenant, t.name AS tier, t.retired, l.name AS limit_name, l.unit, l.kind, l.capacity, l.refill_per_s,
    l.period, l.time_zone
FROM quota_internal.tiers t
LEFT JOIN quota_internal.tier_limits l ON l.tenant = t.tenant AND l.tier = t.name
WHERE t.tenant = '' OR EXISTS (SELECT FROM quota_internal.visible_tenants v WHERE v.tenant = t.tenant);
COMMENT ON VIEW quota.tiers IS 'Tiers and their limits; tenant null is the built-in set.';

CREATE OR REPLACE VIEW quota.log AS
SELECT g.id, g.at, g.actor, g.on_behalf_of, g.action, g.tenant, g.target, g.reason, g.before, g.after,
    g.request_id
FROM quota_internal.admin_log g
WHERE g.tenant IS NULL OR EXISTS (SELECT FROM quota_internal.visible_tenants v WHERE v.tenant = g.tenant);
COMMENT ON VIEW quota.log IS 'Who changed what: one row per admin change, written in its transaction.';

-- The statement's time, not the clock's: a view with a volatile column is worked out as a whole before it is cut into pages.
CREATE OR REPLACE VIEW quota.keys AS
SELECT k.tenant, k.id, s.name AS subject, k.name, s.parent, s.rate_tier,
    CASE WHEN k.revoked_at IS NOT NULL THEN 'revoked'
        WHEN s.retired THEN 'retired'
        WHEN k.expires_at <= statement_timestamp() THEN 'expired'
        ELSE 'active' END AS state,
    s.frozen, k.created_at, k.expires_at, k.revoked_at, k.changed_at,
    CASE WHEN k.old_secret_until > statement_timestamp() THEN k.old_secret_until END AS old_secret_until
FROM quota_internal.api_keys k
JOIN quota_internal.visible_tenants v ON v.tenant = k.tenant
JOIN quota_internal.subjects s ON s.tenant = k.tenant AND s.name = k.subject;
COMMENT ON VIEW quota.keys IS 'API keys and the subjects that they authenticate; never their secrets.';

CREATE OR REPLACE VIEW quota.tokens AS
SELECT nullif(t.tenant, '') AS tenant, t.id, t.name, t.role,
    CASE WHEN t.revoked_at IS NOT NULL THEN 'revoked'
        WHEN t.expires_at <= statement_timestamp() THEN 'expired'
        ELSE 'active' END AS state,
    t.created_at, t.expires_at, t.revoked_at
FROM quota_internal.api_tokens t
WHERE t.tenant = '' AND NOT EXISTS (SELECT FROM quota_internal.logins g WHERE g.role = session_user)
    OR EXISTS (SELECT FROM quota_internal.visible_tenants v WHERE v.tenant = t.tenant);
COMMENT ON VIEW quota.tokens IS 'Tokens of the HTTP API; never their secrets. Tenant null: for every tenant.';

CREATE OR REPLACE VIEW quota.units AS
SELECT u.name, u.money FROM quota_internal.units u;
COMMENT ON VIEW quota.units IS 'What is counted; money says that its exhaustion is a matter of payment.';

CREATE OR REPLACE VIEW quota.tenants AS
SELECT t.name, t.ttl_maximum, t.polling_hint_s, t.keep, t.created_at
FROM quota_internal.tenants t
JOIN quota_internal.visible_tenants v ON v.tenant = t.name;
COMMENT ON VIEW quota.tenants IS 'Tenants and their settings.';
