// A worker in Node.js: hundreds of holds in one call, with nothing but `pg`.
//
// Reads jobs from standard input, one a line: id, subject and worst case in usd, separated by tabs. The job's own id (a UUID) is
// the reservation's: a job that is sent twice is held and paid for once. Prints a line a job: id and granted, refused or the
// error's name. Amounts are strings from end to end: a JavaScript number is a binary float.
//
//   npm install && QUOTA_DATABASE_URL=postgresql://worker@db/app node worker.mjs <jobs.tsv

import { createInterface } from "node:readline";
import { setTimeout as pause } from "node:timers/promises";
import pg from "pg";

const BATCH = Number(process.env.BATCH ?? 500);
const pool = new pg.Pool({ connectionString: process.env.QUOTA_DATABASE_URL, max: 2 });
pool.on("error", () => {}); // an idle connection was lost; the pool opens another

// A connection may be lost after the commit: the same ids again are a replay, not a second hold.
async function query(text, values) {
  for (const wait of [200, 1000, 5000, null]) {
    try {
      return (await pool.query(text, values)).rows;
    } catch (error) {
      // 40001 and 40P01: nothing happened. Without a code, or 08 and 57P: the connection. Anything else is misuse.
      const again = !error.code || /^(40001|40P01|08|57P|E)/.test(error.code);
      if (!again || wait === null) throw error;
      await pause(wait);
    }
  }
}

const reserveMany = (jobs) =>
  query(
    `SELECT position, granted, reservation, reason, retry_after_s, error, error_message
     FROM quota.reserve_many($1::text[], $2::jsonb[], ids => $3::uuid[])`,
    [jobs.map((job) => job.subject), jobs.map((job) => ({ usd: job.usd })), jobs.map((job) => job.id)],
  );

const settleMany = (used) =>
  query(`SELECT reservation, state, error, error_message FROM quota.settle_many($1::uuid[], $2::jsonb[])`, [
    used.map((one) => one.reservation),
    used.map((one) => ({ usd: one.usd })),
  ]);

async function work(_job) {
  return "0.005"; // the paid call; returns what it cost
}

async function carryOut(jobs) {
  const answers = await reserveMany(jobs);
  const used = [];
  for (const [index, answer] of answers.entries()) {
    const job = jobs[index];
    console.log(`${job.id}\t${answer.error ?? (answer.granted ? "granted" : answer.reason)}`);
    if (answer.granted) used.push({ reservation: answer.reservation, usd: await work(job) });
  }
  for (const settled of used.length ? await settleMany(used) : []) {
    if (settled.error) console.error(`${settled.reservation}: ${settled.error_message}`);
  }
}

let jobs = [];
for await (const line of createInterface({ input: process.stdin })) {
  const [id, subject, usd] = line.split("\t");
  jobs.push({ id, subject, usd });
  if (jobs.length === BATCH) {
    await carryOut(jobs);
    jobs = [];
  }
}
if (jobs.length) await carryOut(jobs);
await pool.end();
