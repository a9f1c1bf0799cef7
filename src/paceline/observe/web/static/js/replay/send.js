// Starting and ending a replay: the only requests that change something, so they are POSTs in JSON from our own page.
import { address, ask, Refused } from "../api.js";

const LOOK_MS = 500;

async function post(path, run, body) {
  let answer;
  try {
    answer = await fetch(address(path, { run }), {
      method: "POST", headers: { "Content-Type": "application/json", Accept: "application/json" }, body: JSON.stringify(body),
    });
  } catch {
    throw new Refused("The server does not answer. Is `paceline ui` still running?", 0);
  }
  const told = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Refused(told.error || `The server answered ${answer.status}.`, answer.status);
  return told.job;
}

export const start = (run, step, settings) => post("replay/start", run, { step, settings });
export const cancel = (run) => post("replay/cancel", run, {});

/** Look at a job until it ends; `tell` gets its progress. Null when `left()` says that the reader has left. */
export async function ended(run, job, tell, left) {
  while (job?.state === "working") {
    tell(job);
    await new Promise((done) => setTimeout(done, LOOK_MS));
    if (left()) return null;
    ({ job } = await ask("replay/job", { run }));
  }
  return job;
}
