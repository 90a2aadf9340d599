-- Pure arithmetic: what an account reads at an instant, whether a cost fits, and how long to wait. No table is touched here.
-- The functions are single expressions, so that the planner folds them into whatever calls them.

-- A window that has ended counts nothing any more.
CREATE OR REPLACE FUNCTION quota_internal.in_window(amount numeric, window_end timestamptz, at timestamptz) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN window_end <= at THEN 0 ELSE amount END
$$;

-- level + refill x elapsed, cut to the capacity. A bucket never touched is full; a clock that steps back refills nothing.
CREATE OR REPLACE FUNCTION quota_internal.refilled(
    level numeric, level_at timestamptz, capacity numeric, refill_per_s numeric, at timestamptz
) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN level_at = '-infinity' THEN capacity
        WHEN at <= level_at THEN least(capacity, level)
        ELSE least(capacity, level + refill_per_s * extract(epoch FROM (at - level_at)))
    END
$$;

CREATE OR REPLACE FUNCTION quota_internal.clamp(level numeric, capacity numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT greatest(0, least(capacity, level))
$$;

-- The part of a capacity that a caller with headroom may use; whole slots are rounded up.
CREATE OR REPLACE FUNCTION quota_internal.usable(kind text, capacity numeric, headroom numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN headroom = 0 THEN capacity
        WHEN kind = 'concurrency' THEN ceil(capacity * (1 - headroom))
        ELSE capacity * (1 - headroom)
    END
$$;

-- The one comparison: null when the cost fits, else the reason. Exactly full fits; a cost of 0 fits anywhere.
CREATE OR REPLACE FUNCTION quota_internal.verdict(
    kind text, capacity numeric, usable numeric, requested numeric, spent numeric, reserved numeric, level numeric
) RETURNS text
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE
        WHEN requested = 0 OR capacity IS NULL THEN NULL
        WHEN requested > usable THEN 'too_large'
        WHEN kind = 'bucket' THEN CASE WHEN level - (capacity - usable) < requested THEN 'rate' END
        WHEN kind = 'concurrency' THEN CASE WHEN reserved + requested > usable THEN 'concurrency' END
        WHEN spent + requested > usable THEN 'exhausted'
        WHEN spent + reserved + requested > usable THEN 'held'
    END
$$;

-- Reasons by precedence; the first one among several violations is the answer's.
CREATE OR REPLACE FUNCTION quota_internal.precedence(reason text) RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT array_position(ARRAY['closed', 'frozen', 'too_large', 'exhausted', 'rate', 'concurrency', 'held'], reason)
$$;

-- needed / refill_per_s in seconds, rounded up to the microsecond, so that waiting exactly that long succeeds.
CREATE OR REPLACE FUNCTION quota_internal.refill_time_s(needed numeric, refill_per_s numeric) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN refill_per_s > 0 THEN
        (div(needed * 1000000, refill_per_s) + CASE WHEN mod(needed * 1000000, refill_per_s) > 0 THEN 1 ELSE 0 END) * 0.000001
    END
$$;

-- Seconds until this cost would fit if nobody else did anything; null when waiting cannot help.
CREATE OR REPLACE FUNCTION quota_internal.wait_s(
    reason text, capacity numeric, usable numeric, requested numeric, level numeric, refill_per_s numeric,
    level_at timestamptz, window_end timestamptz, at timestamptz, polling_hint_s numeric
) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE reason
        WHEN 'exhausted' THEN extract(epoch FROM (window_end - at))
        WHEN 'rate' THEN quota_internal.refill_time_s(requested + (capacity - usable) - level, refill_per_s)
            + CASE WHEN level_at > at THEN extract(epoch FROM (level_at - at)) ELSE 0 END
        WHEN 'held' THEN least(polling_hint_s, extract(epoch FROM (window_end - at)))
        WHEN 'concurrency' THEN polling_hint_s
    END
$$;

-- What is left: never below 0, null when unlimited.
CREATE OR REPLACE FUNCTION quota_internal.available(
    kind text, capacity numeric, spent numeric, reserved numeric, level numeric
) RETURNS numeric
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT CASE WHEN kind = 'bucket' THEN level WHEN capacity IS NOT NULL THEN greatest(0, capacity - spent - reserved) END
$$;
