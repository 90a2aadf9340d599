-- Time and ids. The one clock of the ledger; every other function reads it once into a variable, after its locks.

CREATE OR REPLACE FUNCTION quota_internal.clock() RETURNS timestamptz
LANGUAGE sql VOLATILE AS $$
    SELECT clock_timestamp()
$$;
COMMENT ON FUNCTION quota_internal.clock() IS 'The ledger''s only clock. Tests replace this function; nothing configures it.';

-- RFC 9562, version 7: 48 bits of Unix milliseconds, then random bits. Ids that grow with time keep the primary key's inserts
-- on its last pages however many closed reservations it holds.
CREATE OR REPLACE FUNCTION quota_internal.uuid_v7() RETURNS uuid
LANGUAGE sql VOLATILE AS $$
    SELECT encode(
        set_byte(
            overlay(uuid_send(gen_random_uuid())
                PLACING substring(int8send((extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3) FROM 1 FOR 6),
            6, (get_byte(uuid_send(gen_random_uuid()), 0) & 15) | 112),
        'hex')::uuid
$$;
COMMENT ON FUNCTION quota_internal.uuid_v7() IS 'A new UUID of version 7, for callers that bring no id of their own.';

-- Adding months or days to a timestamptz depends on the session's time zone; a TTL must not.
CREATE OR REPLACE FUNCTION quota_internal.later(at timestamptz, span interval) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT (at AT TIME ZONE 'UTC' + span) AT TIME ZONE 'UTC'
$$;

-- The first instant of a local date. PostgreSQL reads a repeated midnight as its second passage and a skipped one by the offset
-- before the gap; a day begins at the first passage, or where the gap ends.
CREATE OR REPLACE FUNCTION quota_internal.first_instant(day date, time_zone text) RETURNS timestamptz
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    midnight timestamp := day::timestamp;
    found timestamptz := midnight AT TIME ZONE time_zone;
    day_before timestamptz := found - interval '24 hours';
    earlier timestamptz := (midnight - ((day_before AT TIME ZONE time_zone) - (day_before AT TIME ZONE 'UTC'))) AT TIME ZONE 'UTC';
    middle timestamptz;
BEGIN
    IF found AT TIME ZONE time_zone = midnight THEN
        RETURN CASE WHEN earlier < found AND earlier AT TIME ZONE time_zone = midnight THEN earlier ELSE found END;
    END IF;
    -- No such local time: halve the day before until the jump is found, to the microsecond.
    WHILE found - day_before > interval '1 microsecond' LOOP
        middle := day_before + (found - day_before) / 2;
        IF middle AT TIME ZONE time_zone >= midnight THEN
            found := middle;
        ELSE
            day_before := middle;
        END IF;
    END LOOP;
    RETURN found;
END
$$;

-- The window that an account opens at an instant: an interval runs from that instant, a calendar period is the tile
-- [first instant of its first date, first instant of the next period's) that the instant lies in.
CREATE OR REPLACE FUNCTION quota_internal.window_at(
    period text, time_zone text, at timestamptz, OUT window_start timestamptz, OUT window_end timestamptz
)
LANGUAGE plpgsql STABLE PARALLEL SAFE AS $$
DECLARE
    step interval;
    day date;
BEGIN
    IF period IS NULL THEN
        RETURN;
    END IF;
    IF period NOT IN ('day', 'week', 'month') THEN
        -- Months and days are counted on the local calendar, hours and less as time that passes.
        step := date_trunc('day', period::interval);
        window_start := at;
        window_end := CASE WHEN step = '0' THEN at ELSE (at AT TIME ZONE time_zone + step) AT TIME ZONE time_zone END
            + (period::interval - step);
        RETURN;
    END IF;
    step := ('1 ' || period)::interval;
    -- Clocks that fall back over midnight read yesterday's date for a while: begin one period early and walk.
    day := date_trunc(period, at AT TIME ZONE time_zone)::date - step;
    window_end := quota_internal.first_instant(day, time_zone);
    LOOP
        window_start := window_end;
        day := day + step;
        window_end := quota_internal.first_instant(day, time_zone);
        EXIT WHEN at < window_end;
    END LOOP;
END
$$;
COMMENT ON FUNCTION quota_internal.window_at(text, text, timestamptz) IS
    'Bounds [start, end) of the window that is current at an instant, for a period and an IANA zone; nulls for a lifetime.';
