-- The rows that the batch functions answer: what the single function answers, its place in the batch, or the error of this one
-- request. Their columns never change: a wider answer is a new type.

CREATE TYPE quota.batch_decision AS (
    position integer,        -- of the request in the batch, from 1
    granted boolean,
    reservation uuid,
    state text,
    expires_at timestamptz,
    replayed boolean,
    reason text,
    limit_subject text,
    limit_name text,
    unit text,
    capacity numeric,
    spent numeric,
    reserved numeric,
    requested numeric,
    retry_after_s numeric,
    remaining jsonb,
    violations jsonb,
    error text,              -- its name, such as invalid_amount; null when the request was answered
    error_code text,         -- its SQLSTATE
    error_message text,
    error_remedy text
);

CREATE TYPE quota.batch_settlement AS (
    position integer,
    reservation uuid,
    state text,
    late boolean,
    replayed boolean,
    overage jsonb,
    error text,
    error_code text,
    error_message text,
    error_remedy text
);

CREATE TYPE quota.batch_release AS (
    position integer,
    reservation uuid,
    state text,
    replayed boolean,
    error text,
    error_code text,
    error_message text,
    error_remedy text
);

-- One request of a batch, taken apart.
CREATE TYPE quota_internal.batch_request AS (
    n integer,               -- its position
    g integer,               -- requests of one group ask the same units of the same subjects
    subject text,
    also text[],
    costs jsonb,             -- by value; null when something is not in order
    units text[],
    amounts numeric[],       -- of the units; once its lines are known, of the lines
    held jsonb,
    id uuid,
    first integer,           -- the position of the first plain request with the same id
    ttl interval,
    headroom numeric,
    on_expiry text,
    details jsonb
);

-- What the requests of a group have in common: the accounts, by their places among those of the batch, and what their holds and
-- answers show alike.
CREATE TYPE quota_internal.batch_group AS (
    g integer,
    accounts integer[],
    sources integer[],       -- which of the request's amounts each line takes; null: 1, of a unit that counts by itself
    slots integer[],         -- lines that take whole slots only
    implied jsonb,           -- the units that count by themselves
    ids bigint[],
    windows timestamptz[],
    charged boolean[],       -- as the limits say
    chargeable boolean[],    -- as a request says that charges whatever the limits say
    nothing numeric[],
    tightest integer,        -- the line whose limit the answer names
    answer quota.decision
);

-- One reservation of a batch that is closed: what it held, what is booked of it.
CREATE TYPE quota_internal.batch_closing AS (
    n integer,
    id uuid,
    subject text,
    held jsonb,
    totals jsonb,            -- null: nothing is booked, the hold is released
    accounts bigint[],
    windows timestamptz[],
    line_held numeric[],
    line_booked numeric[],
    exceeds boolean,         -- some total is above what was held
    outcome text,
    details jsonb
);

-- What the closings of a batch come to on one account.
CREATE TYPE quota_internal.batch_change AS (
    id bigint,
    freed numeric,
    spent numeric,
    level numeric,
    ordered boolean          -- a bucket that would be cut on the way: the sum is not what one after the other gives
);
