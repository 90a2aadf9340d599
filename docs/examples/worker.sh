#!/usr/bin/env bash
# A worker in bash and psql: hundreds of holds in one call, no library.
#
# Reads jobs from standard input, one a line: id, subject and worst case in usd, separated by tabs. The job's own id (a UUID) is
# the reservation's: a job that is sent twice is held and paid for once. Prints a line a job: id and granted, refused or the
# error's name.
#
#   QUOTA_DATABASE_URL=postgresql://worker@db/app docs/examples/worker.sh <jobs.tsv
set -euo pipefail
: "${QUOTA_DATABASE_URL:?the database of the ledger}"
batch=${BATCH:-500}

query() { # SQL on standard input; its variable :'lines' is the first argument
    psql "$QUOTA_DATABASE_URL" --no-psqlrc --quiet --no-align --tuples-only --field-separator=$'\t' \
        --set=ON_ERROR_STOP=1 --set=lines="$1"
}

# Column n of all lines as an array, in order: what reserve_many and settle_many take.
columns='WITH line AS (
    SELECT string_to_array(text, E'"'\\t'"') AS f, n FROM string_to_table(:'"'lines'"', E'"'\\n'"') WITH ORDINALITY t(text, n)
)'

reserve() {
    query "$1" <<SQL
$columns
SELECT r.reservation, coalesce(r.error, CASE WHEN r.granted THEN 'granted' ELSE r.reason END), (SELECT f[1] FROM line WHERE n = r.position)
FROM quota.reserve_many(
    (SELECT array_agg(f[2] ORDER BY n) FROM line),
    (SELECT array_agg(jsonb_build_object('usd', f[3]) ORDER BY n) FROM line),
    ids => (SELECT array_agg(f[1]::uuid ORDER BY n) FROM line)) r
SQL
}

settle() {
    query "$1" <<SQL
$columns
SELECT s.reservation, s.error, s.error_message
FROM quota.settle_many(
    (SELECT array_agg(f[1]::uuid ORDER BY n) FROM line),
    (SELECT array_agg(jsonb_build_object('usd', f[2]) ORDER BY n) FROM line)) s
WHERE s.error IS NOT NULL
SQL
}

work() { # the paid call of one job; prints what it cost
    echo 0.005
}

# A connection may be lost after the commit: the same ids again are a replay, not a second hold.
again() {
    for pause in 0.2 1 5; do
        "$@" && return
        sleep "$pause"
    done
    "$@"
}

while mapfile -t -n "$batch" jobs && ((${#jobs[@]})); do
    answers=$(again reserve "$(IFS=$'\n'; echo "${jobs[*]}")")
    used=()
    while IFS=$'\t' read -r reservation answer job; do
        printf '%s\t%s\n' "$job" "$answer"
        [ "$answer" != granted ] || used+=("$reservation"$'\t'"$(work "$job")")
    done <<<"$answers"
    ((${#used[@]} == 0)) || again settle "$(IFS=$'\n'; echo "${used[*]}")" >&2
done
