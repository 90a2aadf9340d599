-- One price of the book, as it is read. Its columns never change: a wider row is a new type.
CREATE TYPE quota.price_row AS (
    version bigint,
    tenant text,
    provider text,
    model text,
    variant text,
    rates jsonb,
    free boolean,
    effective_from timestamptz,
    effective_until timestamptz,
    output_max bigint,
    input_max bigint,
    source text
);
