// The query of the rollouts page, kept in the address, so that a link to it can be shared.
import { toRun } from "../router.js";

/** Names as the server knows them; the page of the list comes besides. */
const FIELDS = ["env", "actor", "state", "finish", "error", "domain", "step_from", "step_to", "reward_from", "reward_to",
  "length_from", "length_to", "ticket", "row", "text", "sort"];
export const PAGE = 50;

/** The query of an address: only what is set. */
export function queryOf(params) {
  return Object.fromEntries(FIELDS.map((name) => [name, params.get(name)]).filter(([, value]) => value));
}

export function pageOf(params) {
  const page = Number.parseInt(params.get("page"), 10);
  return page > 1 ? page : 1;
}

/** The address of a page of the list. */
export function toList(run, query, page = 1) {
  return toRun(run.name, "rollouts", { ...query, ...(page > 1 ? { page } : {}) });
}

/** The address of one rollout, found by this query; `view` is `group`, `episode` or nothing for what was said. */
export function toOne(run, id, query, view = null) {
  return toRun(run.name, "rollouts", { id, ...(view ? { view } : {}), ...query });
}

/** Whether anything is filtered, and not only sorted. */
export function isFiltered(query) {
  return Object.keys(query).some((name) => name !== "sort");
}
